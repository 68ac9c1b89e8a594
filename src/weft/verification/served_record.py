"""The order in which asynchronous servers made their updates, from what each worker was told.

A worker knows of every gradient the version of the weights that it was computed with, and learns with its next weights
how many updates were made in between, its age. So gradient and place in the order are known without any log:

    worker 0   weights of version 0, age 0 -> update 0        weights of version 1, age 1 -> update 2
    worker 1   weights of version 0, age 1 -> update 1        ...

Every server has an order of its own. One that is no order (a place twice, or empty) is an update that was lost, or made
twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from weft.errors import VerifyError
from weft.sync.served import ServedSync

Step = tuple[int, int]
"""A worker, and the number of its step, from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRecord:
    """What a worker was told, by step and server; plain values."""

    versions: list[list[int]]
    """Of the weights of each step, and those after the last one."""
    ages: list[list[int]]
    """Updates between the weights of each step and its gradient."""
    is_made: list[bool]
    """An update was made of the step's gradient."""


class Recorder:
    """Writes down what this worker is told."""

    def __init__(self, sync: ServedSync) -> None:
        self._sync = sync
        self.record = WorkerRecord(versions=[[version for version, _ in sync.told]], ages=[], is_made=[])

    def after_step(self) -> None:
        told = self._sync.told
        self.record.versions.append([version for version, _ in told])
        self.record.ages.append([begin.age for _, begin in told])
        _, begin = told[0]
        self.record.is_made.append(begin.count > 0 and not begin.is_skipped)


def orders_of(records: Sequence[WorkerRecord]) -> list[list[Step]]:
    """By server: the steps of which its updates were made, in their order. Raises VerifyError if there is none."""
    orders = []
    for server in range(len(records[0].versions[0])):
        placed: dict[int, list[Step]] = {}
        for worker, record in enumerate(records):
            for step, is_made in enumerate(record.is_made):
                if is_made:
                    place = record.versions[step][server] + record.ages[step][server]
                    placed.setdefault(place, []).append((worker, step))
        order: list[Step] = []
        for place in range(max(placed, default=-1) + 1):
            found = placed.get(place, [])
            if len(found) != 1:
                raise VerifyError(_problem(server, place, found))
            order += found
        orders.append(order)
    return orders


def _problem(server: int, place: int, found: Sequence[Step]) -> str:
    if not found:
        return f"update {place} of server {server} was made of no worker's gradient: one was applied twice"
    named = " and ".join(f"step {step + 1} of worker {worker}" for worker, step in found)
    return f"{named} are both update {place} of server {server}: an update was lost, or counted twice"


def as_plain(record: WorkerRecord) -> dict[str, Any]:
    return {"versions": record.versions, "ages": record.ages, "is_made": record.is_made}
