"""A batch 32 times larger at equal samples: SGD by the linear rule, and SGD, LARS and LAMB each at its best rate.

    python benchmarks/large_batch.py [--output large-batch.json]     # about two minutes on 16 cores
    python benchmarks/large_batch.py --tiny                          # seconds, to see that it runs

A small residual network with GroupNorm learns scikit-learn's digits (1,437 images to train on, 360 held out). All runs
see the same number of samples, with 20 % of the steps for warm-up. Every method has as many rates to choose from, a
factor of 2 apart, and is tuned on the same two seeds that are not those of the table: the rate with the lowest mean
held-out loss is taken. "Linear rule" takes the rate of the small batch times 32 and is not tuned again.

The schedules are those of the publications: a line down for SGD and LAMB, a polynomial of power 2 for LARS. Biases and
norms are left alone by LARS and LAMB (`weft.optim.exclude_one_dim`). The JSON has the held-out accuracy of each run, by
the number of samples seen, and all that was tuned. Runs are independent, in processes of one thread each.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from weft.models.convnet import ConvNet, ConvNetConfig
from weft.optim.exclude_one_dim import exclude_one_dim
from weft.optim.lamb import LAMB
from weft.optim.lars import LARS
from weft.optim.schedule import batch_scaling, warmup_polynomial
from weft.training.data.datasets import digits

GROWTH = 32
NUM_POINTS = 20
"""Evaluations per run."""
TUNING_SEEDS, SEEDS = (100, 101), (0, 1, 2)
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": functools.partial(torch.optim.SGD, momentum=0.9, weight_decay=1e-4),
    "LARS": functools.partial(LARS, momentum=0.9, weight_decay=1e-4),
    "LAMB": functools.partial(LAMB, weight_decay=0.01),
}
POWERS = {"SGD": 1.0, "LARS": 2.0, "LAMB": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One row of the table."""

    name: str
    optimizer: str
    batch: int
    num_steps: int
    rates: tuple[float, ...]
    """Those it is tuned over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Held-out loss and accuracy of one run, by the number of samples seen."""

    samples: list[int]
    accuracy: list[float]
    loss: list[float]


