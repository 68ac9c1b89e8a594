"""What stale gradients cost: accuracy on handwritten digits against the mean staleness of asynchronous updates.

    python benchmarks/server_staleness.py [--seeds 4] [--jobs N] [--output PAGE.md]     # 20 minutes on one core
    python benchmarks/server_staleness.py --tiny                                        # to try the script
    python benchmarks/plots.py staleness.json -o docs/methods/server-staleness.svg

The network, data and schedule of `compression.py`. Workers are simulated: each computes a gradient of its own batch of
32 with the weights that it took last, for a time that is drawn anew (log-normal, one standard deviation 30 %), and
whoever is done first is applied first, by the server's own store of weights (`server/weights/store.py`). With W workers
that are equally fast a gradient is W - 1 updates old on average. All runs make as many updates of as many samples, so
that what differs is how old gradients are:

- *as they come*: every gradient is applied with the full rate;
- *compensated*: `[server] compensation` = λ, DC-ASGD;
- *scaled*: `[server] lr_scaling = "staleness"`, the rate over the age.

First all have the rate of one worker, as published comparisons do; then each has the best of several rates, because a
method that merely makes smaller steps should be compared with smaller steps. The best rate is chosen by the mean
accuracy that is shown, for all methods alike. Without momentum the rate is 1 / (1 - 0.9) times as much.
"""

from __future__ import annotations

import argparse
import heapq
import logging
import os
import random
import statistics
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from compression import GLOBAL_BATCH, MOMENTUM, RATE, STEPS, DigitsNet
from server_page import Page, mean_and_range, paired, table, write_picture

from weft.optim.schedule import warmup_cosine
from weft.plan.partition.server_shards import ServedPart, ServedTensor
from weft.server.weights.store import PartStore
from weft.training.data.datasets import digits

WORKERS = (1, 4, 8, 16, 32)
SHARES = (1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16)
"""Of the rate of one worker."""
SPREAD = 0.3
"""Of the logarithm of a worker's time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """What a server does with the age of a gradient."""

    compensation: float = 0.0
    scales: bool = False


PLAIN = "as they come"
VARIANTS = {
    PLAIN: Variant(),
    "compensated, λ = 0.04": Variant(compensation=0.04),
    "compensated, λ = 1": Variant(compensation=1.0),
    "compensated, λ = 10": Variant(compensation=10.0),
    "scaled": Variant(scales=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One run."""

    momentum: float
    variant: str
    workers: int
    share: float
    """Of the rate of one worker."""
    seed: int
    steps: int


def rate_of(momentum: float) -> float:
    """Of one worker: with each momentum a gradient moves the weights equally far in the end."""
    return RATE * (1 - momentum) / (1 - MOMENTUM)


def make_store(model: DigitsNet, kind: Kind) -> PartStore:
    """The weights of a model on one server, whole."""
    named = dict(model.named_parameters())
    tensors = [ServedTensor(name=name, numel=one.numel(), item_bytes=4) for name, one in named.items()]
    parts = [ServedPart(tensor=number, start=0, stop=one.numel) for number, one in enumerate(tensors)]
    variant = VARIANTS[kind.variant]
    settings = {"lr": kind.share * rate_of(kind.momentum), "momentum": kind.momentum}
    group = {"settings": settings, "tensors": list(named)}
    return PartStore(
        tensors,
        parts,
        [one.detach().flatten().clone() for one in named.values()],
        {"class": "torch.optim.sgd.SGD", "groups": [group]},
        compensation=variant.compensation,
        scales_by_staleness=variant.scales,
    )


