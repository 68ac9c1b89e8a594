"""Sequence parallelism: causal attention and a GPT step with ring, ulysses and both, against torch's ring and one rank.

    python benchmarks/sequence.py [--ranks 2 4] [--lengths 4096 8192] [--parts attention step] [--rounds N]
    python benchmarks/sequence.py --lengths 16384 --sides ring "ring, contiguous"
    python benchmarks/sequence.py --quick              # 4 ranks, 1024 tokens: two minutes on 2 cores

Attention: 1 sample, 8 heads of 64, float32, forward and backward. "ring" is zigzag over shared memory, weft's own
choice; "contiguous" gives each rank one run of tokens, so the last has nearly all the work; "sockets" sends keys around
by gloo, as torch does. torch's sides are the template beneath its context parallelism, with zigzag balance and the
same CPU kernel (`sequence_sides.py`). Step: a GPT of 4 blocks, 512 wide, with fused AdamW, on one sequence.

Ranks are gloo processes of one thread and need one core each: on fewer cores the operating system evens out the same
imbalance as zigzag. Sides alternate, in an order that rotates every round; a barrier precedes each run, and the slowest
rank counts. Every side's results are compared with one process's before anything is timed. Ratios are medians over
rounds with the 95 % interval of that median (order statistics).
"""

from __future__ import annotations

import argparse
import functools
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.distributed as dist
from sequence_sides import (
    GPT_SIZES,
    alone_step,
    check_attention,
    check_losses,
    make_batch,
    make_sides,
    make_tensors,
    sequence_plan,
    weft_step,
)
from sequence_timing import FEWEST_ROUNDS, Times, median_ms, ratio, time_in_turn
from torch.multiprocessing.spawn import start_processes

from weft.plan.partition.sequence import allowed_pairs, make_places
from weft.world import World, join_world

PARTS = ("attention", "step")
GOAL, GOAL_RANKS = 1.6, 4
CHECKED_TOKENS_PER_RANK = 128


def ideal_ratio(num_ranks: int, num_tokens: int) -> float:
    """Pairs computed by the busiest rank, contiguous over zigzag."""
    busiest = []
    for layout in ("contiguous", "zigzag"):
        places = make_places(num_tokens, ring=num_ranks, ulysses=1, layout=layout)
        busiest.append(max(sum(allowed_pairs(places, rank)) for rank in range(num_ranks)))
    return busiest[0] / busiest[1]


def compare_attention(world: World, num_tokens: int, num_rounds: int, wanted: list[str]) -> Iterator[str]:
    checked_tokens = CHECKED_TOKENS_PER_RANK * world.size
    check_attention(make_sides(checked_tokens, world), checked_tokens)
    sides, tensors = make_sides(num_tokens, world), make_tensors(num_tokens)
    unknown = [name for name in wanted if name not in sides]
    if unknown:
        raise ValueError(f"--sides {', '.join(unknown)}: there is no such side; there are {'; '.join(sides)}")
    sides = {name: side for name, side in sides.items() if not wanted or name in wanted}
    runs = {
        name: functools.partial(side.run, *(one[:, :, side.tokens_T].contiguous() for one in tensors))
        for name, side in sides.items()
    }
    time_in_turn(runs, num_rounds=1)
    times = time_in_turn(runs, num_rounds=num_rounds)
    fastest = min(
        (name for name in sides if name.startswith("torch")), key=lambda name: median_ms(times, name), default=""
    )
    beside = [name for name in ("one rank", "ring, contiguous", fastest) if name in sides]
    yield f"\nattention, {world.size} ranks, {num_tokens} tokens"
    yield f"{'side':>20s} {'ms':>9s} " + " ".join(f"{over + ' / side':>24s}" for over in beside)
    for name in sides:
        ratios = " ".join(f"{ratio(times, over, name):>24s}" for over in beside)
        yield f"{name:>20s} {median_ms(times, name):9.1f} {ratios}"
    if not {"ring", "ring, contiguous"} <= sides.keys():
        return
    goal = f"; goal: {GOAL}" if world.size == GOAL_RANKS else ""
    yield (
        f"contiguous / zigzag: {ratio(times, 'ring, contiguous', 'ring')}{goal}; by pairs of the busiest rank: "
        f"{ideal_ratio(world.size, num_tokens):.2f}"
    )


