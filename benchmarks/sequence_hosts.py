"""Ulysses inside a host and the ring between hosts: each alone and both together, on two emulated hosts of two ranks.

    python benchmarks/sequence_hosts.py [--bandwidth 1Gbit] [--delay 0.2ms] [--lengths 1024 4096] [--kv-heads 8 2]
                                        [--rounds N] [--quick]

Two hosts of two ranks on an emulated network (docs/lab.md; it needs root); one sequence is split over all four. Both
together, in the plan's default order of axes, exchange heads inside a host and pass keys around between the hosts.
With n the bytes of all queries and g key heads per query head, a host sends to the other per block, forward and
backward,

    ring 4                 4.5 g n      three hops of keys and values; backward three more, and their gradients
    ulysses 4              (1 + g) n    half of queries, keys, values and outputs, each way
    ulysses 2 x ring 2     3 g n        one hop; backward one more, and its gradients

(ulysses sends a key head to every rank that needs it, so there g counts as 4 / 8 at least.) So with as many key heads
as query heads ulysses sends least, with few the ring does; and only the ring overlaps computation. Gradients of
weights cross in every case, and have the same size for any sequence length: "weights" is their share, from a
run on one token per rank.

All splits are timed alternately in one run, after a check that their losses agree; the slowest rank counts. Bytes are
those of IP packets that one host sent to the other per step.
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
from sequence_sides import CHECKED_STEPS, make_batch, make_trainer, sequence_plan
from sequence_timing import FEWEST_ROUNDS, Times, median_ms, ratio, turns
from two_hosts import run_on_two_hosts

import weft
from weft.lab.counters import read_counters
from weft.models.gpt import GPTConfig
from weft.units import format_bytes
from weft.world import join_world, leave_world

SIZES = GPTConfig(vocab_size=256, num_layers=4, hidden=256, heads=8)
"""Narrow, because CPU cores are slow relative to any network: the wider a model, the more it computes per byte."""
PLANS = {
    "ring 4": sequence_plan(ring=4),
    "ulysses 4": sequence_plan(ulysses=4),
    "ulysses 2 x ring 2": sequence_plan(ulysses=2, ring=2),
}
TOGETHER = "ulysses 2 x ring 2"
FEWEST_TOKENS = 4
"""Tokens, one per rank."""


def sent_bytes() -> int:
    """Bytes that the first host has sent to the second so far."""
    return read_counters()[0, 1].bytes


def time_step(trainer: weft.Trainer, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[float, float]:
    """Seconds on the slowest rank, and bytes that one host sent to the other."""
    dist.barrier()
    before, started = sent_bytes(), time.perf_counter()
    float(trainer.step(*batch))
    taken_s = time.perf_counter() - started
    dist.barrier()  # the last packets may still be in flight
    taken = torch.tensor([taken_s, sent_bytes() - before], dtype=torch.float64)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return taken[0].item(), taken[1].item()


def run_size(num_tokens: int, kv_heads: int, num_rounds: int) -> tuple[Times, Times]:
    """Seconds and bytes of every split, by round."""
    config = replace(SIZES, context=num_tokens, kv_heads=kv_heads)
    batch = make_batch(config)
    trainers = {name: make_trainer(config, plan) for name, plan in PLANS.items()}
    losses = {name: [float(one.step(*batch)) for _ in range(CHECKED_STEPS)] for name, one in trainers.items()}
    for row in zip(*losses.values(), strict=True):
        if not all(math.isclose(one, row[0], rel_tol=1e-4) for one in row):
            raise RuntimeError(f"the splits do not compute the same: {losses}")
    rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in trainers}
    for name in turns(tuple(trainers), num_rounds):
        rounds[name].append(time_step(trainers[name], batch))
    times, moved = ({name: [row[k] for row in rounds[name]] for name in rounds} for k in range(2))
    return times, moved


def compare(args: argparse.Namespace) -> Iterator[str]:
    yield (
        f"{'tokens':>6s} {'key heads':>9s} {'split':>20s} {'ms':>8s} {'/ both together (95 %)':>26s} {'bytes':>10s}"
        f" {'weights':>10s} {'sequence':>10s}"
    )
    for kv_heads in args.kv_heads:
        _, weights = run_size(FEWEST_TOKENS, kv_heads, FEWEST_ROUNDS)
        for num_tokens in args.lengths:
            times, moved = run_size(num_tokens, kv_heads, args.rounds)
            for name in PLANS:
                whole, fixed = statistics.median(moved[name]), statistics.median(weights[name])
                row = f"{num_tokens:6d} {kv_heads:9d} {name:>20s} {median_ms(times, name):8.1f}"
                row += f" {ratio(times, name, TOGETHER):>26s}"
                yield row + "".join(f" {format_bytes(number):>10s}" for number in (whole, fixed, whole - fixed))


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
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096], help="tokens (1024 2048 4096)")
    parser.add_argument("--kv-heads", type=int, nargs="+", default=[8, 2], help="key heads for 8 query heads (8 2)")
    parser.add_argument("--rounds", type=int, default=10, help="turns of each split (10)")
    parser.add_argument("--quick", action="store_true", help="1024 tokens, 6 rounds")
    args = parser.parse_args()
    if args.quick:
        args.lengths, args.rounds = [1024], FEWEST_ROUNDS
    problems = [
        f"--lengths {count} is less than one token per rank; give 4 or more" for count in args.lengths if count < 4
    ]
    problems += [f"--kv-heads {count} do not divide {SIZES.heads}" for count in args.kv_heads if SIZES.heads % count]
    if args.rounds < FEWEST_ROUNDS:
        problems.append(f"--rounds {args.rounds} give no 95 % interval; use {FEWEST_ROUNDS} or more")
    if problems:
        parser.error("; ".join(problems))
    return args


def main() -> None:
    run_on_two_hosts(read_arguments(), run_rank)


if __name__ == "__main__":
    main()