def train(kind: Kind) -> tuple[float, float]:
    """Mean staleness, and the accuracy in % after a run; in a process of its own."""
    torch.set_num_threads(1)
    logging.getLogger("weft").setLevel(logging.ERROR)
    training, held_out = digits()
    torch.manual_seed(kind.seed)
    model = DigitsNet()
    store = make_store(model, kind)
    schedule, draw = warmup_cosine(kind.steps // 20, kind.steps, 0.0), random.Random(kind.seed)
    samples = torch.Generator().manual_seed(kind.seed)

    def take(worker: int) -> tuple[torch.Tensor, ...]:
        weights = store.take(worker)
        store.lend(lambda: False)  # until the worker takes others
        return weights

    taken = {worker: take(worker) for worker in range(kind.workers)}
    ends = [(draw.lognormvariate(0.0, SPREAD), worker) for worker in range(kind.workers)]
    heapq.heapify(ends)
    for step in range(kind.steps):
        now, worker = heapq.heappop(ends)
        for parameter, values in zip(model.parameters(), taken[worker], strict=True):
            parameter.data, parameter.grad = values.view(parameter.shape), None
        chosen = torch.randint(len(training), (GLOBAL_BATCH,), generator=samples)
        inputs, targets = training.take(chosen.numpy())
        F.cross_entropy(model(torch.as_tensor(inputs)), torch.as_tensor(targets)).backward()
        gradients = [None if one.grad is None else one.grad.flatten() for one in model.parameters()]
        store.update(gradients, lr_factor=schedule(step), worker=worker)
        taken[worker] = take(worker)
        heapq.heappush(ends, (now + draw.lognormvariate(0.0, SPREAD), worker))
    for parameter, final in zip(model.parameters(), store.parameters, strict=True):
        parameter.data = final.detach().view(parameter.shape)
    inputs, targets = held_out.take(torch.arange(len(held_out)).numpy())
    with torch.no_grad():
        is_right = model(torch.as_tensor(inputs)).argmax(1) == torch.as_tensor(targets)
    ages = store.staleness
    return sum(age * number for age, number in ages.items()) / kind.steps, 100 * float(is_right.double().mean())


class Found:
    """Accuracies and mean staleness by kind, computed beside each other, or here."""

    def __init__(self, args: argparse.Namespace, pool: ProcessPoolExecutor) -> None:
        self._args = args
        kinds = [
            Kind(momentum=momentum, variant=name, workers=number, share=share, seed=seed, steps=args.steps)
            for momentum in args.momentum
            for name in VARIANTS
            for number in args.workers
            for share in args.shares
            for seed in range(args.seeds)
            if number > 1 or name == PLAIN  # one worker's gradients are never old
        ]
        self._pending = {kind: pool.submit(train, kind) for kind in kinds}

    def runs(self, momentum: float, name: str, number: int, share: float) -> list[tuple[float, float]]:
        """(mean staleness, accuracy) of all seeds."""
        name = PLAIN if number == 1 else name
        common = {"momentum": momentum, "variant": name, "workers": number, "share": share, "steps": self._args.steps}
        return [self._pending[Kind(**common, seed=seed)].result() for seed in range(self._args.seeds)]

    def accuracies(self, momentum: float, name: str, number: int, share: float) -> list[float]:
        return [accuracy for _, accuracy in self.runs(momentum, name, number, share)]

    def staleness(self, momentum: float, number: int) -> float:
        return statistics.fmean(age for age, _ in self.runs(momentum, PLAIN, number, 1.0))

    def best_share(self, momentum: float, name: str, number: int) -> float:
        """Of the rate of one worker, the part with which a method is most accurate."""
        means = {share: statistics.fmean(self.accuracies(momentum, name, number, share)) for share in self._args.shares}
        return max(means, key=lambda share: means[share])


def tell(page: Page, found: Found, momentum: float, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The tables of one momentum, and its panels."""

    def share_of(name: str, number: int, *, is_best: bool) -> float:
        return found.best_share(momentum, name, number) if is_best else 1.0

    panels = []
    for is_best in (False, True):
        which = "each at its best rate" if is_best else "all at the rate of one worker"
        page.add("", f"## Momentum {momentum:g}, {which}", "")
        if is_best:
            page.add(f"The rate is that of one worker, {rate_of(momentum):g}, times the number behind the @.", "")
        rows = []
        for number in args.workers:
            cells = []
            for name in VARIANTS:
                share = share_of(name, number, is_best=is_best)
                cell = mean_and_range(found.accuracies(momentum, name, number, share))
                cells.append(f"{cell} @ {share:g}" if is_best else cell)
            rows.append([str(number), f"{found.staleness(momentum, number):.1f}", *cells])
        page.add(*table(["workers", "mean staleness", *VARIANTS], rows))
        series = []
        for name in VARIANTS:
            shares = [share_of(name, number, is_best=is_best) for number in args.workers]
            by_workers = [
                found.accuracies(momentum, name, number, share)
                for number, share in zip(args.workers, shares, strict=True)
            ]
            for seed, accuracies in enumerate(zip(*by_workers, strict=True)):
                series.append({"name": name, "seed": seed, "x": list(args.workers), "y": list(accuracies)})
        labels = {"x_label": "workers (mean staleness + 1)", "y_label": "accuracy, %", "log_x": True}
        panels.append({"title": f"momentum {momentum:g}, {which}", **labels, "series": series})
    page.add("", f"Points over *{PLAIN}*, each at its best rate, in pairs of seeds (interval of 95 %):", "")
    others = [name for name in VARIANTS if name != PLAIN]
    rows = []
    for number in args.workers:
        if number > 1:
            best = {
                name: found.accuracies(momentum, name, number, found.best_share(momentum, name, number))
                for name in VARIANTS
            }
            rows.append([str(number), *(paired(best[name], best[PLAIN]) for name in others)])
    page.add(*table(["workers", *others], rows))
    return panels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=4, help="runs of each kind (4)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"updates of a run ({STEPS})")
    parser.add_argument("--workers", type=int, nargs="+", default=WORKERS, help="numbers of workers")
    parser.add_argument("--momentum", type=float, nargs="+", default=[MOMENTUM, 0.0], help="of the server's SGD")
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES, help="of the rate of one worker, with 1")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs beside each other (one per core)")
    parser.add_argument("--json", type=Path, default=Path("staleness.json"), help="the picture (staleness.json)")
    parser.add_argument("--output", type=Path, help="a page to write")
    parser.add_argument("--tiny", action="store_true", help="few steps, rates and workers, two seeds")
    args = parser.parse_args()
    if args.tiny:
        args.seeds, args.steps, args.workers, args.shares = 2, 40, (1, 4), (1.0, 0.25)
    if 1.0 not in args.shares:
        parser.error(f"--shares {' '.join(map(str, args.shares))} lacks 1, the rate that all have in the first table")
    page = Page("Stale gradients on handwritten digits", f"Accuracy in %, mean of {args.seeds} seeds (least to most).")
    panels = []
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        found = Found(args, pool)
        for momentum in args.momentum:
            panels += tell(page, found, momentum, args)
            write_picture(args.json, "Stale gradients on digits", panels)
    page.write(args.output)


if __name__ == "__main__":
    main()
