"""Compression under AdamW: held-out loss of a byte GPT against the dense run at equal steps, by 8 replicas in process.

    python benchmarks/compression_gpt.py --folder FOLDER [--minutes 9] [--seeds 3] [--jobs 8] [--steps 600]
    python benchmarks/compression_gpt.py --folder FOLDER --runs dense powersgd-2 onebit   # these, in order
    python benchmarks/compression_gpt.py --folder FOLDER --summary                        # the table again, no run
    python benchmarks/compression_gpt.py --folder /tmp/try --tiny                         # a minute on a CPU

A GPT of 12.7 M parameters learns the bytes of Python's standard library, of which the last twentieth is held out. All
runs of a seed begin with the same weights and see the same batches; AdamW, its schedule and clipping are the same. The
dense run is one rank with whole batches, which is what 8 ranks without a codec compute. `--list` names the runs.

Each run is a process, several beside each other on one GPU, and writes FOLDER/NAME-SEED.json when it is over: one that
is there is not made again, so a study can be cut into pieces of a few minutes. No run begins that would end after the
minutes given, and one that takes longer than expected ends there without a file. At the end FOLDER/table.csv and
FOLDER/curves.json (for benchmarks/plots.py) hold all runs of the folder, and the table is printed: loss relative to the
dense run of the same seed, mean and range over seeds, and compression over the whole run (`compression_bytes.py`).
"""

from __future__ import annotations

import argparse
import csv
import functools
import json
import logging
import math
import os
import statistics
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from compression_bytes import compression, shapes_of

import weft
from weft.models.gpt import GPT, GPTConfig
from weft.optim.schedule import warmup_cosine
from weft.plan.plan import Axes, Codec, Data, Plan, Precision, Step
from weft.training.data.datasets import TokenWindows, split_held_out, standard_library_text

HELD_OUT = 0.05
NESTEROV = {"outer": "nesterov", "outer_lr": 0.7, "outer_momentum": 0.9}
MILD_NESTEROV = {"outer": "nesterov", "outer_lr": 0.8, "outer_momentum": 0.6}
"""For exchanges that are few: less momentum, which has less time to turn round."""
MARGIN = 1.15
"""A run is expected to take this much longer than the longest one of its kind so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The model and its training."""

    config: GPTConfig
    global_batch: int
    num_replicas: int
    steps: int
    lr: float
    num_evaluations: int
    evaluation_batches: int
    text_bytes: int | None = None