def compare_steps(world: World, num_tokens: int, num_rounds: int, wanted: list[str]) -> Iterator[str]:
    config = replace(GPT_SIZES, context=num_tokens)
    plans = {
        "ring": sequence_plan(ring=world.size),
        "ring, contiguous": sequence_plan(ring=world.size, layout="contiguous"),
        "ulysses": sequence_plan(ulysses=world.size),
    }
    if world.size >= 4:
        plans["ulysses 2 x ring"] = sequence_plan(ulysses=2, ring=world.size // 2)
    plans = {name: plan for name, plan in plans.items() if not wanted or name in wanted}
    steps = {"one rank": alone_step(config)} | {name: weft_step(config, plan) for name, plan in plans.items()}
    batch = make_batch(config)
    check_losses(steps, batch)
    times: Times = time_in_turn(
        {name: functools.partial(step, *batch) for name, step in steps.items()}, num_rounds=num_rounds
    )
    yield f"\na GPT's step, {world.size} ranks, {num_tokens} tokens"
    yield f"{'side':>20s} {'ms':>9s} {'one rank / side (95 %)':>24s}"
    for name in steps:
        yield f"{name:>20s} {median_ms(times, name):9.1f} {ratio(times, 'one rank', name):>24s}"


def run_rank(rank: int, num_ranks: int, folder: str, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    world = join_world("cpu")
    compares = {"attention": (compare_attention, args.lengths), "step": (compare_steps, args.step_lengths)}
    for part in args.parts:
        compare, lengths = compares[part]
        for num_tokens in lengths:
            for line in compare(world, num_tokens, args.rounds, args.sides):
                if rank == 0:
                    print(line, flush=True)
    dist.barrier()
    dist.destroy_process_group()


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="even numbers (2 4)")
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[4096, 8192], help="tokens, for attention (4096 8192)"
    )
    parser.add_argument("--step-lengths", type=int, nargs="+", default=[4096], help="tokens, for the step (4096)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--sides", nargs="+", default=[], help="names as printed; by default all")
    parser.add_argument("--rounds", type=int, default=8, help="turns of each side (8)")
    parser.add_argument("--quick", action="store_true", help="4 ranks, 1024 tokens, 6 rounds")
    args = parser.parse_args()
    if args.quick:
        args.ranks, args.lengths, args.step_lengths, args.rounds = [4], [1024], [1024], FEWEST_ROUNDS
    problems = [f"--ranks {count} is odd or none; give even numbers" for count in args.ranks if count < 2 or count % 2]
    problems += [
        f"a sequence of {length} tokens cannot be cut into {2 * count} equal chunks, as torch must"
        for count in args.ranks
        for length in {*args.lengths, *args.step_lengths}
        if count > 0 and (length < 1 or length % (2 * count))
    ]
    if args.rounds < FEWEST_ROUNDS:
        problems.append(f"--rounds {args.rounds} give no 95 % interval; use {FEWEST_ROUNDS} or more")
    if problems:
        parser.error("; ".join(problems))
    return args


def main() -> None:
    args = read_arguments()
    print(
        f"gloo on the CPU, one thread per rank, {len(os.sched_getaffinity(0))} cores, torch {torch.__version__}; "
        f"medians of {args.rounds} rounds"
    )
    for num_ranks in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            start_processes(run_rank, args=(num_ranks, folder, args), nprocs=num_ranks, start_method="spawn")


if __name__ == "__main__":
    main()
