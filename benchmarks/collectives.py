"""Collectives on one host: gloo's own calls against weft over sockets and through shared memory, in one run.

    python benchmarks/collectives.py [--ranks 2 4 8] [--collectives all-reduce ...] [--sizes 4KB 25MB ...]
    python benchmarks/collectives.py --async        # how much of an exchange is overlapped with matmuls
    python benchmarks/collectives.py --crossover    # from which size on direct messages beat gloo's own calls

A size is that of the whole float32 buffer: the output of all-gather and the input of the others, on every rank. Ranks
are processes of one thread each. Every side's result is checked before anything is timed. Sides take turns, in an order
that rotates every round. All ranks start a turn together and repeat the call until it lasts about 2 ms, without a
barrier in between; the slowest rank's time counts. Ratios are medians over rounds of gloo's time divided by the side's
in the same round, with the 95 % interval of that median (order statistics; with fewer than 6 rounds, their whole
range). The limit line is torch's copy of one buffer to another, on all ranks at once. "Hidden" is the part of an
exchange that does not prolong the matmuls that run at the same time. Linux only.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from weft.comm import collectives
from weft.comm.exchange_buffers import BufferAllocator, bytes_for
from weft.comm.gloo import parts_to_add, start_all_gather, start_reduce_scatter
from weft.comm.group import Group
from weft.comm.shared_memory.native import find_kernels
from weft.comm.shared_memory.reduction import add_into
from weft.mesh import make_mesh
from weft.plan.plan import Axes, Comm, Plan
from weft.units import format_bytes
from weft.world import join_world

SIZES = ("4KB", "64KB", "1MB", "25MB", "100MB", "400MB")
UNITS = {"KB": 2**10, "MB": 2**20, "GB": 2**30, "B": 1}
CROSSING = ("reduce-scatter", "all-gather")
CROSSOVER_BYTES = [64 << power for power in range(19)]
ITEM_BYTES = 4
BLOCK_S = 2e-3
MOST_CALLS = 10_000
FEWEST_ROUNDS = 3
PERIOD = 251
"""Test values repeat after a prime number of elements, so that no two parts, slots or chunks are equal."""
TILE = PERIOD * 1024
BUFFERS_PER_RANK = 5
"""Buffers of the whole size that exist at once: four of the benchmark's, and a temporary one of gloo's."""
PROCESS_BYTES = 200 << 20

# torch 2.13 renamed the flat forms and warns about the old names, which are the only ones 2.11 has.
GLOO: dict[str, Callable[..., Any]] = {
    "all-reduce": dist.all_reduce,
    "reduce-scatter": getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor),
    "all-gather": getattr(dist, "all_gather_single", dist.all_gather_into_tensor),
    "broadcast": functools.partial(dist.broadcast, src=0),
    "all-to-all": dist.all_to_all_single,
}

Tensors = tuple[torch.Tensor, ...]
"""Output and input of an exchange, or one tensor if it is in place."""
Call = Callable[..., Any]
"""An exchange; takes `wait`, and without waiting returns a handle to wait for."""
Rounds = dict[str, list[list[float]]]
"""For each side, by round: seconds per call on the slowest rank, in as many figures as the section reports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The settings of one row of a table."""

    collective: str
    num_bytes: int
    num_ranks: int

    @property
    def part(self) -> int:
        """Elements of one rank's part; sizes are rounded up to equal parts."""
        return -(-self.num_bytes // (ITEM_BYTES * self.num_ranks))

    @property
    def numel(self) -> int:
        return self.part * self.num_ranks


class Team:
    """All ranks: starts them together, within microseconds through shared memory, and agrees on counts and time."""

    def __init__(self, num_ranks: int, num_cases: int, args: argparse.Namespace) -> None:
        """`num_cases` share the time left until the deadline."""
        world = join_world("cpu")
        plans = [Plan(axes=Axes(data=num_ranks), comm=Comm(transport=one)) for one in ("c10d", "shared")]
        sockets, memory = (make_mesh(plan, world, groups=[("data", "timed"), ("data", "control")]) for plan in plans)
        self.index = world.rank
        self.sockets, self.shared = sockets.group("data", "timed"), memory.group("data", "timed")
        self._control = memory.group("data", "control")
        self._rounds, self._cases_left = args.rounds, num_cases
        self._deadline = self._until = args.deadline

    def largest(self, values: Sequence[float]) -> list[float]:
        table = torch.tensor(values, dtype=torch.float64)
        collectives.all_reduce(table, self._control, op="max")
        return table.tolist()

    def meet(self) -> None:
        self.largest([0.0])

    def begin_case(self) -> None:
        now = time.monotonic()
        self._until = now + max(self._deadline - now, 0.0) / self._cases_left
        self._cases_left -= 1

    def has_time_for(self, number: int) -> bool:
        """True if a round of this number is to run. One clock decides, so that ranks stop together."""
        is_late = bool(self.largest([self.index == 0 and time.monotonic() > self._until])[0])
        return number < self._rounds and not (is_late and number >= FEWEST_ROUNDS)


def place(case: Case, whole: torch.Tensor, other: torch.Tensor) -> Tensors:
    part = other[: case.part]
    pairs = {"reduce-scatter": (part, whole), "all-gather": (whole, part), "all-to-all": (other, whole)}
    return pairs.get(case.collective, (whole,))


def call_gloo(case: Case, tensors: Tensors, handle: dist.ProcessGroup | None, *, wait: bool) -> Any:
    return GLOO[case.collective](*tensors, group=handle, async_op=not wait)


def call_weft(case: Case, received: torch.Tensor, tensors: Tensors, group: Group, *, wait: bool) -> Any:
    kept = {"received": received} if case.collective == "reduce-scatter" else {}
    return getattr(collectives, case.collective.replace("-", "_"))(*tensors, group, wait=wait, **kept)


def call_messages(case: Case, received: torch.Tensor, tensors: Tensors, group: Group, *, wait: bool) -> None:
    assert wait, "parts are summed by the caller, after all have arrived"
    result, given = tensors
    if case.collective == "all-gather":
        start_all_gather(result, given, group).wait()
    else:
        start_reduce_scatter(given, received, group).wait()
        add_into(result, parts_to_add(given, received, group), add=False)


def chunks_of(flat: torch.Tensor, ranks: Sequence[int], first: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Chunks of a tensor, each with its expected values if the tensor begins at element `first` of these ranks' sum."""
    numbers = 3 * torch.arange(first % PERIOD, first % PERIOD + TILE)
    tile = torch.stack([(numbers + 7 * rank) % PERIOD for rank in ranks]).sum(0).float()
    return [(chunk, tile[: chunk.numel()]) for chunk in flat.split(TILE)]


def check(name: str, case: Case, tensors: Tensors, index: int, call: Call, *, wait: bool = True) -> None:
    """Make one exchange of known values and check its result; afterwards all values are zero."""
    result, given = tensors[0], tensors[-1]
    result.zero_()
    for chunk, values in chunks_of(given, [index]):
        chunk.copy_(values)
    pending = call(wait=wait)
    if not wait:
        pending.wait()
    ranks = list(range(case.num_ranks))
    summed = {"all-reduce": [ranks], "reduce-scatter": [ranks], "broadcast": [[0]]}
    sources = summed.get(case.collective, [[rank] for rank in ranks])
    first = index * case.part if case.collective in ("reduce-scatter", "all-to-all") else 0
    rows = zip(result.view(len(sources), -1), sources, strict=True)
    if not all(torch.equal(*pair) for row, source in rows for pair in chunks_of(row, source, first)):
        raise RuntimeError(f"{name}: the result of {case} is wrong on rank {index}")
    given.zero_()  # zeros stay zeros in repeated sums
    result.zero_()


def make_calls(case: Case, team: Team, *, wait: bool) -> tuple[dict[str, Call], Call]:
    """Every side's exchange, checked, and the copy of a buffer of that size, which ignores `wait`."""
    whole, other, received = (torch.empty(case.numel) for _ in range(3))  # unused ones take no memory
    room = BufferAllocator(team.shared, whole.device, num_bytes=bytes_for([case.numel] * 2, [whole.dtype] * 2))
    ordinary, arena = place(case, whole, other), place(case, *(room.empty(case.numel, whole.dtype) for _ in range(2)))
    if any(tensor.untyped_storage().resizable() for tensor in arena):  # as ordinary memory is, to which a room resorts
        raise RuntimeError(f"there is too little shared memory for {case}; give it room, or leave this size out")
    weft = functools.partial(call_weft, case, received)
    sides: dict[str, tuple[Tensors, Call]] = {
        "gloo": (ordinary, functools.partial(call_gloo, case, ordinary, None)),
        "weft c10d": (ordinary, functools.partial(weft, ordinary, team.sockets)),
        "shared, arena": (arena, functools.partial(weft, arena, team.shared)),
        "shared, slots": (ordinary, functools.partial(weft, ordinary, team.shared)),
    }
    for name, (tensors, call) in sides.items():
        check(name, case, tensors, team.index, call, wait=wait)
    return {name: call for name, (_, call) in sides.items()}, lambda *, wait: other.copy_(whole)


def seconds_of(run: Callable[[], object], count: int) -> float:
    """Seconds per call among `count`."""
    started = time.perf_counter()
    for _ in range(count):
        run()
    return (time.perf_counter() - started) / count


def count_for_a_block(run: Callable[[], object], team: Team) -> int:
    """Number of calls that last long enough to be timed; the same on all ranks."""
    count = 1
    while count < MOST_CALLS:
        trials = []
        for _ in range(2):  # a disturbance of one must not end the search
            team.meet()
            trials.append(seconds_of(run, count))
        if count * min(team.largest(trials)) >= BLOCK_S:
            break
        count *= 2
    return count


def typical_s(run: Callable[[], object], count: int, team: Team) -> float:
    return statistics.median(team.largest([seconds_of(run, count) for _ in range(5)]))


def timed_block(call: Call, team: Team) -> Callable[[], list[float]]:
    run = functools.partial(call, wait=True)
    count = count_for_a_block(run, team)
    return lambda: [seconds_of(run, count)]


def overlapped_block(call: Call, team: Team) -> Callable[[], list[float]]:
    """Seconds of the exchange alone, of equally long matmuls alone, of both at once, and the caller's blocked time."""
    exchange = functools.partial(call, wait=True)
    count = count_for_a_block(exchange, team)
    alone_s = typical_s(exchange, count, team)
    factor = torch.full((64, 64) if alone_s < 5e-3 else (256, 256), 1e-3)
    multiply = functools.partial(torch.mm, factor, factor, out=torch.empty_like(factor))
    num_products = max(1, round(alone_s / typical_s(multiply, 50, team)))

    def block() -> list[float]:
        exchange_s = seconds_of(exchange, count)
        team.meet()
        compute_s = seconds_of(multiply, count * num_products) * num_products
        team.meet()
        multiplying_s, started = 0.0, time.perf_counter()
        for _ in range(count):
            pending = call(wait=False)
            multiplying_s += seconds_of(multiply, num_products) * num_products / count
            pending.wait()
        both_s = (time.perf_counter() - started) / count
        return [exchange_s, compute_s, both_s, both_s - multiplying_s]

    return block


def time_rounds(blocks: dict[str, Callable[[], list[float]]], team: Team) -> Rounds:
    names, rounds = list(blocks), Rounds((name, []) for name in blocks)
    while team.has_time_for(number := len(rounds["gloo"])):
        turn = number % len(names)
        for name in (*names[turn:], *names[:turn]):
            team.meet()
            rounds[name].append(blocks[name]())
    return {name: [team.largest(figures) for figures in rounds[name]] for name in names}


def compare_with_gloo(rounds: Rounds, name: str) -> tuple[float, float, float]:
    """Speed relative to gloo: the median over rounds and its 95 % interval, from order statistics."""
    ratios = sorted(theirs[0] / mine[0] for theirs, mine in zip(rounds["gloo"], rounds[name], strict=True))
    middle, half = len(ratios) // 2, math.ceil(0.98 * math.sqrt(len(ratios)))
    return statistics.median(ratios), ratios[max(middle - half, 0)], ratios[min(middle + half, len(ratios) - 1)]


def row_of(case: Case, rounds: Rounds) -> str:
    row = f"{format_bytes(case.num_bytes):>10s}"
    for name, figures in rounds.items():
        row += f" {1e3 * statistics.median(values[0] for values in figures):10.3f}"
        if name not in ("gloo", "copy"):
            row += " {:6.2f} ({:5.2f} to {:6.2f})".format(*compare_with_gloo(rounds, name))
    return f"{row} {len(rounds['gloo']):7d}"


def header_of(case: Case, rounds: Rounds) -> str:
    titles = "".join(f" {name:>10s}" if name in ("gloo", "copy") else f" {name:>35s}" for name in rounds)
    return f"{case.collective}, {case.num_ranks} ranks: ms (times as fast as gloo)\n{'size':>10s}{titles}  rounds"


def compare(case: Case, team: Team) -> tuple[str, str, Rounds]:
    calls, copy = make_calls(case, team, wait=True)
    rounds = time_rounds({name: timed_block(call, team) for name, call in {**calls, "copy": copy}.items()}, team)
    copied_bytes = ITEM_BYTES * case.numel * case.num_ranks
    gb_per_s = copied_bytes / statistics.median(values[0] for values in rounds["copy"]) / 1e9
    return f"{header_of(case, rounds)}  copied by all", f"{row_of(case, rounds)} {gb_per_s:9.2f} GB/s", rounds


def overlap(case: Case, team: Team) -> tuple[str, str, Rounds]:
    calls, _ = make_calls(case, team, wait=False)
    rounds = time_rounds({name: overlapped_block(call, team) for name, call in calls.items()}, team)
    rows = []
    for name, figures in rounds.items():
        times = "".join(f" {1e3 * statistics.median(values):10.3f}" for values in zip(*figures, strict=True))
        hidden = statistics.median(1 - (both_s - compute_s) / alone_s for alone_s, compute_s, both_s, _ in figures)
        rows.append(f"{format_bytes(case.num_bytes):>10s} {name:>13s}{times} {hidden:7.0%} {len(figures):7d}")
    columns = f"{'size':>10s} {'side':>13s}   exchange    matmuls       both    blocked  hidden  rounds"
    return f"{case.collective}, {case.num_ranks} ranks, beside matmuls: ms\n{columns}", "\n".join(rows), rounds


def cross(case: Case, team: Team) -> tuple[str, str, Rounds]:
    whole, other, received = (torch.empty(case.numel) for _ in range(3))
    tensors = place(case, whole, other)
    calls: dict[str, Call] = {
        "gloo": functools.partial(call_gloo, case, tensors, team.sockets.handle),
        "messages": functools.partial(call_messages, case, received, tensors, team.sockets),
    }
    for name, call in calls.items():
        check(name, case, tensors, team.index, call)
    rounds = time_rounds({name: timed_block(call, team) for name, call in calls.items()}, team)
    return header_of(case, rounds), row_of(case, rounds), rounds


def conclude(found: dict[int, Rounds]) -> str:
    """Smallest size at which messages are faster, by the median of ratios and by the lower end of its interval."""
    starts = []
    for figure in (0, 1):
        losing = [size for size, rounds in found.items() if compare_with_gloo(rounds, "messages")[figure] <= 1]
        winning = (format_bytes(size) for size in sorted(found) if size > max(losing, default=0))
        starts.append(next(winning, "no size"))
    return "messages are faster from {} on by the median, from {} on by its whole interval".format(*starts)


def run_rank(rank: int, folder: str, num_ranks: int, sizes: list[int], cases: int, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", num_ranks), rank=rank, world_size=num_ranks)
    team = Team(num_ranks, cases, args)
    section = cross if args.crossover else overlap if args.overlap else compare
    for collective in args.collectives:
        found: dict[int, Rounds] = {}
        for num_bytes in sizes:
            team.begin_case()
            header, row, rounds = section(Case(collective=collective, num_bytes=num_bytes, num_ranks=num_ranks), team)
            if rank == 0:
                print(row if found else f"\n{header}\n{row}", flush=True)
            found[num_bytes] = rounds
        if rank == 0 and args.crossover:
            print(conclude(found), flush=True)
    dist.destroy_process_group()


def sizes_that_fit(sizes: Sequence[int], num_ranks: int) -> list[int]:
    lines = Path("/proc/meminfo").read_text().splitlines()
    available_bytes = 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    needed = {size: num_ranks * (BUFFERS_PER_RANK * size + PROCESS_BYTES) for size in sizes}
    for size in (size for size in sizes if needed[size] > available_bytes):
        reason = f"needs {format_bytes(needed[size])}, {format_bytes(available_bytes)} are available"
        print(f"left out: {format_bytes(size)} on {num_ranks} ranks {reason}", flush=True)
    return [size for size in sizes if needed[size] <= available_bytes]


def parse_size(text: str) -> int:
    """25MB -> 26214400."""
    unit = next((unit for unit in UNITS if text.upper().endswith(unit)), None)
    if unit is None or not text[: -len(unit)].isdigit() or int(text[: -len(unit)]) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 4KB or 25MB (of 1024 and 1024² bytes)")
    return int(text[: -len(unit)]) * UNITS[unit]


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], help="processes (2 4 8)")
    parser.add_argument("--collectives", nargs="+", choices=GLOO, help="(all of them)")
    parser.add_argument("--sizes", type=parse_size, nargs="+", help=f"of the whole buffer ({' '.join(SIZES)})")
    parser.add_argument("--rounds", type=int, default=30, help="maximum rounds per case (30)")
    parser.add_argument(
        "--seconds", type=float, default=900, help=f"for everything; {FEWEST_ROUNDS} rounds run anyway (900)"
    )
    section = parser.add_mutually_exclusive_group()
    section.add_argument(
        "--async", dest="overlap", action="store_true", help="time exchanges overlapped with matmuls instead"
    )
    section.add_argument("--crossover", action="store_true", help="time gloo against messages, 64 B to 16 MB, instead")
    args = parser.parse_args()
    if min(args.ranks) < 2 or args.rounds < 1:
        parser.error(f"--ranks {args.ranks} must be 2 or more each, and --rounds {args.rounds} 1 or more")
    if args.crossover and set(args.collectives or CROSSING) - set(CROSSING):
        parser.error(f"--crossover is for {' and '.join(CROSSING)}")
    args.collectives = args.collectives or (CROSSING if args.crossover else tuple(GLOO))
    args.sizes = args.sizes or (CROSSOVER_BYTES if args.crossover else [parse_size(size) for size in SIZES])
    args.deadline = time.monotonic() + args.seconds
    return args


def main() -> None:
    args = read_arguments()
    loops = "compiled loops" if find_kernels() is not None else "no compiled loops"
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores, {loops}", flush=True)
    sizes = {num_ranks: sizes_that_fit(args.sizes, num_ranks) for num_ranks in args.ranks}
    cases_left = len(args.collectives) * sum(len(fit) for fit in sizes.values())
    for num_ranks, fit in sizes.items():
        with tempfile.TemporaryDirectory() as folder:
            # Forked ranks start fast; this process has run no kernel, so it has no threads that a fork would lose.
            start_processes(run_rank, (folder, num_ranks, fit, cases_left, args), num_ranks, start_method="fork")
        cases_left -= len(args.collectives) * len(fit)


if __name__ == "__main__":
    main()
