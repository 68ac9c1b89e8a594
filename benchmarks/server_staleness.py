"""What stale gradients cost: accuracy on handwritten digits against the mean staleness of asynchronous updates.

    python benchmarks/server_staleness.py [--seeds 5] [--jobs N] [--json staleness.json]     # 8 minutes on two cores
    python benchmarks/server_staleness.py --tiny                                             # to try the script
    python benchmarks/plots.py staleness.json -o docs/methods/server-staleness.svg

The network, data and rates of `compression.py`. Workers are simulated: each computes a gradient of its own batch with
the weights that it took last, for a time that is drawn anew (log-normal, one standard deviation 30 %), and whoever is
done first is applied first, by the server's own store of weights (`server/weights/store.py`). With W workers that are
equally fast a gradient is W - 1 updates old on average. All runs make as many updates of as many samples, so that what
differs is how old gradients are:

- *as they come*: every gradient is applied with the full rate;
- *compensated*: `[server] compensation` = λ, DC-ASGD;
- *scaled*: `[server] lr_scaling = "staleness"`, the rate over the age.
"""

from __future__ import annotations

import argparse
import heapq
import json
import logging
import os
import random
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.nn.functional as F
from compression import GLOBAL_BATCH, MOMENTUM, RATE, STEPS, DigitsNet

from weft.optim.schedule import warmup_cosine
from weft.plan.partition.server_shards import ServedPart, ServedTensor
from weft.server.weights.store import PartStore
from weft.training.data.datasets import digits

WORKERS = (1, 2, 4, 8, 16, 32)
SPREAD = 0.3
"""Of the logarithm of a worker's time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """What a server does with the age of a gradient."""

    compensation: float = 0.0
    scales: bool = False


VARIANTS = {
    "as they come": Variant(),
    "compensated, λ = 0.04": Variant(compensation=0.04),
    "compensated, λ = 1": Variant(compensation=1.0),
    "scaled": Variant(scales=True),
}


def make_store(model: DigitsNet, variant: Variant, momentum: float) -> PartStore:
    """The weights of a model on one server, whole."""
    named = dict(model.named_parameters())
    tensors = [ServedTensor(name=name, numel=one.numel(), item_bytes=4) for name, one in named.items()]
    parts = [ServedPart(tensor=number, start=0, stop=one.numel) for number, one in enumerate(tensors)]
    group = {"settings": {"lr": RATE, "momentum": momentum}, "tensors": list(named)}
    return PartStore(
        tensors,
        parts,
        [one.detach().flatten().clone() for one in named.values()],
        {"class": "torch.optim.sgd.SGD", "groups": [group]},
        compensation=variant.compensation,
        scales_by_staleness=variant.scales,
    )


def train(name: str, num_workers: int, seed: int, steps: int, momentum: float) -> tuple[float, float]:
    """Mean staleness, and the accuracy in % after a run; in a process of its own."""
    torch.set_num_threads(1)
    logging.getLogger("weft").setLevel(logging.ERROR)
    training, held_out = digits()
    torch.manual_seed(seed)
    model = DigitsNet()
    store = make_store(model, VARIANTS[name], momentum)
    schedule, draw = warmup_cosine(steps // 20, steps, 0.0), random.Random(seed)
    samples = torch.Generator().manual_seed(seed)

    def take(worker: int) -> tuple[torch.Tensor, ...]:
        weights = store.take(worker)
        store.lend(lambda: False)  # until the worker takes others
        return weights

    taken = {worker: take(worker) for worker in range(num_workers)}
    ends = [(draw.lognormvariate(0.0, SPREAD), worker) for worker in range(num_workers)]
    heapq.heapify(ends)
    for step in range(steps):
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
    return sum(age * number for age, number in ages.items()) / steps, 100 * float(is_right.double().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="runs of each kind (5)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"updates of a run ({STEPS})")
    parser.add_argument("--workers", type=int, nargs="+", default=WORKERS, help="numbers of workers")
    parser.add_argument("--momentum", type=float, nargs="+", default=[MOMENTUM, 0.0], help="of the server's SGD")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs beside each other (one per core)")
    parser.add_argument("--json", type=Path, default=Path("staleness.json"), help="results (staleness.json)")
    parser.add_argument("--tiny", action="store_true", help="few steps and workers, two seeds")
    args = parser.parse_args()
    if args.tiny:
        args.seeds, args.steps, args.workers = 2, 40, (1, 4)
    started, panels = time.perf_counter(), []
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        pending = {
            (momentum, name, number): [
                pool.submit(train, name, number, seed, args.steps, momentum) for seed in range(args.seeds)
            ]
            for momentum in args.momentum
            for name in VARIANTS
            for number in args.workers
        }
        for momentum in args.momentum:
            print(f"\nmomentum {momentum:g}: accuracy in %, mean of {args.seeds} seeds (least to most)\n")
            print(f"| workers | mean staleness | {' | '.join(VARIANTS)} |\n|---|---|{'---|' * len(VARIANTS)}")
            series = {
                (name, seed): {"name": name, "seed": seed, "x": [], "y": []}
                for name in VARIANTS
                for seed in range(args.seeds)
            }
            for number in args.workers:
                cells, ages = [], []
                for name in VARIANTS:
                    found = [one.result() for one in pending[momentum, name, number]]
                    ages += [age for age, _ in found]
                    right = [accuracy for _, accuracy in found]
                    cells.append(f"{statistics.fmean(right):.1f} ({min(right):.1f} to {max(right):.1f})")
                    for seed, accuracy in enumerate(right):
                        one = series[name, seed]
                        one["x"].append(number - 1)
                        one["y"].append(accuracy)
                print(f"| {number} | {statistics.fmean(ages):.1f} | {' | '.join(cells)} |", flush=True)
            labels = {"x_label": "mean staleness (workers - 1)", "y_label": "accuracy, %"}
            panels.append({"title": f"momentum {momentum:g}", **labels, "series": list(series.values())})
            args.json.write_text(json.dumps({"title": "Stale gradients on digits", "panels": panels}, indent=1))
    print(f"\n{os.cpu_count()} cores, torch {torch.__version__}, {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
