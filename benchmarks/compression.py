"""Compression of gradients on handwritten digits: accuracy against the dense run at equal steps, over paired seeds.

    python benchmarks/compression.py [--seeds 10] [--jobs N] [--json compression.json]    # 12 minutes on two cores
    python benchmarks/compression.py --runs dense dgc-1000 powersgd-1                     # these only
    python benchmarks/compression.py --tiny                                               # to try the script

A small convolutional network learns scikit-learn's digits (1,437 images to train on, 360 held out) by SGD with momentum
0.9, on 4 workers in one process, which equal 4 real ranks. Runs of a seed begin with the same weights and see the same
batches, so accuracies are compared in pairs: the interval is that of Student's t at 95 % for the mean difference. Rates
are those of the dense run, except that of "sign", whose update has another unit.

Compression is dense fp32 bytes over bytes sent per rank in the whole run, with warm-up and all tensors that travel as
they are (`compression_bytes.py`); "by message" is the figure of publications, which does not count that ranks pass on
what they gather. The second table adds the parts of DGC one by one, in the order in which they were published.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import math
import os
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from compression_bytes import compression, shapes_of
from torch import nn

import weft
from weft.optim.schedule import warmup_cosine
from weft.plan.plan import Axes, Codec, Plan
from weft.training.data.datasets import digits

NUM_WORKERS = 4
GLOBAL_BATCH = 32
STEPS = 700
RATE, SIGN_RATE, MOMENTUM = 0.05, 0.0005, 0.9
ABLATION_DENSITY = 1 / 1000
DENSE_BELOW = 128
STUDENT_T = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262, 20: 2.093}
"""97.5 % of Student's distribution, by the number of pairs."""


