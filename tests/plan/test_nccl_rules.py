"""Every schedule's messages under NCCL's rules (`tests/helpers/nccl_rules.py`), without ranks or processes.

NCCL knows no tags, and a message ends only when it is received; gloo and shared memory forgive an order that it does
not. A rank's calls are those of `parallel/pipeline/executor.py` and `training/step/pipeline_step.py`: several steps, an
evaluation between them, the totals of every update, and the tied weight of the first and the last rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, replace

import pytest
from nccl_rules import Call, Exchange, HostMessage, Pass, Wait, play

from weft.plan.partition.groups import message_group
from weft.plan.pipeline.actions import Action, Schedule
from weft.plan.pipeline.communication import FLUSH_FREE, evaluation_of, schedule_of, source_of
from weft.plan.plan import Axes, Pipeline, Plan, Step

FLUSHED = ("naive", "gpipe", "1f1b", "zero-bubble", "interleaved")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A plan and a model, as far as they change what is exchanged."""

    schedule: str
    num_ranks: int
    microbatches: int
    chunks: int = 1
    vertical_sync: bool = False
    has_norm: bool = False
    is_tied: bool = False
    skipped: frozenset[int] = frozenset()
    """Microbatches of a step without samples."""
    num_tensors: tuple[int, int] = (1, 1)
    """Tensors that cross a boundary forward, and back."""

    @property
    def plan(self) -> Plan:
        return Plan(
            axes=Axes(pipeline=self.num_ranks),
            step=Step(microbatches=self.microbatches),
            pipeline=Pipeline(schedule=self.schedule, chunks=self.chunks, vertical_sync=self.vertical_sync),  # type: ignore[arg-type]
        )

    @property
    def is_together(self) -> bool:
        """True if all stages wait for each other in an update."""
        return self.has_norm or (self.schedule in FLUSH_FREE and self.is_tied)

    def lists(self) -> Iterator[tuple[Schedule, str, bool]]:
        """The schedules that a run executes one after the other, its name, and if it waits for its messages at the end.

        Flush-free ones send in one list what is received in the next, and go by one name."""
        plan, fed, start = self.plan, 0, 0
        if self.schedule not in FLUSH_FREE:
            training = schedule_of(plan)
            yield from ((training, "step 0", True), (training, "step 1", True))
            yield evaluation_of(plan, 3), "evaluation", False
            yield training, "step 2", True
            return
        for num_steps in (4, 2):
            for _ in range(num_steps):
                yield self._stream(fed, start, self.microbatches, drain=False), "stream", False
                fed += self.microbatches
            yield self._stream(fed, start, 0, drain=True), "stream", True
            start = fed
            yield evaluation_of(plan, 3), f"evaluation {num_steps}", False

    def _stream(self, first: int, start: int, num_microbatches: int, *, drain: bool) -> Schedule:
        return schedule_of(
            self.plan,
            num_microbatches=num_microbatches,
            first=first,
            start=start,
            drain=drain,
            together=self.is_together,
        )

    def programs(self) -> list[list[Call]]:
        """Every rank's calls."""
        programs: list[list[Call]] = [[] for _ in range(self.num_ranks)]
        updates, num_settled = [itertools.count() for _ in programs], [0] * self.num_ranks
        for schedule, run, settles in self.lists():
            for rank, actions in enumerate(schedule):
                calls = programs[rank]
                for action in actions:
                    calls += self._calls(action, rank, run, updates[rank])
                if settles:
                    sent = [c for c in calls[num_settled[rank] :] if isinstance(c, Exchange) and c.side == "send"]
                    calls += [Wait(group=c.group, side="send", name=c.name) for c in sent]
                    num_settled[rank] = len(calls)
        return programs

    def _calls(self, action: Action, rank: int, run: str, updates: Iterator[int]) -> Iterator[Call]:
        if action.kind == "update":
            yield from self._update(rank, next(updates))
        elif action.microbatch % self.microbatches in self.skipped:
            return
        elif action.kind in ("send", "receive"):
            ends = (action.stage, action.peer) if action.kind == "send" else (action.peer, action.stage)
            yield from self._messages(action.kind, *ends, (action.microbatch, run))
        else:
            source = source_of(action, self.num_ranks * self.chunks)
            if source is not None:
                for one in self._messages("receive", source, action.stage, (action.microbatch, run)):
                    yield Wait(group=one.group, side=one.side, name=one.name)
            yield Pass(name=action)

    def _messages(self, side: str, source: int, target: int, name: tuple[int, str]) -> Iterator[Exchange]:
        """The messages of a microbatch in a run."""
        for number in range(self.num_tensors[target < source]):
            yield self._message(side, source, target, (source, target, *name, number))

    def _message(self, side: str, source: int, target: int, name: Hashable) -> Exchange:
        group = message_group(source, target, self.num_ranks)
        return Exchange(group=group, side=side, name=name, ranks=(source % self.num_ranks, target % self.num_ranks))

    def _update(self, rank: int, number: int) -> Iterator[Call]:
        everyone, last = tuple(range(self.num_ranks)), self.num_ranks - 1
        if self.is_tied and rank in (0, last):
            yield from _collective("tied", (0, last), number)
        if self.is_together:
            yield from _collective("totals", everyone, number)
        else:
            name = ("totals", number)
            if rank < last:
                received = self._message("receive", rank + 1, rank, name)
                yield received
                yield Wait(group=received.group, side="receive", name=name)
            if rank > 0:
                yield self._message("send", rank, rank - 1, name)
        yield Pass(name=("update", number))


