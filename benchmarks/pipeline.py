"""Pipelines: weft's schedules against torch.distributed.pipelining's, flush-free against flush, bubbles and memory.

    python benchmarks/pipeline.py [--part compare] [--ranks 2 4] [--schedules ...] [--stages small large] [--rounds N]
    python benchmarks/pipeline.py --part flush-free [--ranks 2]
    python benchmarks/pipeline.py --part bubble [--pictures DIR]
    python benchmarks/pipeline.py --part memory

compare     A whole training step (split, forward, backward, fused SGD) of the same GPT, weights, batch and cuts. torch
            gets hand-written stage modules, static shapes and no gradient scaling; its loss stays on the last rank.
            Zero-bubble is torch's InterleavedZeroBubble with one chunk per rank, which is ZB-H1, as weft's is.
            weft runs through shared memory and through sockets, which is all torch has.
flush-free  PipeDream and 2BW against GPipe and 1F1B: samples per second once the pipeline is full, then the time until
a
            GPT on Python's own source reaches a held-out loss. Each schedule has the best of two learning rates.
bubble      Stages that sleep, which emulates one core per stage: the predicted and the recorded bubble.
memory      A rank's peak above its starting level (proportional set size, as in memory.py), microbatches in flight
            and bytes of weight versions. Every line is a run in new processes.

Ranks are gloo processes of one thread. Sides alternate, in an order that rotates every round; a barrier precedes each
run, and the slowest rank counts. Losses and gradients of every side are compared with one process's before anything is
timed. Ratios are medians over rounds with the 95 % interval of that median (order statistics). Linux only.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import gc
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from pipeline_sides import (
    NUM_CHUNKS,
    RIVALS,
    SIZES,
    Batch,
    Side,
    check,
    make_batch,
    make_model,
    make_plan,
    torch_side,
    weft_side,
)
from process_memory import PeakPss, read_pss_bytes
from sleeping_stages import predict, record
from torch.multiprocessing.spawn import start_processes

from weft.comm.objects import gather_values
from weft.models.gpt import GPTConfig
from weft.plan.pipeline.communication import FLUSH_FREE, schedule_of
from weft.plan.pipeline.schedules import live_activations
from weft.report.timeline import draw as draw_timelines
from weft.training.data.datasets import TokenWindows, split_held_out, standard_library_text
from weft.units import format_bytes

Run = Callable[[], object]
Times = dict[str, list[float]]
"""Seconds by round, for each side."""

SCHEDULES = ("naive", *RIVALS, *FLUSH_FREE)
LEARNING_RATES = (1e-3, 3e-3)
TARGET_LOSS = 2.4
MOST_STEPS = 1500
SEEDS = (0, 1, 2)
TASK = GPTConfig(vocab_size=256, context=64, num_layers=4, hidden=64, heads=4, tied=False)


def time_in_turn(runs: dict[str, Run], *, num_rounds: int, repeats: int) -> Times:
    """Seconds of each run on the slowest rank, by round."""
    names = tuple(runs)
    times: Times = {name: [] for name in names}
    for number in range(num_rounds):
        turn = number % len(names)
        for name in (*names[turn:], *names[:turn]):
            for _ in range(repeats):
                dist.barrier()
                started = time.perf_counter()
                runs[name]()
                times[name].append(time.perf_counter() - started)
    slowest = torch.tensor([times[name] for name in names], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return dict(zip(names, slowest.view(len(names), num_rounds, repeats).mean(2).tolist(), strict=True))


def ratio(times: Times, numerator: str, denominator: str) -> str:
    """The median over rounds of one side's time over another's, with the 95 % interval of that median."""
    ordered = sorted(a / b for a, b in zip(times[numerator], times[denominator], strict=True))
    count, half = len(ordered), math.ceil(0.98 * math.sqrt(len(ordered)))
    low, high = ordered[max(count // 2 - half, 0)], ordered[min(count // 2 + half, count - 1)]
    return f"{statistics.median(ordered):.3f} ({low:.3f} to {high:.3f})"


def compare(num_ranks: int, args: argparse.Namespace) -> Iterator[str]:
    yield (
        f"{'ranks':>5s} {'stages':>6s} {'schedule':>11s} {'torch ms':>9s} {'weft ms':>8s} {'sockets':>8s}"
        f" {'torch / weft (95 %)':>24s} {'torch / weft, sockets':>24s}  goal"
    )
    for size_name in args.stages:
        size, m = SIZES[size_name], args.microbatches
        batch = make_batch(size, m)
        for schedule in (name for name in args.schedules if name in RIVALS):
            sides = {"torch": torch_side(make_model(size.on(num_ranks)), make_plan(schedule, num_ranks, m), batch)}
            for name, transport in (("weft", "auto"), ("sockets", "c10d")):
                plan = make_plan(schedule, num_ranks, m, transport=transport)
                sides[name] = weft_side(make_model(size.on(num_ranks)), plan, batch)
            for name, side in sides.items():
                check(f"{schedule}, {name}", side, size.on(num_ranks), batch)
            runs: dict[str, Run] = {name: functools.partial(side.step, *batch) for name, side in sides.items()}
            time_in_turn(runs, num_rounds=2, repeats=size.steps)
            times = time_in_turn(runs, num_rounds=args.rounds, repeats=size.steps)
            ms = {name: 1e3 * statistics.median(times[name]) for name in sides}
            yield (
                f"{num_ranks:5d} {size_name:>6s} {schedule:>11s} {ms['torch']:9.2f} {ms['weft']:8.2f} "
                f"{ms['sockets']:8.2f} {ratio(times, 'torch', 'weft'):>24s} {ratio(times, 'torch', 'sockets'):>24s}"
                f"  {size.goal:.1f}"
            )
            del sides, runs, side
            gc.collect()


def flush_free(num_ranks: int, args: argparse.Namespace) -> Iterator[str]:
    names = [name for name in args.schedules if name in ("gpipe", "1f1b", *FLUSH_FREE)]
    for size_name in args.stages:
        size, m = SIZES[size_name], args.microbatches
        batch = make_batch(size, m)
        sides = {
            name: weft_side(make_model(size.on(num_ranks)), make_plan(name, num_ranks, m), batch) for name in names
        }
        for name in (name for name in names if name not in FLUSH_FREE):
            check(name, sides[name], size.on(num_ranks), batch)

        def several(side: Side, batch: Batch = batch, num_steps: int = 4 * size.steps) -> None:
            for _ in range(num_steps):
                side.step(*batch)

        runs: dict[str, Run] = {name: functools.partial(several, side) for name, side in sides.items()}
        time_in_turn(runs, num_rounds=1, repeats=1)
        times = time_in_turn(runs, num_rounds=args.rounds, repeats=1)
        samples = 4 * size.steps * m * size.num_samples
        for name in names:
            per_s = samples / statistics.median(times[name])
            line = f"{num_ranks} ranks, {size_name} stages, {m} microbatches, {name:>9s}: {per_s:8.1f} samples/s"
            yield f"{line}; time / {names[0]}: {ratio(times, name, names[0])}"
        del sides, runs
        gc.collect()
    for name in names:
        yield learn(name, num_ranks, args.microbatches)


def learn(schedule: str, num_ranks: int, num_microbatches: int) -> str:
    """Steps and seconds until the held-out loss is reached, by seed, with the learning rate that took least time."""
    found: dict[float, list[tuple[float, int]]] = {}
    for rate in LEARNING_RATES:
        found[rate] = [time_to_loss(schedule, num_ranks, num_microbatches, seed=seed, rate=rate) for seed in SEEDS]
    best = min(found, key=lambda rate: statistics.median(seconds for seconds, _ in found[rate]))
    shown = ", ".join(f"{steps} steps {seconds:.1f} s" for seconds, steps in found[best])
    return f"{schedule:>9s} to a held-out loss of {TARGET_LOSS} at rate {best:g}: {shown}"


def time_to_loss(schedule: str, num_ranks: int, num_microbatches: int, *, seed: int, rate: float) -> tuple[float, int]:
    train, held_out = split_held_out(standard_library_text(), 0.05, TASK.context)
    windows, held_out_windows = TokenWindows(train, TASK.context), TokenWindows(held_out, TASK.context)
    chance = torch.Generator().manual_seed(seed)
    evaluated = held_out_windows.take(
        torch.randint(len(held_out_windows), (64,), generator=torch.Generator().manual_seed(0)).numpy()
    )

    def draw() -> Batch:
        return windows.take(torch.randint(len(windows), (4 * num_microbatches,), generator=chance).numpy())

    plan = make_plan(schedule, num_ranks, num_microbatches, num_blocks=TASK.num_layers)
    optimizer = functools.partial(torch.optim.AdamW, lr=rate, fused=True)
    trainer = weft_side(make_model(TASK, seed), plan, draw(), optimizer).trainer
    assert trainer is not None
    seconds = 0.0
    for steps in range(25, MOST_STEPS + 1, 25):
        batches = [draw() for _ in range(25)]
        dist.barrier()
        started = time.perf_counter()
        for batch in batches:
            trainer.step(*batch)
        trainer.flush()  # to read the loss: included in the time, although training itself would not need it
        taken = torch.tensor([time.perf_counter() - started])
        dist.all_reduce(taken, op=dist.ReduceOp.MAX)
        seconds += float(taken)
        if trainer.evaluate([evaluated]) <= TARGET_LOSS:
            return seconds, steps
    return math.inf, MOST_STEPS


def bubble(num_ranks: int, args: argparse.Namespace) -> Iterator[str]:
    titles = "bubble: planned   recorded  difference  ratio   utilisation   ms: planned   recorded"
    yield f"{'schedule':>11s} {'m':>3s}   {titles}"
    for schedule in args.schedules:
        for m in (4, 8, 16):
            plan = make_plan(schedule, num_ranks, m, num_blocks=num_ranks * NUM_CHUNKS.get(schedule, 1))
            num_steps = 3 if schedule in FLUSH_FREE else 1
            planned, executed = predict(plan, num_steps * m), record(plan, num_steps)
            yield (
                f"{schedule:>11s} {m:3d} {planned.bubble_fraction:18.3f} {executed.bubble_fraction:9.3f} "
                f"{executed.bubble_fraction - planned.bubble_fraction:11.3f} "
                f"{executed.bubble_fraction / planned.bubble_fraction:6.3f} {executed.utilisation:13.3f} "
                f"{1e3 * planned.makespan_s:14.0f} {1e3 * executed.makespan_s:9.0f}"
            )
            if args.pictures and dist.get_rank() == 0:
                args.pictures.mkdir(parents=True, exist_ok=True)
                picture = draw_timelines([(f"{schedule}, foretold", planned), (f"{schedule}, executed", executed)])
                (args.pictures / f"pipeline-{schedule}-{m}.svg").write_text(picture)


def measure(side_name: str, schedule: str, num_ranks: int, num_microbatches: int) -> str:
    """One side's memory by rank, in new processes."""
    m_mmap_threshold = -3
    if ctypes.CDLL(None).mallopt(m_mmap_threshold, 1 << 16) != 1:  # freed memory returns to the system
        raise RuntimeError("this C library has no mallopt, so peaks cannot be separated from freed memory; use glibc")
    plan = make_plan(schedule, num_ranks, num_microbatches)
    make = torch_side if side_name == "torch" else weft_side

    def prepare(size_name: str) -> tuple[Side, Run]:
        size = SIZES[size_name]
        batch = make_batch(size, num_microbatches)
        side = make(make_model(size.on(num_ranks)), plan, batch)
        return side, functools.partial(side.step, *batch)

    warm = prepare("small")  # libraries and the transport are loaded before anything is measured
    warm[1]()
    dist.barrier()
    del warm
    gc.collect()
    before = read_pss_bytes()
    side, step = prepare("large")
    gc.collect()  # every rank builds the whole model, and keeps its stage
    dist.barrier()
    with PeakPss() as watched:
        for _ in range(3):
            step()
        dist.barrier()
    peak = torch.tensor([float(watched.peak_bytes - before)])
    peaks = [torch.zeros(1) for _ in range(num_ranks)]
    dist.all_gather(peaks, peak)
    line = f"{schedule:>11s} {side_name:>5s}  peak {' '.join(f'{format_bytes(float(p)):>9s}' for p in peaks)}"
    if side.trainer is None or side.trainer.pipeline_step is None:
        return line
    pipeline_step = side.trainer.pipeline_step
    versions = getattr(pipeline_step, "versions", None)
    mine = (pipeline_step.pipeline.most_in_flight, 0 if versions is None else versions.num_bytes)
    told = gather_values(mine, side.trainer.mesh.group("pipeline", "control"))
    in_flight = tuple(count for count, _ in told)
    line += f"; in flight {in_flight}, planned {live_activations(schedule_of(plan))}"
    return line + (f"; weight versions {' '.join(format_bytes(b) for _, b in told)}" if versions is not None else "")


