"""Alternating timing of sides and their ratios, shared by the benchmarks of sequence parallelism."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

Times = dict[str, list[float]]
"""Seconds by round, for each side."""

FEWEST_ROUNDS = 6
"""Fewer give no 95 % interval of a median."""


def turns(names: Sequence[str], num_rounds: int) -> list[str]:
    """Names of sides in order of execution: all in every round, in an order that rotates from round to round."""
    ordered = []
    for number in range(num_rounds):
        first = number % len(names)
        ordered += [*names[first:], *names[:first]]
    return ordered


def time_in_turn(sides: dict[str, Callable[[], Any]], *, num_rounds: int) -> Times:
    """Seconds of each side on the slowest rank; a barrier precedes every run."""
    times: Times = {name: [] for name in sides}
    for name in turns(tuple(sides), num_rounds):
        dist.barrier()
        started = time.perf_counter()
        sides[name]()
        times[name].append(time.perf_counter() - started)
    slowest = torch.tensor([times[name] for name in sides], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return dict(zip(sides, slowest.tolist(), strict=True))


def ratio(times: Times, numerator: str, denominator: str) -> str:
    """The median over rounds of one side's time over another's, with the 95 % interval of that median."""
    if numerator == denominator:
        return "1"
    ordered = sorted(a / b for a, b in zip(times[numerator], times[denominator], strict=True))
    count, half = len(ordered), math.ceil(0.98 * math.sqrt(len(ordered)))
    low, high = ordered[max(count // 2 - half, 0)], ordered[min(count // 2 + half, count - 1)]
    return f"{statistics.median(ordered):.2f} ({low:.2f} to {high:.2f})"


def median_ms(times: Times, name: str) -> float:
    return 1e3 * statistics.median(times[name])
