"""Pipeline 2 × data 2 × tensor 2 with ZeRO-3: weft's step against torch's own stack, in the same processes and run.

    python benchmarks/combined.py [--sizes small middle] [--microbatches 4] [--rounds N] [--schedules 1f1b gpipe ...]
    python benchmarks/combined.py --quick             # the small model, 1f1b only
    python benchmarks/combined.py --compiled          # torch.compile of every block, on both sides

Each side runs a whole training step (forward, cross-entropy, backward, fused AdamW) of one Llama on 8 ranks. torch's
stack is `torch.distributed.pipelining` × FSDP2 × DTensor, in several forms: each schedule, logits gathered or sharded
(`loss_parallel`), parameters gathered once per step, as torchtitan does, or for every microbatch; weft is compared with
the fastest of a table, whatever its form. weft runs through shared memory and through sockets, which is all torch has.

In float64 the gradients of every side are first compared with one process's, and weft's with torch's; in float32 losses
over some updates. Then sides take turns, in an order that rotates every round; a barrier precedes each step, and the
slowest rank counts. Ratios are medians over rounds with the 95 % interval of that median (order statistics). Ranks are
gloo processes of one thread: with fewer cores than ranks they also wait for each other's cores.
"""

from __future__ import annotations

import argparse
import functools
import gc
import logging
import math
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
import torch.distributed as dist
from combined_sides import (
    DATA,
    PIPELINE,
    SCHEDULES,
    SHAPE,
    TENSOR,
    Gradients,
    Side,
    Work,
    alone,
    gradients_of,
    torch_side,
    weft_side,
    worst_error,
)
from sequence_timing import FEWEST_ROUNDS, Times, median_ms, ratio, turns
from tensor_sides import Batch, Size
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.multiprocessing.spawn import start_processes

GOAL = 2.0
NUM_RANKS = PIPELINE * DATA * TENSOR
EXACT = 1e-10
"""Tolerance relative to a gradient's largest entry, in float64."""
CLOSE = 1e-4
"""Relative tolerance of a loss in float32, over the checked steps."""
CHECKED_STEPS = 4

SIZES = {
    name: Size(
        vocab_size=vocab_size,
        hidden=hidden,
        num_layers=num_layers,
        heads=hidden // head_dim,
        kv_heads=hidden // head_dim // 2,
        mlp_hidden=11 * hidden // 4,
        num_samples=1,
        num_tokens=num_tokens,
        steps=1,
        goal=GOAL,
    )
    for name, vocab_size, hidden, head_dim, num_layers, num_tokens in (
        ("small", 256, 64, 16, 4, 32),
        ("middle", 1024, 256, 32, 8, 64),
        ("wide", 2048, 512, 64, 8, 128),
    )
}
Maker = Callable[[Work], Side]


def makers(mesh: DeviceMesh, schedules: list[str], *, compiled: bool) -> dict[str, Maker]:
    """torch's sides and weft's, by title."""
    theirs = functools.partial(torch_side, mesh=mesh, compiled=compiled)
    ours = functools.partial(weft_side, compiled=compiled)
    first = schedules[0]
    made: dict[str, Maker] = {f"torch {name}": functools.partial(theirs, schedule=name) for name in schedules}
    made[f"torch {first}, loss split"] = functools.partial(theirs, schedule=first, split_loss=True)
    made[f"torch {first}, per microbatch"] = functools.partial(theirs, schedule=first, reshard=True)
    made |= {f"weft {name}": functools.partial(ours, schedule=name) for name in schedules}
    made[f"weft {first}, sockets"] = functools.partial(ours, schedule=first, transport="c10d")
    made[f"weft {first}, per microbatch"] = functools.partial(ours, schedule=first, reshard="microbatch")
    return made


def check_gradients(made: dict[str, Maker], work: Work, place: int) -> Iterator[str]:
    """Check every side's gradients in float64 against one process's, and the first weft's against the first torch's."""
    loss, wanted = alone(work)
    first: dict[str, tuple[Side, Gradients]] = {}
    worst: dict[str, float] = {}
    for name, make in made.items():
        side = make(work)
        got, found = gradients_of(side, work.batches()[place])
        dist.barrier()  # all ranks finish before any frees a side whose last messages are unread
        worst[name] = worst_error(side, found, wanted)
        first.setdefault(name.split()[0], (side, found))
        # torch's loss is that of this rank's part of the batch; weft's is the whole batch's, as are its gradients.
        if name.startswith("weft") and (got is None or not math.isclose(got, loss, rel_tol=EXACT)):
            worst[name] = math.inf
        gc.collect()
    between = worst_error(*first["weft"], first["torch"][1])
    seen = torch.tensor([*worst.values(), between], dtype=torch.float64)
    dist.all_reduce(seen, op=dist.ReduceOp.MAX)
    compared = zip((*worst, "weft from torch"), seen.tolist(), strict=True)
    wrong = [f"{name} by {error:.1e}" for name, error in compared if not error < EXACT]
    if wrong:
        raise RuntimeError(f"gradients are off by more than {EXACT:.0e}: {'; '.join(wrong)}")
    yield (
        f"float64 gradients of all {len(made)} sides equal one process's: worst {seen[:-1].max():.1e}; "
        f"weft's from torch's {seen[-1]:.1e}"
    )