def memory(num_ranks: int, args: argparse.Namespace) -> Iterator[str]:
    side_name, schedule = args.measured
    yield measure(side_name, schedule, num_ranks, args.microbatches)


PARTS = {"compare": compare, "flush-free": flush_free, "bubble": bubble, "memory": memory}
RANKS = {"compare": [2, 4], "flush-free": [2], "bubble": [4], "memory": [4]}


def run_rank(rank: int, num_ranks: int, folder: str, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    for line in PARTS[args.part](num_ranks, args):
        if rank == 0:
            print(line, flush=True)
    dist.barrier()
    dist.destroy_process_group()


def launch(num_ranks: int, args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        start_processes(run_rank, args=(num_ranks, folder, args), nprocs=num_ranks, start_method="spawn")


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, default="compare")
    parser.add_argument("--ranks", type=int, nargs="+", help="compare: 2 4; flush-free: 2; bubble and memory: 4")
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=SCHEDULES)
    parser.add_argument("--stages", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--microbatches", type=int, default=8, help="per step; bubble uses 4, 8 and 16 (8)")
    parser.add_argument("--rounds", type=int, default=20, help="turns of each side (20)")
    parser.add_argument("--pictures", type=Path, help="bubble: a folder for planned and executed timelines")
    args = parser.parse_args()
    args.ranks = args.ranks or RANKS[args.part]
    problems = [f"--ranks {count} is no pipeline; give 2 or more" for count in args.ranks if count < 2]
    if args.rounds < 6 and args.part in ("compare", "flush-free"):
        problems.append(f"--rounds {args.rounds} give no 95 % interval; use 6 or more")
    for count in args.ranks:
        if args.microbatches < count or args.microbatches % count:
            problems.append(
                f"--microbatches {args.microbatches} does not suit {count} ranks: 1f1b, 2bw and interleaved need a "
                f"multiple of them, such as {2 * count}"
            )
    if problems:
        parser.error("; ".join(problems))
    return args


def main() -> None:
    args = read_arguments()
    print(f"gloo on the CPU, one thread per rank, {args.microbatches} microbatches, torch {torch.__version__}")
    for num_ranks in args.ranks:
        if args.part != "memory":
            launch(num_ranks, args)
            continue
        for schedule in args.schedules:
            for side_name in ("weft", "torch") if schedule in RIVALS else ("weft",):
                args.measured = (side_name, schedule)
                launch(num_ranks, args)


if __name__ == "__main__":
    main()