FULL = Size(
    config=GPTConfig(context=256, num_layers=4, hidden=512, heads=8),  # wide: small batches wait for launches
    global_batch=64,
    num_replicas=8,
    steps=600,
    lr=1e-3,
    num_evaluations=12,
    evaluation_batches=4,
)
TINY = Size(
    config=GPTConfig(context=64, num_layers=2, hidden=64, heads=4),
    global_batch=16,
    num_replicas=4,
    steps=30,
    lr=3e-3,
    num_evaluations=3,
    evaluation_batches=2,
    text_bytes=200_000,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A codec under a sync."""

    codec: dict[str, Any] = field(default_factory=dict)
    every: int = 0
    """Steps between exchanges of local runs; 0: gradients are exchanged at every step."""
    outer: dict[str, Any] = field(default_factory=dict)

    @property
    def is_local(self) -> bool:
        return self.every > 0

    def plan(self, size: Size, *, in_bf16: bool) -> Plan:
        clip_norm = 0.0 if self.section.name == "sign" else 1.0  # votes all have the same norm
        common = Plan(
            step=Step(clip_norm=clip_norm),
            precision=Precision(compute="bf16" if in_bf16 else "model"),
            codec=self.section,
        )
        if self.is_local:
            data = Data(sync="local", every=self.every, **self.outer)
            return replace(common, axes=Axes(data=size.num_replicas), data=data)
        return replace(common, axes=Axes(data=size.num_replicas if self.codec else 1))

    @property
    def section(self) -> Codec:
        return Codec(**self.codec)


def _local(every: int, outer: dict[str, Any], **codec: Any) -> Run:
    return Run(codec=codec, every=every, outer=outer)


SPARSE_LOCO = {"name": "topk", "bits": 2, "memory": 0.95}
RUNS: dict[str, Run] = {
    "dense": Run(),
    "powersgd-2": Run(codec={"name": "powersgd", "rank": 2}),
    "topk-0.1": Run(codec={"name": "topk", "density": 0.001}),
    "onebit": Run(codec={"name": "onebit"}),
    "powersgd-1": Run(codec={"name": "powersgd", "rank": 1}),
    "powersgd-4": Run(codec={"name": "powersgd", "rank": 4}),
    "sign": Run(codec={"name": "sign"}),
    "local10": _local(10, {}),
    "local10-onebit": _local(10, {}, name="onebit"),
    "local10-powersgd-4": _local(10, {}, name="powersgd", rank=4),
    "local10-topk-3": _local(10, {}, **SPARSE_LOCO, density=0.03),
    "local30-nesterov": _local(30, NESTEROV),
    "local30-nesterov-topk-3": _local(30, NESTEROV, **SPARSE_LOCO, density=0.03),
    "local30-nesterov-onebit": _local(30, NESTEROV, name="onebit"),
    "local30-nesterov-powersgd-4": _local(30, NESTEROV, name="powersgd", rank=4),
    "topk-1": Run(codec={"name": "topk", "density": 0.01}),
    "qsgd-256": Run(codec={"name": "qsgd", "levels": 256}),
    "qsgd-4": Run(codec={"name": "qsgd", "levels": 4}),
    "terngrad": Run(codec={"name": "terngrad"}),
    "topk-0.1-forgetting": Run(codec={"name": "topk", "density": 0.001, "memory": 0.0}),
    "powersgd-2-forgetting": Run(codec={"name": "powersgd", "rank": 2, "memory": 0.0}),
    "topk-0.1-warm": Run(codec={"name": "topk", "density": 0.001, "warmup_steps": 60}),
    "powersgd-1-warm": Run(codec={"name": "powersgd", "rank": 1, "warmup_steps": 6}),
    "local16": _local(16, {}),
    "local16-onebit": _local(16, {}, name="onebit"),
    "local16-nesterov": _local(16, MILD_NESTEROV),
    "local16-nesterov-onebit": _local(16, MILD_NESTEROV, name="onebit"),
    "local8-topk-2": _local(8, {}, **SPARSE_LOCO, density=0.02),
    "local4-powersgd-8": _local(4, {}, name="powersgd", rank=8),
    "local10-topk-1": _local(10, {}, **SPARSE_LOCO, density=0.01),
    "local30-nesterov-topk-1": _local(30, NESTEROV, **SPARSE_LOCO, density=0.01),
}
"""The most important first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one run gave, as its file says."""

    name: str
    seed: int
    steps: int
    held_out_loss: float | None
    """None: it was not finite."""
    seconds: float
    sent: float
    by_message: float
    curve_steps: list[int]
    curve_loss: list[float | None]
    environment: str


def train(name: str, seed: int, size: Size, device: str, deadline: float) -> Outcome | None:
    """One run, in a process of its own; None if the time was over before it was."""
    torch.set_num_threads(1)
    logging.getLogger("weft").setLevel(logging.ERROR)  # a run that diverges would tell of every step
    torch.manual_seed(seed)
    run = RUNS[name]
    plan = run.plan(size, in_bf16=device == "cuda")
    model = GPT(size.config)
    ratio = compression(shapes_of(model), replace(plan, axes=Axes(data=size.num_replicas)), size.steps)
    fused: dict[str, Any] = {"fused": True} if device == "cuda" else {}
    trainer = weft.parallelize(
        model,
        plan,
        loss="cross-entropy",
        optimizer=functools.partial(torch.optim.AdamW, lr=size.lr, betas=(0.9, 0.95), weight_decay=0.1, **fused),
        schedule=warmup_cosine(size.steps // 20, size.steps, 0.1),
        device=device,
        skip_at_most=None,
        replicas_in_process=plan.axes.num_ranks > 1,
    )
    text = standard_library_text()[: size.text_bytes]
    training, held_out = (
        TokenWindows(part, size.config.context) for part in split_held_out(text, HELD_OUT, size.config.context)
    )
    held_out_batches = weft.batches(held_out, trainer, global_batch=min(2 * size.global_batch, len(held_out)))
    samples = weft.batches(
        training, trainer, global_batch=size.global_batch, shuffle_seed=seed, epochs=None, drop_last=True
    )
    curve_steps: list[int] = []
    curve_loss: list[float | None] = []
    started = time.time()
    with trainer:
        for inputs, targets in islice(samples, size.steps):
            trainer.step(inputs, targets)
            if trainer.steps_done % max(size.steps // size.num_evaluations, 1) == 0:
                curve_steps.append(trainer.steps_done)
                batches = islice(held_out_batches.from_start(), size.evaluation_batches)
                curve_loss.append(_finite(trainer.evaluate(batches)))
                if time.time() > deadline:
                    return None
        loss = _finite(trainer.evaluate(islice(held_out_batches.from_start(), 8 * size.evaluation_batches)))
    where = f"{torch.cuda.get_device_name()}, bf16" if device == "cuda" else "CPU, float32"
    return Outcome(
        name=name,
        seed=seed,
        steps=size.steps,
        held_out_loss=loss,
        seconds=time.time() - started,
        sent=ratio.sent,
        by_message=ratio.by_message,
        curve_steps=curve_steps,
        curve_loss=curve_loss,
        environment=f"{where}, torch {torch.__version__}, {trainer.num_parameters / 1e6:.1f} M parameters",
    )


def _finite(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None


def read(folder: Path) -> list[Outcome]:
    """All runs that are in the folder, in the order of `RUNS`."""
    found = [Outcome(**json.loads(path.read_text())) for path in folder.glob("*-[0-9]*.json")]
    order = list(RUNS)
    return sorted((one for one in found if one.name in RUNS), key=lambda one: (order.index(one.name), one.seed))


def run_all(wanted: list[tuple[str, int]], size: Size, args: argparse.Namespace, deadline: float) -> None:
    """Make the runs that are not in the folder yet, as far as the time goes."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kept = {(one.name, one.seed): one for one in read(args.folder) if one.steps == size.steps}
    queue = [one for one in wanted if one not in kept]
    longest = {_kind(name): one.seconds for (name, _), one in kept.items()}
    running: dict[Future[Outcome | None], str] = {}
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        while queue or running:
            while queue and len(running) < args.jobs:
                name, seed = queue.pop(0)
                needed_s = MARGIN * longest.get(_kind(name), 0.0)
                if time.time() + needed_s > deadline:
                    print(f"{name} (seed {seed}) left out: it needs {needed_s:.0f} s", flush=True)
                    continue
                running[pool.submit(train, name, seed, size, device, deadline)] = f"{name}-{seed}"
            for future in wait(running, return_when=FIRST_COMPLETED).done if running else ():
                title = running.pop(future)
                if future.exception() is not None:
                    print(f"{title} failed: {future.exception()}", flush=True)
                elif (outcome := future.result()) is None:
                    print(f"{title} ended with the time", flush=True)
                else:
                    kind = _kind(outcome.name)
                    longest[kind] = max(longest.get(kind, 0.0), outcome.seconds)
                    (args.folder / f"{title}.json").write_text(json.dumps(asdict(outcome), indent=1))
                    print(f"{title}: {outcome.held_out_loss} after {outcome.seconds:.0f} s", flush=True)


def _kind(name: str) -> str:
    """Runs of a kind take about as long."""
    return "dense" if not RUNS[name].codec else "local" if RUNS[name].is_local else "all-reduce"


def summarise(folder: Path) -> None:
    """Print the table of all runs in a folder, and write it beside the curves."""
    outcomes = read(folder)
    dense = {one.seed: one.held_out_loss for one in outcomes if one.name == "dense"}
    rows = []
    for name in dict.fromkeys(one.name for one in outcomes):
        inside = [one for one in outcomes if one.name == name]
        losses = [one.held_out_loss for one in inside]
        over = [
            100 * (one.held_out_loss / base - 1)
            for one in inside
            if one.held_out_loss is not None and (base := dense.get(one.seed))
        ]
        is_whole = bool(over) and None not in losses
        rows.append(
            {
                "run": name,
                "seeds": len(inside),
                "held_out_loss": statistics.mean(one for one in losses if one is not None) if is_whole else "diverged",
                "over_dense_percent": statistics.mean(over) if is_whole else "",
                "least_percent": min(over) if is_whole else "",
                "most_percent": max(over) if is_whole else "",
                "compression_sent": inside[0].sent,
                "compression_by_message": inside[0].by_message,
                "seconds": max(one.seconds for one in inside),
            }
        )
    if not rows:
        return
    with (folder / "table.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    print(f"\n{outcomes[0].environment}; {outcomes[0].steps} steps")
    print("| run | seeds | held-out loss | over dense, % (range) | compression sent | by message | s |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        loss = row["held_out_loss"]
        shown = f"{loss:.4f}" if isinstance(loss, float) else loss
        over_text = (
            f"{row['over_dense_percent']:+.2f} ({row['least_percent']:+.2f} to {row['most_percent']:+.2f})"
            if row["over_dense_percent"] != ""
            else ""
        )
        print(
            f"| {row['run']} | {row['seeds']} | {shown} | {over_text} | {row['compression_sent']:.1f} | "
            f"{row['compression_by_message']:.1f} | {row['seconds']:.0f} |"
        )
    panels = [
        {
            "title": title,
            "x_label": "steps",
            "y_label": "held-out loss, nats per byte",
            "series": [
                {"name": one.name, "seed": one.seed, "x": one.curve_steps, "y": one.curve_loss}
                for one in outcomes
                if one.name == "dense" or RUNS[one.name].is_local == is_local
            ],
        }
        for title, is_local in (("Gradients at every step", False), ("Changes between local steps", True))
    ]
    (folder / "curves.json").write_text(
        json.dumps({"panels": panels, "environment": outcomes[0].environment}, indent=1)
    )


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("compression-gpt"), help="of the results (compression-gpt)")
    parser.add_argument("--runs", nargs="+", choices=list(RUNS), default=list(RUNS), help="in this order (all)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each (3)")
    parser.add_argument("--minutes", type=float, default=9.0, help="no run ends later (9)")
    parser.add_argument("--steps", type=int, help="of a run (600)")
    parser.add_argument("--batch", type=int, help="samples of all replicas in a step (64)")
    parser.add_argument("--jobs", type=int, help="runs beside each other (8 on a GPU, else one per core)")
    parser.add_argument("--tiny", action="store_true", help="a small model and few steps, for a CPU")
    parser.add_argument("--summary", action="store_true", help="print what is in the folder, and run nothing")
    parser.add_argument("--list", action="store_true", help="name the runs and their settings")
    args = parser.parse_args()
    cores = os.cpu_count() or 1
    args.jobs = args.jobs or (min(cores // 2, 8) if torch.cuda.is_available() else cores)
    return args


def main() -> None:
    args = read_arguments()
    if args.list:
        for name, run in RUNS.items():
            print(
                f"{name:28s} {'local' if run.is_local else 'all-reduce':10s} {run.codec} {run.outer} {run.every or ''}"
            )
        return
    args.folder.mkdir(parents=True, exist_ok=True)
    if not args.summary:
        size = TINY if args.tiny else FULL
        size = replace(size, steps=args.steps or size.steps, global_batch=args.batch or size.global_batch)
        wanted = [(name, seed) for seed in range(args.seeds) for name in args.runs]
        run_all(wanted, size, args, time.time() + 60 * args.minutes)
    summarise(args.folder)


if __name__ == "__main__":
    main()
