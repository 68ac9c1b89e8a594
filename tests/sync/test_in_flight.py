"""Exchanges under way: in which step each phase of a bucket begins, and what a delay would have to be."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

import pytest
import torch

from weft.sync.exchange.in_flight import ExchangesInFlight, Flight, Phases


@dataclass
class Line:
    """A collective that is over after so many steps, unless it is waited for."""

    steps: int
    now: list[int]

    def __post_init__(self) -> None:
        self.begun = self.now[0]

    @property
    def is_over(self) -> bool:
        return self.now[0] - self.begun >= self.steps

    def wait(self) -> None:
        if not self.is_over:
            self.now[1] += 1


def exchanges() -> ExchangesInFlight:
    return ExchangesInFlight(mock.Mock(), torch.device("cpu"), num_replicas=2, allocate=mock.Mock())


def run(delay: int, takes: dict[int, list[int]]) -> tuple[list[tuple[int, int]], Flight, int]:
    """One exchange whose buckets have phases that take these steps: when each began and of which bucket, and how many
    were waited for."""
    now, begun = [0, 0], list[tuple[int, int]]()

    def phases(number: int) -> Iterator[Line]:
        for steps in takes[number]:
            begun.append((now[0], number))
            line = Line(steps, now)
            yield line
            line.wait()

    made: dict[int, Phases] = {number: phases(number) for number in takes}  # type: ignore[misc]
    under_way = exchanges()
    flight = under_way.start(made, {number: len(steps) for number, steps in takes.items()})
    for age in range(1, delay + 1):
        now[0] = age
        under_way.count_step(flight)
        if age < delay:
            under_way.advance(flight, age=age, delay=delay)
    assert sorted(under_way.finish(flight)) == sorted(takes)
    return begun, flight, now[1]


def test_each_bucket_has_the_whole_delay_for_its_phases() -> None:
    """The long message in one phase is not waited for when the short ones begin their next phase."""
    begun, flight, num_waits = run(6, {0: [6], 1: [2, 2], 2: [6]})
    assert begun == [(0, 1), (0, 0), (0, 2), (3, 1)], "buckets with more phases go first"
    assert num_waits == 0 and flight.num_phases == 2


def test_phases_are_spread_over_the_delay() -> None:
    begun, _, num_waits = run(4, {0: [1, 1, 1, 1], 1: [2, 2]})
    assert begun == [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (3, 0)] and num_waits == 0


@pytest.mark.parametrize(
    ("takes", "steps"), [({0: [5]}, 5), ({0: [2, 3]}, 6), ({0: [5], 1: [2, 1]}, 5), ({0: [2], 1: [1, 3]}, 6)]
)
def test_an_exchange_needs_the_delay_of_its_slowest_bucket(takes: dict[int, list[int]], steps: int) -> None:
    _, flight, num_waits = run(8, takes)
    assert flight.needed_delay == steps and num_waits == 0


def test_with_too_little_delay_phases_begin_when_those_before_are_over() -> None:
    begun, _, num_waits = run(1, {0: [3, 3], 1: [1]})
    assert begun == [(0, 0), (0, 1), (1, 0)] and num_waits > 0


def test_where_several_phases_are_due_buckets_travel_together() -> None:
    begun, _, _ = run(2, {0: [3] * 4, 1: [3] * 4})
    assert [number for _, number in begun] == [0, 1] * 4


class FarGpu:
    """A GPU that still computes for a while, and a collective that is over some time after that."""

    def __init__(self, computes_s: float, travels_s: float) -> None:
        self._computes_s, self._travels_s, self._over_at_s = computes_s, travels_s, float("inf")

    def synchronize(self) -> None:
        time.sleep(self._computes_s)
        self._over_at_s = time.perf_counter() + self._travels_s

    @property
    def is_over(self) -> bool:
        return time.perf_counter() > self._over_at_s

    def wait(self) -> None:
        assert self.is_over, "the host looks, because it would not notice how long a stream waits"


def test_a_gpu_that_still_computes_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a measured delay computing would be taken for a slow network, and the delay would grow."""
    gpu = FarGpu(computes_s=0.3, travels_s=0.02)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: gpu)
    group = mock.Mock(is_stream_ordered=True, waits_on_stream=True)
    under_way = ExchangesInFlight(group, torch.device("cpu"), num_replicas=2, allocate=mock.Mock())
    under_way._device, under_way.is_measured, under_way.step_s = torch.device("cuda"), True, 0.3
    flight = under_way.start({0: iter([gpu])}, {0: 1})  # type: ignore[dict-item]
    assert list(under_way.finish(flight)) == [0]
    assert 0.02 < under_way.waited_s < 0.2
    (told,) = group.traffic.add.call_args_list
    assert told.kwargs["wait_s"] == pytest.approx(under_way.waited_s, rel=0.1), "metrics have it as a wait"


STEP_S = 0.02


class TimedLine:
    """A collective that takes so many steps of a clock."""

    def __init__(self, steps: float) -> None:
        self._over_at_s = time.perf_counter() + steps * STEP_S

    @property
    def is_over(self) -> bool:
        return time.perf_counter() > self._over_at_s

    def wait(self) -> None:
        time.sleep(max(0.0, self._over_at_s - time.perf_counter()))


def needed_delay(monkeypatch: pytest.MonkeyPatch, takes: dict[int, list[float]], *, steps: int) -> int:
    """What an exchange is found to need that is waited for so many steps after it was sent."""
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))

    def phases(number: int) -> Iterator[TimedLine]:
        for taken in takes[number]:
            line = TimedLine(taken)
            yield line
            line.wait()

    made: dict[int, Phases] = {number: phases(number) for number in takes}  # type: ignore[misc]
    under_way = exchanges()
    under_way._group.is_stream_ordered = under_way._group.waits_on_stream = False  # type: ignore[misc]
    under_way.is_measured, under_way.step_s = True, STEP_S
    flight = under_way.start(made, {number: len(one) for number, one in takes.items()})
    for _ in range(steps):
        clock[0] += STEP_S
        under_way.count_step(flight)
    assert sorted(under_way.finish(flight)) == sorted(takes)
    return flight.needed_delay


def test_a_wait_counts_for_the_phase_that_was_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a save lets arrive what was sent a step before: phases then begin one after the other."""
    assert needed_delay(monkeypatch, {0: [4.9, 4.9]}, steps=1) == 10
    assert needed_delay(monkeypatch, {0: [2.9] * 4, 1: [2.9] * 2}, steps=1) == 12
