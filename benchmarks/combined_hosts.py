"""Which axis belongs inside a host: two axes of 2 on two emulated hosts of two ranks, laid out both ways.

    python benchmarks/combined_hosts.py [--bandwidth 1Gbit] [--delay 0.2ms] [--samples 8 32] [--hidden 128]
                                        [--layouts tensor ulysses pipeline] [--rounds N] [--quick]

All layouts train one GPT on the same global batch, on an emulated network (docs/lab.md; it needs root). The axis named
first is the outer one, between the hosts; only `[axes] order` differs within a pair. With w the bytes of all
weights, n those of the batch's activations between two blocks, and L blocks, a host sends to the other per step

    data x tensor            w              gradients of a shard per rank
    tensor x data            (4 L + 2) n    per block, two sums of activations and two of their gradients; both ends
    data x ulysses           w              gradients, summed inside the host first
    ulysses x data           w + 2 L n      in addition half of queries, keys, values and outputs, each way
    data x pipeline          w              gradients of a stage per rank
    pipeline x data          n              activations at the one cut, gradients the other way
    pipeline x tensor        2 n            the same from both ranks, each of which has the whole activations

so the best layout depends on the number of tokens per byte of weights; and gradients can be sent while the step
still computes, whereas activations are waited for. The table gives the counted bytes and the time.

Layouts are timed alternately in one run, after a check that their losses agree; the slowest rank counts. Bytes are
those of IP packets that one host sent to the other per step. Pipelines run 4 microbatches, the others one.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.distributed as dist
from sequence_hosts import time_step
from sequence_sides import CHECKED_STEPS, adamw, make_batch, make_model
from sequence_timing import FEWEST_ROUNDS, Times, median_ms, ratio, turns
from two_hosts import run_on_two_hosts

import weft
from weft.layout import part_of
from weft.models.gpt import GPTConfig
from weft.plan.plan import AXES, Axes, Plan, Step
from weft.units import format_bytes
from weft.world import join_world, leave_world

SIZES = GPTConfig(vocab_size=256, context=128, num_layers=4, heads=8, tied=False)
"""Everything except the width: CPU cores are slow relative to any network, and a wide model computes much per byte."""
NUM_MICROBATCHES = 4
GROUPS = {
    "tensor": (("data", "tensor"), ("tensor", "data")),
    "ulysses": (("data", "ulysses"), ("ulysses", "data")),
    "pipeline": (("data", "pipeline"), ("pipeline", "data"), ("pipeline", "tensor")),
}
"""Outer and inner axis; the others of a group are compared with its first."""


def title(layout: tuple[str, str]) -> str:
    return " x ".join(layout)


def make_plan(layout: tuple[str, str]) -> Plan:
    order = (*layout, *(axis for axis in AXES if axis not in layout))
    microbatches = NUM_MICROBATCHES if "pipeline" in layout else 1
    return Plan(axes=Axes(**dict.fromkeys(layout, 2), order=order), step=Step(microbatches=microbatches))


def make_trainer(config: GPTConfig, plan: Plan) -> weft.Trainer:
    return weft.parallelize(
        make_model(config),
        plan,
        loss="cross-entropy",
        optimizer=adamw,
        example=make_batch(config)[0],
        device="cpu",
    )


def run_size(config: GPTConfig, num_samples: int, args: argparse.Namespace) -> tuple[Times, Times]:
    """Seconds and bytes of every layout, by round."""
    plans = {title(layout): make_plan(layout) for name in args.layouts for layout in GROUPS[name]}
    trainers = {name: make_trainer(config, plan) for name, plan in plans.items()}
    whole = make_batch(config, num_samples)
    batches = {}
    for name, trainer in trainers.items():
        mine = slice(*part_of(num_samples, trainer.data_rank, trainer.data_size))
        batches[name] = (whole[0][mine], whole[1][mine])
    losses = {name: [float(one.step(*batches[name])) for _ in range(CHECKED_STEPS)] for name, one in trainers.items()}
    for row in zip(*losses.values(), strict=True):
        if not all(math.isclose(one, row[0], rel_tol=1e-4) for one in row):
            raise RuntimeError(f"the layouts do not compute the same: {losses}")
    rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in trainers}
    for name in turns(tuple(trainers), args.rounds):
        rounds[name].append(time_step(trainers[name], batches[name]))
    times, moved = ({name: [row[k] for row in rounds[name]] for name in rounds} for k in range(2))
    return times, moved


def compare(args: argparse.Namespace) -> Iterator[str]:
    yield f"{'tokens':>7s} {'between x inside':>18s} {'ms':>9s} {'/ first of its kind (95 %)':>30s} {'bytes':>10s}"
    for num_samples in args.samples:
        times, moved = run_size(replace(SIZES, hidden=args.hidden), num_samples, args)
        for group in args.layouts:
            first, *others = map(title, GROUPS[group])
            for name in (first, *others):
                row = f"{num_samples * SIZES.context:7d} {name:>18s} {median_ms(times, name):9.1f}"
                row += f" {ratio(times, name, first):>30s}"
                yield row + f" {format_bytes(statistics.median(moved[name])):>10s}"


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
    parser.add_argument("--samples", type=int, nargs="+", default=[8, 32], help="of 128 tokens, per step (8 32)")
    parser.add_argument("--hidden", type=int, default=128, help="the width of the model, of 8 heads (128)")
    parser.add_argument("--layouts", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--rounds", type=int, default=10, help="turns of each layout (10)")
    parser.add_argument("--quick", action="store_true", help="8 samples, 6 rounds")
    args = parser.parse_args()
    if args.quick:
        args.samples, args.rounds = [8], FEWEST_ROUNDS
    problems = [
        f"--samples {count} is not a multiple of 2 replicas x {NUM_MICROBATCHES} microbatches"
        for count in args.samples
        if count < 1 or count % (2 * NUM_MICROBATCHES)
    ]
    if args.hidden % (2 * SIZES.heads) or args.hidden < 1:
        problems.append(f"--hidden {args.hidden} is not a multiple of {SIZES.heads} heads of an even width")
    if args.rounds < FEWEST_ROUNDS:
        problems.append(f"--rounds {args.rounds} give no 95 % interval; use {FEWEST_ROUNDS} or more")
    if problems:
        parser.error("; ".join(problems))
    return args


def main() -> None:
    run_on_two_hosts(read_arguments(), run_rank)


if __name__ == "__main__":
    main()