class DigitsNet(nn.Module):
    """Two convolutions and two linear layers, without norms: nearly all parameters are in matrices that are compressed,
    as in the networks for which high ratios were published."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False)
        self.hidden = nn.Linear(512, 512, bias=False)
        self.head = nn.Linear(512, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        inner = F.relu(self.conv2(F.relu(self.conv1(images))))
        logits: torch.Tensor = self.head(F.relu(self.hidden(inner.flatten(1))))
        return logits


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A codec, and a title for the table."""

    title: str
    codec: dict[str, Any] = field(default_factory=dict)
    rate: float = RATE
    is_part: bool = False
    """A part of DGC, for the second table."""

    def plan(self, steps: int) -> Plan:
        if not self.codec:
            return Plan()
        settings = {**self.codec}
        if settings.pop("warms", False):
            settings["warmup_steps"] = max(steps // 40, 4)  # a fortieth, as DGC published
        return Plan(axes=Axes(data=NUM_WORKERS), codec=Codec(**settings, dense_below=DENSE_BELOW))


def _dgc(ratio: int) -> Run:
    return Run(title=f"dgc, 1 of {ratio}", codec={"name": "dgc", "density": 1 / ratio, "warms": True})


def _part(title: str, name: str, **settings: Any) -> Run:
    return Run(title=title, codec={"name": name, "density": ABLATION_DENSITY, **settings}, is_part=True)


RUNS: dict[str, Run] = {
    "dense": Run(title="dense"),
    **{f"dgc-{ratio}": _dgc(ratio) for ratio in (10, 100, 200, 400, 1000)},
    **{
        f"powersgd-{rank}": Run(title=f"powersgd, rank {rank}", codec={"name": "powersgd", "rank": rank})
        for rank in (4, 2, 1)
    },
    "onebit": Run(title="onebit", codec={"name": "onebit"}),
    **{
        f"qsgd-{levels}": Run(title=f"qsgd, {levels} levels", codec={"name": "qsgd", "levels": levels})
        for levels in (256, 16, 4)
    },
    "terngrad": Run(title="terngrad", codec={"name": "terngrad"}),
    "sign": Run(title=f"sign, rate {SIGN_RATE:g}", codec={"name": "sign"}, rate=SIGN_RATE),
    "topk-100": Run(title="topk, 1 of 100", codec={"name": "topk", "density": 1 / 100}),
    "part-pruning": _part("pruning alone", "topk", memory=0.0),
    "part-accumulation": _part("+ accumulation", "topk"),
    "part-accumulation-warm": _part("+ accumulation, warm-up", "topk", warms=True),
    "part-correction": _part("+ accumulation, momentum correction", "dgc", masking=False),
    "part-no-warm": _part("all without warm-up", "dgc"),
    "part-no-masking": _part("all without masking", "dgc", masking=False, warms=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One run of one seed."""

    accuracy: float
    loss: float
    seconds: float


def train(name: str, seed: int, steps: int) -> Result:
    """Train to the end; in a process of its own."""
    torch.set_num_threads(1)
    logging.getLogger("weft").setLevel(logging.ERROR)  # a run that diverges would tell of every step
    started = time.perf_counter()
    run, (training, held_out) = RUNS[name], digits()
    torch.manual_seed(seed)
    plan = run.plan(steps)
    trainer = weft.parallelize(
        DigitsNet(),
        plan,
        loss="cross-entropy",
        optimizer=functools.partial(torch.optim.SGD, lr=run.rate, momentum=MOMENTUM),
        schedule=warmup_cosine(steps // 20, steps, 0.0),
        device="cpu",
        skip_at_most=None,
        replicas_in_process=plan.axes.num_ranks > 1,
    )
    batches = weft.batches(training, trainer, global_batch=GLOBAL_BATCH, shuffle_seed=seed, epochs=None, drop_last=True)
    with trainer:
        for inputs, targets in islice(batches, steps):
            trainer.step(inputs, targets)
        inputs, targets = next(iter(weft.batches(held_out, trainer, global_batch=len(held_out)).from_start()))
        trainer.flush()
        with torch.no_grad():
            output = trainer.model.eval()(inputs)
    return Result(
        accuracy=100 * float((output.argmax(1) == targets).double().mean()),
        loss=float(F.cross_entropy(output, targets)),
        seconds=time.perf_counter() - started,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of a table."""

    name: str
    title: str
    accuracies: list[float]
    accuracy: float
    difference: float
    half_width: float
    """Of the 95 % interval of the mean difference."""
    sent: float
    by_message: float
    seconds: float
    is_part: bool

    @property
    def is_as_good(self) -> bool:
        """The interval includes 0, or lies above it."""
        return self.difference + self.half_width >= 0

    def text(self) -> str:
        return (
            f"| {self.title} | {self.accuracy:.2f} | {self.difference:+.2f} ± {self.half_width:.2f} | "
            f"{self.sent:.1f} | {self.by_message:.1f} |"
        )


def make_row(name: str, found: list[Result], dense: list[Result], steps: int) -> Row:
    run = RUNS[name]
    differences = [one.accuracy - other.accuracy for one, other in zip(found, dense, strict=True)]
    spread = statistics.stdev(differences) if len(differences) > 1 else math.nan
    width = STUDENT_T.get(len(differences), 1.96) * spread / math.sqrt(len(differences))
    ratio = compression(shapes_of(DigitsNet()), run.plan(steps), steps) if run.codec else None
    return Row(
        name=name,
        title=run.title,
        accuracies=[one.accuracy for one in found],
        accuracy=statistics.fmean(one.accuracy for one in found),
        difference=statistics.fmean(differences),
        half_width=width,
        sent=1.0 if ratio is None else ratio.sent,
        by_message=1.0 if ratio is None else ratio.by_message,
        seconds=statistics.fmean(one.seconds for one in found),
        is_part=run.is_part,
    )


def show(rows: list[Row], steps: int, num_seeds: int) -> None:
    head = "| method | accuracy, % | over dense, points | compression sent | by message |\n|---|---|---|---|---|"
    print(f"\n{steps} steps of {GLOBAL_BATCH} images on {NUM_WORKERS} workers, {num_seeds} seeds\n\n{head}")
    print(*(row.text() for row in rows if not row.is_part), sep="\n")
    by_name = {row.name: row for row in rows}
    parts = [row for row in rows if row.is_part]
    if parts:
        print(f"\nDGC part by part, 1 of {round(1 / ABLATION_DENSITY)}:\n\n{head}")
        whole = by_name.get("dgc-1000")
        print(*(row.text() for row in (by_name["dense"], *parts)), sep="\n")
        if whole is not None:
            print(whole.text().replace(whole.title, "all"))
    equal = [row for row in rows if row.name.startswith("dgc-") and row.is_as_good]
    if equal:
        best = max(equal, key=lambda row: row.sent)
        ratio = f"{best.sent:.0f}x ({best.by_message:.0f}x by message)"
        print(f"\nlargest ratio of dgc whose interval includes 0: {best.title}, {ratio}")


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", choices=list(RUNS), default=list(RUNS), help="besides dense (all)")
    parser.add_argument("--seeds", type=int, default=10, help="pairs (10)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of a run ({STEPS})")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs beside each other (one per core)")
    parser.add_argument("--json", type=Path, default=Path("compression.json"), help="results (compression.json)")
    parser.add_argument("--tiny", action="store_true", help="few steps and two seeds")
    args = parser.parse_args()
    if args.tiny:
        args.seeds, args.steps = 2, 40
    return args


def main() -> None:
    args = read_arguments()
    started = time.perf_counter()
    names = list(dict.fromkeys(["dense", *args.runs]))
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        pending = {name: [pool.submit(train, name, seed, args.steps) for seed in range(args.seeds)] for name in names}
        found: dict[str, list[Result]] = {}
        rows = []
        for name, futures in pending.items():
            found[name] = [future.result() for future in futures]
            rows.append(make_row(name, found[name], found["dense"], args.steps))
            print(f"{rows[-1].text()} {rows[-1].seconds:.1f} s per run", flush=True)
            environment = f"{os.cpu_count()} cores, torch {torch.__version__}, {time.perf_counter() - started:.0f} s"
            result = {"environment": environment, "steps": args.steps, "rows": [asdict(row) for row in rows]}
            args.json.write_text(json.dumps(result, indent=1))
    show(rows, args.steps, args.seeds)
    print(f"\n{environment}")


if __name__ == "__main__":
    main()
