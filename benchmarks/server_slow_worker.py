"""One slow worker of four at parameter servers: steps per second, and held-out loss against time and against samples.

    python benchmarks/server_slow_worker.py --json slow-worker.json --output PAGE.md     # 5 minutes on two cores
    python benchmarks/server_slow_worker.py --tiny                                       # to try the script
    python benchmarks/plots.py slow-worker.json -o docs/methods/server-slow-worker.svg

Four workers learn handwritten digits (the network of `compression.py`, SGD with momentum), and sleep in every step as
if they computed for so long, the last one `--slow` times as long as the others. Sleeping workers need no core, so four
of them on two cores show what four machines would. Every mode trains for the same time: *sync* waits for all, *backups*
leaves out the last of each round, *bounded* lets the quick ones be some steps ahead, *async* waits for nobody.

A step is one worker's gradient of 8 samples, and counts if an update was made of it: a late one beside backups does
not. A synchronous update is of 32 samples and has the rate of `compression.py`; one of a single worker's gradient has a
quarter of it. The first worker keeps its weights now and then, and their losses are found when the time is over.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from compression import GLOBAL_BATCH, MOMENTUM, RATE, DigitsNet
from forked_workers import run_workers
from server_page import Page, mean_and_range, table, write_picture
from torch import nn

import weft
from weft.plan.plan import Axes, Data, Plan, Server
from weft.sync.served import ServedSync
from weft.training.data.datasets import digits

NUM_WORKERS, STEP_S, KEEP_S = 4, 0.04, 0.5
GOAL = 2.5
"""Steps per second of async over those of sync."""
MODES: dict[str, dict[str, Any]] = {
    "sync": {"mode": "sync"},
    "backups 1": {"mode": "sync", "backups": 1},
    "bounded 4": {"mode": "bounded", "staleness": 4},
    "async": {"mode": "async"},
    "async, compensated": {"mode": "async", "compensation": 0.04},
}

Point = tuple[float, float, float]
"""Seconds, samples in updates so far, held-out loss."""


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


def run_worker(
    rank: int, mode: str, seed: int, settings: dict[str, Any]
) -> tuple[list[tuple[float, int]], list[tuple[float, float]]]:
    """Train for a time: which samples were used when, and, of the first worker, when it had which held-out loss."""
    torch.manual_seed(seed)
    model = Sleeping(STEP_S * (settings["slow"] if rank == NUM_WORKERS - 1 else 1.0))
    server = Server(**MODES[mode])
    plan = Plan(axes=Axes(data=NUM_WORKERS), data=Data(sync="server"), server=server)
    rate = RATE if server.updates_together else RATE / NUM_WORKERS
    make = functools.partial(torch.optim.SGD, lr=rate, momentum=MOMENTUM)
    training, held_out = digits()
    kept: list[tuple[float, dict[str, torch.Tensor]]] = []
    used: list[tuple[float, int]] = []
    with weft.parallelize(model, plan, loss="cross-entropy", optimizer=make, device="cpu") as trainer:
        sync = trainer.sync
        assert isinstance(sync, ServedSync)
        batches = weft.batches(
            training, trainer, global_batch=GLOBAL_BATCH, shuffle_seed=seed, epochs=None, drop_last=True
        )
        begun = 0.0
        for inputs, targets in batches:
            begun = begun or time.monotonic()  # all are there with the first batch
            before = sync.take_part().used
            trainer.step(inputs, targets)
            spent = time.monotonic() - begun
            if sync.take_part().used > before:
                used.append((spent, len(targets)))
            if rank == 0 and (not kept or spent - kept[-1][0] >= KEEP_S):
                kept.append((spent, {name: one.clone() for name, one in model.model.state_dict().items()}))
            if spent > settings["seconds"]:
                break
    return used, losses_of(kept, model.model, held_out)


def losses_of(
    kept: list[tuple[float, dict[str, torch.Tensor]]], model: nn.Module, held_out: Any
) -> list[tuple[float, float]]:
    """(seconds, held-out loss) of all weights that were kept."""
    inputs, targets = held_out.take(np.arange(len(held_out)))
    found = []
    for spent, weights in kept:
        model.load_state_dict(weights)
        with torch.no_grad():
            found.append((spent, float(F.cross_entropy(model(torch.as_tensor(inputs)), torch.as_tensor(targets)))))
    return found


def run(mode: str, seed: int, settings: dict[str, Any]) -> tuple[float, list[Point]]:
    """Steps per second of all workers, and the losses along the way."""
    found = run_workers(NUM_WORKERS, run_worker, mode, seed, settings, limit_s=settings["seconds"] + 60)
    used = sorted(itertools.chain.from_iterable(one for one, _ in found))
    times, totals = [spent for spent, _ in used], np.cumsum([number for _, number in used])
    curve = found[0][1]
    num_steps = sum(spent <= settings["seconds"] for spent in times)
    samples = np.interp([spent for spent, _ in curve], times, totals)
    points = [(spent, float(total), loss) for (spent, loss), total in zip(curve, samples, strict=True)]
    return num_steps / settings["seconds"], points


def time_to(curve: list[Point], loss: float) -> float | None:
    """The seconds after which a run stays below a loss twice in a row."""
    for (spent, _, first), (_, _, second) in itertools.pairwise(curve):
        if max(first, second) < loss:
            return spent
    return None


def row_of(mode: str, runs: list[tuple[float, list[Point]]], rates: dict[str, list[float]], loss: float) -> list[str]:
    over = statistics.fmean(rates[mode]) / statistics.fmean(next(iter(rates.values())))
    needed = [time_to(curve, loss) for _, curve in runs]
    return [
        mode,
        mean_and_range(rates[mode]),
        f"{over:.2f}×",
        ", ".join("never" if one is None else f"{one:.1f}" for one in needed),
        mean_and_range([curve[-1][2] for _, curve in runs], ".3f"),
        f"{statistics.fmean(curve[-1][1] for _, curve in runs):.0f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slow", type=float, default=5.0, help="times as long as the others (5)")
    parser.add_argument("--seconds", type=float, default=14.0, help="of each run (14)")
    parser.add_argument("--loss", type=float, default=1.0, help="to reach (1)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES), metavar="MODE")
    parser.add_argument("--json", type=Path, default=Path("slow-worker.json"), help="the picture (slow-worker.json)")
    parser.add_argument("--output", type=Path, help="a page to write")
    parser.add_argument("--tiny", action="store_true", help="two modes for some seconds, one seed")
    args = parser.parse_args()
    if args.tiny:
        args.modes, args.seconds, args.seeds = ["sync", "async"], 4.0, 1
    settings = {"slow": args.slow, "seconds": args.seconds}
    page = Page(
        "One slow worker of four at parameter servers",
        f"{NUM_WORKERS} workers that sleep {1e3 * STEP_S:g} ms per step, the last one {args.slow:g} times as long; "
        f"handwritten digits, {args.seconds:g} s per run, {args.seeds} seeds (mean, least to most).",
    )
    rates: dict[str, list[float]] = {}
    rows, by_time, by_samples = [], [], []
    for mode in args.modes:
        runs = [run(mode, seed, settings) for seed in range(args.seeds)]
        rates[mode] = [rate for rate, _ in runs]
        rows.append(row_of(mode, runs, rates, args.loss))
        for seed, (_, curve) in enumerate(runs):
            spent, samples, losses = zip(*curve, strict=True)
            by_time.append({"name": mode, "seed": seed, "x": spent, "y": losses})
            by_samples.append({"name": mode, "seed": seed, "x": samples, "y": losses})
    head = ("mode", "steps per second", f"over {args.modes[0]}", f"seconds to a loss of {args.loss:g}")
    page.add("", *table([*head, "held-out loss at the end", "samples by then"], rows))
    if {"sync", "async"} <= set(rates):
        over = statistics.fmean(rates["async"]) / statistics.fmean(rates["sync"])
        met = "met" if over >= GOAL else "missed"
        page.add("", f"Async makes {over:.2f} times the steps per second of sync; the goal of {GOAL:g} is {met}.")
    labels = {"y_label": "held-out loss", "log_y": True}
    panels = [
        {"title": "against time", "x_label": "seconds", **labels, "series": by_time},
        {"title": "against samples", "x_label": "samples in updates", **labels, "series": by_samples},
    ]
    write_picture(args.json, f"One worker {args.slow:g}× slower", panels)
    page.write(args.output)


if __name__ == "__main__":
    main()
