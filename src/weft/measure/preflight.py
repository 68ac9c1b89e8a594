"""Comparison of the ranks' software, code and data before a run; differences are named with ranks and values.

A difference of facts that must be equal is a problem; of facts that had better be equal, or a quantity below half of
another rank's, a note. Clocks of hosts are compared by round trips, as NTP does; the shortest of several counts.
"""

from __future__ import annotations

import platform
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from weft.comm.group import Group
from weft.comm.objects import gather_values
from weft.comm.p2p import receive, send
from weft.errors import WeftError
from weft.host_memory import available_bytes
from weft.measure.device import describe
from weft.measure.fingerprints import hash_code, hash_job
from weft.measure.interfaces import offered
from weft.units import format_bytes, format_seconds
from weft.world import World

CLOCK_SKEW_S = 0.5
"""Smallest difference of clocks that is reported: timestamps of logs and files would be in the wrong order."""
_CLOCK_TRIALS = 4

Facts = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A difference between ranks."""

    breaks: bool
    """A run would fail, or silently train on something else."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    """The facts of every rank, and the differences."""

    facts: tuple[Facts, ...]
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        return not any(finding.breaks for finding in self.findings)


def run_preflight(world: World, control: Group, *, job: Path | None = None) -> Preflight:
    """Compare all ranks; collective, with the same result on each."""
    facts = gather_values(collect(world, job), control)
    findings = compare(facts)
    for host, (offset_s, doubt_s) in clock_skews(world, control).items():
        if abs(offset_s) - doubt_s > CLOCK_SKEW_S:
            text = f"the clock of host {host} {'leads' if offset_s > 0 else 'lags'} host 0's by "
            text += f"{format_seconds(abs(offset_s))} (± {format_seconds(doubt_s)}); run a time service on both"
            findings.append(Finding(breaks=False, text=text))
    return Preflight(facts=tuple(facts), findings=tuple(findings))


def collect(world: World, job: Path | None) -> Facts:
    """This rank's facts: `same`, `alike` and `amounts` by name, and its own problems."""
    interface, address = offered()
    same = {"weft": metadata.version("weft"), "weft's code": hash_code(), "torch": torch.__version__}
    problems: tuple[str, ...] = ()
    if job is not None:
        try:
            same |= hash_job(job)
        except WeftError as error:
            problems = error.problems
    return {
        "same": same,
        "alike": {
            "python": platform.python_version(),
            "numpy": metadata.version("numpy"),
            "threads": str(torch.get_num_threads()),
            "processor": describe(world.device, num_sharing=1)["name"],
            "interface": interface,
        },
        "amounts": {"free memory": available_bytes(), "free disk": shutil.disk_usage(".").free},
        "address": address,
        "problems": problems,
    }


def compare(facts: Sequence[Facts]) -> list[Finding]:
    """Every difference between ranks, problems first."""
    holders: dict[str, list[int]] = {}
    for rank, each in enumerate(facts):
        for problem in each["problems"]:
            holders.setdefault(problem, []).append(rank)
    findings = [Finding(breaks=True, text=f"{problem} ({say_ranks(its)})") for problem, its in holders.items()]
    for kind, breaks in (("same", True), ("alike", False)):
        for name in dict.fromkeys(name for each in facts for name in each[kind]):
            values = [str(each[kind].get(name, "missing")) for each in facts]
            if len(set(values)) > 1 or (breaks and "missing" in values):
                findings.append(Finding(breaks=breaks, text=_difference(name, values, breaks=breaks)))
    for name in facts[0]["amounts"]:
        amounts = [each["amounts"][name] for each in facts]
        low, high = min(amounts), max(amounts)
        if 2 * low < high:
            least, most = (f"{format_bytes(one)} on rank {amounts.index(one)}" for one in (low, high))
            findings.append(Finding(breaks=False, text=f"{name} is uneven: {least}, {most}"))
    return findings


def clock_skews(world: World, group: Group) -> dict[int, tuple[float, float]]:
    """Seconds that each host's clock is ahead of the first one's, and their uncertainty, by host; collective."""
    found: list[list[float]] = []
    for host in range(1, max(world.hosts) + 1):
        leader = world.hosts.index(host)
        if world.rank == 0:
            trials = [_ask_time(group, leader) for _ in range(_CLOCK_TRIALS)]
            found.append([host, *min(trials, key=lambda trial: trial[1])])
        elif world.rank == leader:
            for _ in range(_CLOCK_TRIALS):
                receive(torch.zeros(1, dtype=torch.float64), group, source=0).wait()
                send(torch.tensor([time.time()], dtype=torch.float64), group, to=0).wait()
    told = gather_values(found, group)[0]
    return {host: (offset_s, doubt_s) for host, offset_s, doubt_s in told}


def _ask_time(group: Group, leader: int) -> tuple[float, float]:
    answer = torch.zeros(1, dtype=torch.float64)
    began = time.time()
    send(torch.zeros(1, dtype=torch.float64), group, to=leader).wait()
    receive(answer, group, source=leader).wait()
    ended = time.time()
    return float(answer) - (began + ended) / 2, (ended - began) / 2


def _difference(name: str, values: Sequence[str], *, breaks: bool) -> str:
    holders: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        holders.setdefault(value, []).append(rank)
    if list(holders) == ["missing"]:
        return f"{name} is missing on all ranks; put it there"
    told = ", ".join(f"{value} on {say_ranks(ranks)}" for value, ranks in holders.items())
    return f"{name} differs: {told}" + ("; make them equal" if breaks else "")


def say_ranks(ranks: Sequence[int]) -> str:
    """Rank 2; ranks 0 and 1; ranks 0 to 3; ranks 0, 2 and 5."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