def _collective(group: str, ranks: tuple[int, ...], number: int) -> Iterator[Call]:
    yield Exchange(group=group, side="collective", name=number, ranks=ranks)
    yield Wait(group=group, side="collective", name=number)


def cases() -> Iterator[Case]:
    """Every schedule, with numbers that fill it, that do not, and that do not divide."""
    for p in (2, 3, 4, 6):
        for m in sorted({1, 2, p, p + 1, 2 * p + 1}):
            for schedule in FLUSHED:
                for chunks in (2, 3) if schedule == "interleaved" else (1,):
                    case = Case(schedule=schedule, num_ranks=p, microbatches=m, chunks=chunks)
                    yield case
                    yield replace(case, has_norm=True, is_tied=True, skipped=frozenset({m - 1}), num_tensors=(2, 1))
            stream = Case(schedule="pipedream", num_ranks=p, microbatches=m)
            yield from (stream, replace(stream, vertical_sync=True, skipped=frozenset({0}), num_tensors=(3, 2)))
            if m >= p:
                batches = replace(stream, schedule="2bw")
                yield batches
                yield from (replace(batches, has_norm=norm, is_tied=tied) for norm, tied in ((1, 0), (0, 1), (1, 1)))


CASES = list(cases())
SMALL = [case for case in CASES if case.num_ranks == 3 and case.microbatches == 4]


def test_there_are_a_few_hundred_of_them() -> None:
    assert len(CASES) > 250
    assert {case.schedule for case in CASES} == {*FLUSHED, *FLUSH_FREE}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", [*FLUSHED, *FLUSH_FREE])
def test_every_schedule_runs_under_nccls_rules(schedule: str) -> None:
    for case in CASES:
        if case.schedule == schedule:
            assert play(case.programs()) is None, case


@pytest.mark.parametrize("schedule", [*FLUSHED, *FLUSH_FREE])
def test_a_host_may_wait_for_its_own_passes(schedule: str) -> None:
    """As it does where a value is read."""
    for case in SMALL:
        if case.schedule == schedule:
            assert play(case.programs(), host_waits_for="stream") is None, case


def through_host(calls: Iterable[Call]) -> Iterator[Call]:
    """The calls with all messages but totals through host memory, where a receive is waited for when it is needed."""
    for call in calls:
        if isinstance(call, Pass) or call.group in ("totals", "tied") or call.name[0] == "totals":  # type: ignore[union-attr, index]
            yield call
        elif isinstance(call, Exchange) == (call.side == "send"):  # type: ignore[union-attr]
            yield HostMessage(side=call.side, name=call.name)  # type: ignore[union-attr]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", [*FLUSHED, *FLUSH_FREE])