def train(method: Method, rate: float, seed: int, device: str) -> Curve:
    """One run in one process."""
    torch.set_num_threads(1)
    (images, labels), (held_images, held_labels) = ((one.inputs, one.targets) for one in map(_as_tensors, digits()))
    images, labels, held_images, held_labels = (one.to(device) for one in (images, labels, held_images, held_labels))
    torch.manual_seed(seed)
    model = ConvNet(ConvNetConfig(width=16, num_blocks=2, batch_norm=False)).to(device)
    adapted = [one for one in model.parameters() if one.dim() > 1]
    excluded = [one for one in model.parameters() if one.dim() <= 1]
    settings = exclude_one_dim("", ()) if method.optimizer != "SGD" else {"weight_decay": 0.0}
    groups = [{"params": adapted}, {"params": excluded, **settings}]
    optimizer = OPTIMIZERS[method.optimizer](groups, lr=rate)
    schedule = warmup_polynomial(method.num_steps // 5, method.num_steps, 0.0, POWERS[method.optimizer])
    generator = torch.Generator().manual_seed(seed)
    order = torch.empty(0, dtype=torch.int64)
    curve = Curve(samples=[], accuracy=[], loss=[])
    for step in range(method.num_steps):
        while len(order) < method.batch:
            order = torch.cat([order, torch.randperm(len(images), generator=generator)])
        chosen, order = order[: method.batch].to(device), order[method.batch :]
        for group in optimizer.param_groups:
            group["lr"] = rate * schedule(step)
        loss = F.cross_entropy(model(images[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) * NUM_POINTS // method.num_steps > step * NUM_POINTS // method.num_steps:
            model.eval()
            with torch.no_grad():
                output = model(held_images)
            model.train()
            curve.samples.append((step + 1) * method.batch)
            curve.accuracy.append(float((output.argmax(1) == held_labels).double().mean()))
            value = float(F.cross_entropy(output, held_labels))
            curve.loss.append(value if math.isfinite(value) else 1e9)
    return curve


@dataclass(frozen=True, slots=True)
class _Tensors:
    inputs: torch.Tensor
    targets: torch.Tensor


def _as_tensors(samples: Any) -> _Tensors:
    pairs = [samples[number] for number in range(len(samples))]
    return _Tensors(torch.stack([image for image, _ in pairs]), torch.tensor([int(label) for _, label in pairs]))


Runs = Callable[[Sequence[tuple[Method, float, int]]], list[Curve]]


def tune(methods: Sequence[Method], run_all: Runs) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """The best rate of every method, and the mean held-out loss of each rate."""
    wanted = [(method, rate, seed) for method in methods for rate in method.rates for seed in TUNING_SEEDS]
    curves = dict(zip(((method.name, rate, seed) for method, rate, seed in wanted), run_all(wanted), strict=True))
    losses = {
        method.name: {
            rate: statistics.fmean(curves[method.name, rate, seed].loss[-1] for seed in TUNING_SEEDS)
            for rate in method.rates
        }
        for method in methods
    }
    best = {name: min(found, key=lambda rate: found[rate]) for name, found in losses.items()}
    return best, {name: {f"{rate:g}": loss for rate, loss in found.items()} for name, found in losses.items()}


def make_methods(small_batch: int, num_steps: int) -> list[Method]:
    large = {"batch": GROWTH * small_batch, "num_steps": num_steps}
    return [
        Method(
            name=f"SGD, batch {small_batch}",
            optimizer="SGD",
            batch=small_batch,
            num_steps=GROWTH * num_steps,
            rates=(0.00625, 0.0125, 0.025, 0.05, 0.1),
        ),
        Method(name="SGD, tuned", optimizer="SGD", rates=(0.1, 0.2, 0.4, 0.8, 1.6), **large),
        Method(name="LARS, tuned", optimizer="LARS", rates=(4.0, 8.0, 16.0, 32.0, 64.0), **large),
        Method(name="LAMB, tuned", optimizer="LAMB", rates=(0.01, 0.02, 0.04, 0.08, 0.16), **large),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--batch", type=int, default=8, help="the small batch")
    parser.add_argument("--steps", type=int, default=160, help="steps with the large batch")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--device", default="cpu", help='"cuda" for one GPU')
    parser.add_argument("--output", type=Path, default=Path("large-batch.json"))
    parser.add_argument("--tiny", action="store_true", help="few steps and rates")
    options = parser.parse_args()
    started = time.perf_counter()
    methods = make_methods(options.batch, 4 if options.tiny else options.steps)
    if options.tiny:
        methods = [Method(**{**_fields(method), "rates": method.rates[2:3]}) for method in methods]
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:

        def run_all(wanted: Sequence[tuple[Method, float, int]]) -> list[Curve]:
            # Long runs first, so that no process ends with one.
            order = sorted(range(len(wanted)), key=lambda number: -wanted[number][0].num_steps)
            futures = {number: pool.submit(train, *wanted[number], options.device) for number in order}
            return [futures[number].result() for number in range(len(wanted))]

        best, tuned = tune(methods, run_all)
        small = methods[0]
        large = methods[1]
        linear = Method(**{**_fields(large), "name": "SGD, linear rule", "rates": ()})
        factor = batch_scaling("linear", global_batch=large.batch, base_batch=small.batch)
        rows = [small, linear, *methods[1:]]
        rates = {**best, linear.name: factor * best[small.name]}
        wanted = [(method, rates[method.name], seed) for method in rows for seed in SEEDS]
        curves = run_all(wanted)
    title = f"Digits: batch {small.batch} and {large.batch}, {large.batch * large.num_steps:,} samples"
    print(f"{title}; {len(SEEDS)} seeds, {time.perf_counter() - started:.0f} s\n")
    print("| method | rates tried | rate | held-out accuracy, % | held-out loss |\n|---|---|---|---|---|")
    series: list[dict[str, Any]] = []
    for method in rows:
        mine = [curve for (one, _, _), curve in zip(wanted, curves, strict=True) if one is method]
        accuracies = [100 * curve.accuracy[-1] for curve in mine]
        losses = [curve.loss[-1] for curve in mine]
        tried = ", ".join(f"{rate:g}" for rate in method.rates) or f"{factor:g} × that of the small batch"
        print(
            f"| {method.name} | {tried} | {rates[method.name]:g} | {statistics.fmean(accuracies):.1f} "
            f"({min(accuracies):.1f} to {max(accuracies):.1f}) | {statistics.fmean(losses):.3f} |"
        )
        series += [
            {"name": method.name, "seed": seed, "x": curve.samples, "y": curve.accuracy}
            for seed, curve in zip(SEEDS, mine, strict=True)
        ]
    result = {
        "title": title,
        "x_label": "samples seen",
        "y_label": "held-out accuracy",
        "series": series,
        "rates": rates,
        "tuning_losses": tuned,
    }
    options.output.write_text(json.dumps(result, indent=1))


def _fields(method: Method) -> dict[str, Any]:
    return {name: getattr(method, name) for name in method.__slots__}


if __name__ == "__main__":
    main()