def check_losses(sides: dict[str, Side], batch: Batch) -> None:
    """Check that all sides have the same losses; torch's, of this rank's part of the batch, are averaged."""
    losses = {}
    for name, side in sides.items():
        said = torch.tensor([[math.nan if (loss := side.step(*batch)) is None else loss] for _ in range(CHECKED_STEPS)])
        told = [torch.empty_like(said) for _ in range(NUM_RANKS)]
        dist.all_gather(told, said)
        losses[name] = torch.cat(told, dim=1).nanmean(dim=1).tolist()
    first = next(iter(losses.values()))
    for name, found in losses.items():
        if not all(math.isclose(*pair, rel_tol=CLOSE) for pair in zip(found, first, strict=True)):
            raise RuntimeError(f"{name} has the losses {found}, {next(iter(losses))} {first}; they differ")


def time_in_turn(sides: dict[str, Side], batch: Batch, *, num_rounds: int, title: str) -> Times:
    """Seconds of each side's step on the slowest rank, by round; shows progress."""
    times: Times = {name: [] for name in sides}
    order = turns(tuple(sides), num_rounds)
    for number, name in enumerate(order):
        dist.barrier()
        started = time.perf_counter()
        sides[name].step(*batch)
        times[name].append(time.perf_counter() - started)
        if dist.get_rank() == 0 and (number + 1) % len(sides) == 0:
            done = (number + 1) // len(sides)
            print(f"\r{title}: round {done} of {num_rounds}", end="\n" if done == num_rounds else "", file=sys.stderr)
    slowest = torch.tensor([times[name] for name in sides], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return dict(zip(sides, slowest.tolist(), strict=True))


def compare(size_name: str, args: argparse.Namespace) -> Iterator[str]:
    mesh = init_device_mesh("cpu", SHAPE, mesh_dim_names=("pipeline", "data", "tensor"))
    place = mesh.get_local_rank("data")
    work = Work(size=replace(SIZES[size_name], num_samples=args.samples), num_microbatches=args.microbatches)
    size, tokens = work.size, sum(inputs.numel() for inputs, _ in work.batches())
    yield f"\n{size_name}: {size.hidden} wide, {size.num_layers} blocks, {size.vocab_size} words, {tokens} tokens"
    made = makers(mesh, args.schedules, compiled=args.compiled)
    yield from check_gradients(made, replace(work, dtype=torch.float64), place)
    sides = {name: make(work) for name, make in made.items()}
    batch = work.batches()[place]
    check_losses(sides, batch)
    time_in_turn(sides, batch, num_rounds=2, title="warming up")
    times = time_in_turn(sides, batch, num_rounds=args.rounds, title=size_name)
    rivals = [name for name in sides if name.startswith("torch")]
    best = min(rivals, key=lambda name: median_ms(times, name))
    yield f"{'side':>28s} {'step, ms':>9s} {'fastest torch / side (95 %)':>28s}"
    for name in sides:
        yield f"{name:>28s} {median_ms(times, name):9.1f} {ratio(times, best, name):>28s}"
    ours = f"weft {args.schedules[0]}"
    yield f"{best} / {ours}: {ratio(times, best, ours)}; goal: {GOAL:.1f}"
    yield f"the same through sockets: {ratio(times, best, f'{ours}, sockets')}"
    pair = [f"{library} {args.schedules[0]}, per microbatch" for library in ("torch", "weft")]
    yield f"both gathering per microbatch: {ratio(times, *pair)}"


def run_rank(rank: int, folder: str, size_name: str, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    # torch's stack warns about its own internals, and about how the check gathers its gradients.
    warnings.simplefilter("ignore")
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    torch._dynamo.config.recompile_limit = 64
    store = dist.FileStore(f"{folder}/store", NUM_RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)
    for line in compare(size_name, args):
        if rank == 0:
            print(line, flush=True)
    dist.barrier()
    dist.destroy_process_group()


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["small", "middle"])
    parser.add_argument(
        "--schedules",
        nargs="+",
        choices=SCHEDULES,
        default=list(SCHEDULES),
        help="the first is compared with torch's fastest",
    )
    parser.add_argument("--microbatches", type=int, default=4, help="per step (4)")
    parser.add_argument("--samples", type=int, default=1, help="per microbatch and replica (1)")
    parser.add_argument("--rounds", type=int, default=12, help="turns of each side (12)")
    parser.add_argument("--compiled", action="store_true", help="compile every block, on both sides")
    parser.add_argument("--quick", action="store_true", help="the small model, 1f1b, 6 rounds")
    args = parser.parse_args()
    if args.quick:
        args.sizes, args.schedules, args.rounds = ["small"], ["1f1b"], FEWEST_ROUNDS
    problems = []
    if "interleaved" in args.schedules and args.microbatches % PIPELINE:
        problems.append(f"--microbatches {args.microbatches} do not fill rounds of {PIPELINE} stages; give a multiple")
    if min(args.microbatches, args.samples) < 1:
        problems.append(f"--microbatches {args.microbatches} and --samples {args.samples} must be 1 or more")
    if args.rounds < FEWEST_ROUNDS:
        problems.append(f"--rounds {args.rounds} give no 95 % interval; use {FEWEST_ROUNDS} or more")
    if problems:
        parser.error("; ".join(problems))
    return args


def main() -> None:
    args = read_arguments()
    print(
        f"pipeline {PIPELINE} x data {DATA} x tensor {TENSOR}, gloo on the CPU, one thread per rank, "
        f"{args.microbatches} microbatches, torch {torch.__version__}{', compiled' if args.compiled else ''}; "
        f"medians of {args.rounds} rounds"
    )
    for size_name in args.sizes:
        with tempfile.TemporaryDirectory() as folder:  # new processes: sizes share nothing
            start_processes(run_rank, args=(folder, size_name, args), nprocs=NUM_RANKS, start_method="spawn")


if __name__ == "__main__":
    main()