def test_a_host_may_wait_for_its_device_while_messages_go_through_host_memory(schedule: str) -> None:
    """Loading kernels, compiling and giving back memory may wait so: first messages therefore go through the host."""
    for case in CASES:
        if case.schedule == schedule:
            first = [list(through_host(calls)) for calls in case.programs()]
            assert play(first, host_waits_for="device") is None, case
    later = Case(schedule=schedule, num_ranks=4, microbatches=5, chunks=2 if schedule == "interleaved" else 1)
    assert "host in" in str(play(later.programs(), host_waits_for="device"))


@pytest.mark.parametrize("schedule", [*FLUSHED, *FLUSH_FREE])
def test_no_schedule_runs_with_one_stream_for_all_messages(schedule: str) -> None:
    """Receives are posted ahead, and a send behind one would wait for it: so every way has its communicator."""
    plain = next(case for case in SMALL if case.schedule == schedule)
    assert "waits" in str(play(plain.programs(), one_stream=True))


def test_ways_are_opened_before_the_first_step() -> None:
    """Otherwise a host waits in its first send, with the receive that another host waits for not yet posted."""
    naive = Case(schedule="naive", num_ranks=2, microbatches=2)
    assert "host in" in str(play(naive.programs(), is_open=False))
    assert play(naive.programs(), is_open=True) is None


def places(calls: list[Call], side: str, group: Hashable) -> list[int]:
    """The places of a rank's messages on a way."""
    found = enumerate(calls)
    return [n for n, c in found if isinstance(c, Exchange) and (c.side, c.group) == (side, group)]


@pytest.mark.parametrize(
    "case",
    SMALL,
    ids=lambda case: f"{case.schedule}-{case.chunks}-{case.has_norm:d}{case.is_tied:d}{case.vertical_sync:d}",
)
def test_two_swapped_sends_are_found(case: Case) -> None:
    programs = case.programs()
    one, other = places(programs[0], "send", message_group(0, 1, 3))[1:3]
    programs[0][one], programs[0][other] = programs[0][other], programs[0][one]
    assert "taken for each other" in str(play(programs))


@pytest.mark.parametrize(
    "case",
    SMALL,
    ids=lambda case: f"{case.schedule}-{case.chunks}-{case.has_norm:d}{case.is_tied:d}{case.vertical_sync:d}",
)
@pytest.mark.parametrize("which", [0, -1])
def test_a_missing_receive_is_found(case: Case, which: int) -> None:
    programs = case.programs()
    calls = programs[1]
    missing = calls.pop(places(calls, "receive", message_group(2, 1, 3))[which])
    assert isinstance(missing, Exchange)
    waits = Wait(group=missing.group, side="receive", name=missing.name)
    programs[1] = [call for call in calls if call != waits]
    assert play(programs) is not None


def test_a_gradient_received_before_the_totals_it_follows_is_found() -> None:
    """Where passes are backward only, as in a flush, a receive one pass early would overtake the update between."""
    programs = Case(schedule="pipedream", num_ranks=3, microbatches=2).programs()
    calls, way = programs[0], message_group(1, 0, 3)
    received = places(calls, "receive", way)
    is_totals = [isinstance(call := calls[n], Exchange) and call.name[0] == "totals" for n in received]  # type: ignore[index]
    after = next(n for n, is_total in zip(received, is_totals, strict=True) if is_total)
    ahead = received[received.index(after) + 1]
    calls.insert(after, calls.pop(ahead))
    assert "taken for each other" in str(play(programs))


def test_kinds_of_messages_must_not_share_a_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for both directions between two ranks, for those of neighbouring chunks and those that go round."""
    monkeypatch.setattr("test_nccl_rules.message_group", lambda source, target, p: "both")
    for schedule, chunks in (("1f1b", 1), ("interleaved", 2)):
        case = Case(schedule=schedule, num_ranks=2, microbatches=4, chunks=chunks)
        assert play(case.programs()) is not None
