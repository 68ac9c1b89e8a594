"""One slow worker of four at parameter servers: updates per second, and held-out loss against time and against samples.

    python benchmarks/server_slow_worker.py [--slow 5] [--seconds 20] [--seeds 3] [--json slow-worker.json]
    python benchmarks/plots.py slow-worker.json -o docs/methods/server-slow-worker.svg

Four workers learn handwritten digits (the network of `compression.py`, SGD with momentum), and sleep in every step as
if they computed for so long, the last one `--slow` times as long as the others. Sleeping workers need no core, so four
of them on two cores show what four machines would. Every mode trains for the same time: *sync* waits for all, *backups*
leaves out the last of each round, *bounded* lets the quick ones be some steps ahead, *async* waits for nobody.

The first worker keeps its weights now and then, and the losses of these are found when the time is over. Samples are
those of the gradients that all workers pushed; with backups those that came too late are among them.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import logging
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from compression import GLOBAL_BATCH, MOMENTUM, RATE, DigitsNet
from torch import nn

import weft
from weft.plan.plan import Axes, Data, Plan, Server
from weft.training.data.datasets import digits

NUM_WORKERS, STEP_S, KEEP_S = 4, 0.05, 0.5
MODES: dict[str, dict[str, Any]] = {
    "sync": {"mode": "sync"},
    "backups 1": {"mode": "sync", "backups": 1},
    "bounded 4": {"mode": "bounded", "staleness": 4},
    "async": {"mode": "async"},
    "async, compensated": {"mode": "async", "compensation": 0.04},
}


class Sleeping(nn.Module):
    """A model on a machine that takes so many seconds for a step."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.model, self.seconds = DigitsNet(), seconds

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.training:
            time.sleep(self.seconds)
        logits: torch.Tensor = self.model(images)
        return logits


def run_worker(rank: int, mode: str, seed: int, folder: str, settings: dict[str, Any], results: Any) -> None:
    """Train for a time; the first worker tells when it had which held-out loss, each how many samples it used when."""
    torch.set_num_threads(1)
    logging.getLogger("weft").setLevel(logging.ERROR)  # slow workers are what is measured
    store = dist.FileStore(f"{folder}/store", NUM_WORKERS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_WORKERS)
    torch.manual_seed(seed)
    model = Sleeping(STEP_S * (settings["slow"] if rank == NUM_WORKERS - 1 else 1.0))
    plan = Plan(axes=Axes(data=NUM_WORKERS), data=Data(sync="server"), server=Server(**MODES[mode]))
    make = functools.partial(torch.optim.SGD, lr=settings["lr"], momentum=MOMENTUM)
    training, held_out = digits()
    kept: list[tuple[float, dict[str, torch.Tensor]]] = []
    used: list[tuple[float, int]] = []
    with weft.parallelize(model, plan, loss="cross-entropy", optimizer=make, device="cpu") as trainer:
        batches = weft.batches(
            training, trainer, global_batch=GLOBAL_BATCH, shuffle_seed=seed, epochs=None, drop_last=True
        )
        begun = 0.0
        for inputs, targets in batches:
            begun = begun or time.monotonic()  # all are there with the first batch
            trainer.step(inputs, targets)
            spent = time.monotonic() - begun
            used.append((spent, len(targets)))
            if rank == 0 and (not kept or spent - kept[-1][0] >= KEEP_S):
                kept.append((spent, {name: one.clone() for name, one in model.model.state_dict().items()}))
            if spent > settings["seconds"]:
                break
    curve = []
    if rank == 0:
        inputs, targets = held_out.take(np.arange(len(held_out)))
        for spent, weights in kept:
            model.model.load_state_dict(weights)
            with torch.no_grad():
                loss = F.cross_entropy(model.model(torch.as_tensor(inputs)), torch.as_tensor(targets))
            curve.append((spent, float(loss)))
    results.put((rank, used, curve))
    dist.destroy_process_group()


def run(mode: str, seed: int, settings: dict[str, Any]) -> tuple[float, list[tuple[float, float, float]]]:
    """Samples per second of all workers, and (seconds, samples, held-out loss) along the way."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        results = context.Queue()
        workers = [
            context.Process(target=run_worker, args=(rank, mode, seed, folder, settings, results))
            for rank in range(NUM_WORKERS)
        ]
        for one in workers:
            one.start()
        found = sorted((results.get(timeout=20 * settings["seconds"] + 120) for _ in workers), key=lambda one: one[0])
        for one in workers:
            one.join()
    used = sorted(itertools.chain.from_iterable(one for _, one, _ in found))
    times, totals = [spent for spent, _ in used], np.cumsum([number for _, number in used])
    curve = found[0][2]
    within = [number for spent, number in used if spent <= settings["seconds"]]
    samples = np.interp([spent for spent, _ in curve], times, totals)
    seconds_losses = [(spent, float(total), loss) for (spent, loss), total in zip(curve, samples, strict=True)]
    return sum(within) / settings["seconds"], seconds_losses


def time_to(curve: list[tuple[float, float, float]], loss: float) -> float | None:
    """The seconds after which a run stays below a loss twice in a row."""
    for (spent, _, first), (_, _, second) in itertools.pairwise(curve):
        if max(first, second) < loss:
            return spent
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slow", type=float, default=5.0, help="times as long as the others (5)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each run (20)")
    parser.add_argument("--lr", type=float, default=RATE / 4, help=f"({RATE / 4:g})")
    parser.add_argument("--loss", type=float, default=0.5, help="to reach (0.5)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES), metavar="MODE")
    parser.add_argument("--json", type=Path, default=Path("slow-worker.json"), help="results (slow-worker.json)")
    args = parser.parse_args()
    settings = {"slow": args.slow, "seconds": args.seconds, "lr": args.lr}
    print(f"one of {NUM_WORKERS} workers {args.slow:g}x slower, {os.cpu_count()} cores, torch {torch.__version__}\n")
    print(f"| mode | samples per second | over sync | seconds to a loss of {args.loss:g} | held-out loss at the end |")
    print("|---|---|---|---|---|")
    rates: dict[str, list[float]] = {}
    by_time, by_samples = [], []
    for mode in args.modes:
        runs = [run(mode, seed, settings) for seed in range(args.seeds)]
        rates[mode] = [rate for rate, _ in runs]
        over = ""
        if "sync" in rates:
            over = f"{statistics.fmean(rates[mode]) / statistics.fmean(rates['sync']):.2f}×"
        needed = [time_to(curve, args.loss) for _, curve in runs]
        shown = ", ".join("never" if one is None else f"{one:.1f}" for one in needed)
        ends = ", ".join(f"{curve[-1][2]:.3f}" for _, curve in runs)
        print(f"| {mode} | {statistics.fmean(rates[mode]):.0f} | {over} | {shown} | {ends} |", flush=True)
        for seed, (_, curve) in enumerate(runs):
            spent, samples, losses = zip(*curve, strict=True)
            by_time.append({"name": mode, "seed": seed, "x": spent, "y": losses})
            by_samples.append({"name": mode, "seed": seed, "x": samples, "y": losses})
        panels = [
            {"title": "against time", "x_label": "seconds", "y_label": "held-out loss", "series": by_time},
            {"title": "against samples", "x_label": "samples", "y_label": "held-out loss", "series": by_samples},
        ]
        args.json.write_text(json.dumps({"title": f"One worker {args.slow:g}× slower", "panels": panels}, indent=1))


if __name__ == "__main__":
    main()
