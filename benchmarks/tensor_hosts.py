"""Why tensor parallelism stays inside a host: tensor 2 × data 2 on two emulated hosts, laid out both ways.

    python benchmarks/tensor_hosts.py [--bandwidth 1Gbit] [--delay 0.2ms] [--samples 1 8 32] [--rounds N] [--quick]

Two hosts of two ranks on an emulated network (docs/lab.md; it needs root). Inside: the ranks of one host shard every
layer, and gradients cross between the hosts, as in the plan's default order of axes. Across: the reverse. Activations
cross the tensor axis four times per block, without overlap; gradients cross the data axis once per step, during the
backward pass. The number of tokens per replica and step is decisive: gradients are as large as the weights for any
number of tokens, and activations grow with it. The table shows both.

Both layouts are timed alternately in one run, on the model of tensor_sides.py in a size of its own, after a check that
their losses agree; the slowest rank counts. Bytes are those of IP packets that crossed the switch per step, both ways.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.distributed as dist
from tensor_sides import Batch, Size, adamw, make_batch, make_model
from two_hosts import run_on_two_hosts

import weft
from weft.lab.counters import read_counters
from weft.plan.plan import AXES, Axes, Plan
from weft.units import format_bytes
from weft.world import join_world, leave_world

SIZE = Size(
    vocab_size=512,
    hidden=128,
    num_layers=4,
    heads=4,
    kv_heads=2,
    mlp_hidden=352,
    num_samples=1,
    num_tokens=128,
    steps=1,
    goal=1.0,
)
"""Narrow, because CPU cores are slow relative to any network: the wider a model, the more it computes per byte."""
ORDERS = {"inside": AXES, "across": ("tensor", *(axis for axis in AXES if axis != "tensor"))}
"""The ranks along the last axis are neighbours, on one host."""


def make_trainer(order: tuple[str, ...], batch: Batch) -> weft.Trainer:
    plan = Plan(axes=Axes(tensor=2, data=2, order=order))
    return weft.parallelize(
        make_model(SIZE), plan, loss="cross-entropy", optimizer=adamw, example=batch[0], device="cpu"
    )


def crossed_bytes() -> int:
    return sum(pair.bytes for pair in read_counters().values())


def time_step(trainer: weft.Trainer, batch: Batch) -> tuple[float, float]:
    """Seconds on the slowest rank, and bytes sent between the hosts."""
    dist.barrier()
    before, started = crossed_bytes(), time.perf_counter()
    float(trainer.step(*batch))
    taken = torch.tensor([time.perf_counter() - started, crossed_bytes() - before], dtype=torch.float64)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return taken[0].item(), taken[1].item()


def compare(args: argparse.Namespace) -> Iterator[str]:
    yield (
        f"{'tokens per replica':>16s} {'inside, ms':>11s} {'across, ms':>11s} {'across / inside (95 %)':>24s}"
        f" {'inside, bytes':>14s} {'across, bytes':>14s}"
    )
    for num_samples in args.samples:
        size = replace(SIZE, num_samples=num_samples)
        batch = make_batch(size)
        trainers = {name: make_trainer(order, batch) for name, order in ORDERS.items()}
        losses = {name: [float(trainer.step(*batch)) for _ in range(3)] for name, trainer in trainers.items()}
        if not all(math.isclose(*pair, rel_tol=1e-4) for pair in zip(*losses.values(), strict=True)):
            raise RuntimeError(f"the layouts do not compute the same: {losses}")
        rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in trainers}
        for number in range(args.rounds):
            for name in list(trainers)[:: 1 if number % 2 else -1]:
                rounds[name].append(time_step(trainers[name], batch))
        times, moved = ({name: [row[k] for row in rounds[name]] for name in rounds} for k in range(2))
        ratios = sorted(a / b for a, b in zip(times["across"], times["inside"], strict=True))
        middle, half = len(ratios) // 2, math.ceil(0.98 * math.sqrt(len(ratios)))
        low, high = ratios[max(middle - half, 0)], ratios[min(middle + half, len(ratios) - 1)]
        row = f"{num_samples * size.num_tokens:16d}"
        row += "".join(f" {1e3 * statistics.median(times[name]):11.1f}" for name in ORDERS)
        row += f" {f'{statistics.median(ratios):.2f} ({low:.2f} to {high:.2f})':>24s}"
        yield row + "".join(f" {format_bytes(statistics.median(moved[name])):>14s}" for name in ORDERS)


def run_rank(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    world = join_world("cpu")
    for line in compare(args):
        if world.rank == 0:
            print(line, flush=True)
    dist.barrier()
    leave_world()


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bandwidth", default="1Gbit", help="of each host's line, each way (1Gbit)")
    parser.add_argument("--delay", default="0.2ms", help="one way, between the hosts (0.2ms)")
    parser.add_argument(
        "--samples", type=int, nargs="+", default=[1, 8, 32], help="of 128 tokens, per replica (1 8 32)"
    )
    parser.add_argument("--rounds", type=int, default=12, help="turns of each layout (12)")
    parser.add_argument("--quick", action="store_true", help="8 samples, 6 rounds")
    args = parser.parse_args()
    if args.quick:
        args.samples, args.rounds = [8], 6
    problems = [f"--samples {count} is no batch; give 1 or more" for count in args.samples if count < 1]
    if args.rounds < 6:
        problems.append(f"--rounds {args.rounds} give no 95 % interval; use 6 or more")
    if problems:
        parser.error("; ".join(problems))
    return args


def main() -> None:
    run_on_two_hosts(read_arguments(), run_rank)


if __name__ == "__main__":
    main()
