"""`[data] delay = "auto"`: the decisions, on reports of lines that are far, near, full, or change."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from unittest import mock

import pytest
from oracle import cut_evenly, make_trainer, small_gpt, token_batch
from ranks import gathered, ranks

from weft.comm.collectives import Pending
from weft.plan.plan import Axes, Data, Plan
from weft.sync.delayed import DelayedSync
from weft.sync.exchange.auto_delay import CALM_DECISIONS, LONGEST_AUTO_DELAY, NUM_WATCHED, AutoDelay, Report
from weft.sync.exchange.in_flight import BucketInFlight, ExchangesInFlight

FAR = Report(needed_delay=2, waited=0.0, num_phases=2, longest_delay=1000)


def report(needed_delay: int, waited: float, **changes: int) -> Report:
    return dataclasses.replace(FAR, needed_delay=needed_delay, waited=waited, **changes)


def made(delay: int = 2) -> AutoDelay:
    auto = AutoDelay(delay, every=1)
    for _ in range(3):
        auto.add_step(0.1)
    return auto


def test_it_grows_at_once_to_what_is_needed_and_stays() -> None:
    auto = made()
    told = auto.decide(report(10, waited=2.0), step=10)
    assert auto.delay == 10 and "from 2 to 10 after step 10" in told and "takes 10 steps of 100.0 ms" in told
    assert auto.decide(report(10, waited=0.0), step=40) == "" and auto.delay == 10
    assert auto.decide(report(8, waited=0.0), step=80) == "", "a little too long is no reason"
    assert auto.changes == [(10, 10)]


def test_it_shrinks_when_the_network_becomes_faster() -> None:
    auto = made(delay=20)
    assert "from 20 to 6" in auto.decide(report(6, waited=0.0), step=50)
    assert auto.decide(report(2, waited=0.0), step=90) and auto.delay == 2


def test_full_lines_do_not_make_it_grow() -> None:
    auto = made()
    assert auto.decide(report(8, waited=3.0), step=10) and auto.delay == 8
    assert "the links are full" in auto.decide(report(18, waited=2.9), step=50) and auto.delay == 2
    for step in (100, 150, 200):
        assert auto.decide(report(8, waited=3.0), step=step) == "" and auto.delay == 2
    assert auto.decide(report(2, waited=0.0), step=250) == "" and auto.delay == 2
    assert auto.decide(report(8, waited=3.0), step=300) and auto.delay == 8, "later the line may be far instead"


def test_where_phases_cannot_be_seen_to_end_a_shorter_delay_is_tried() -> None:
    """Over gloo's messages a phase always seems to take its whole window."""
    auto = made(delay=8)
    told = [auto.decide(report(8, waited=0.0), step=50 * number) for number in range(1, CALM_DECISIONS + 1)]
    assert told[:-1] == [""] * (CALM_DECISIONS - 1) and "from 8 to 6" in told[-1]
    assert "steps wait (40 % of a step) with a shorter one" in auto.decide(report(8, waited=0.4), step=500)
    assert auto.delay == 8
    told = [auto.decide(report(8, waited=0.0), step=500 + 50 * number) for number in range(1, 2 * CALM_DECISIONS)]
    assert not any(told), "it is in less of a hurry now"
    assert auto.decide(report(8, waited=0.0), step=2000) and auto.delay == 6
    for number in range(20):
        auto.decide(report(auto.delay, waited=0.0), step=3000 + 50 * number)
    assert auto.delay == 2, "what is not waited for becomes short in the end"


def test_a_slow_replica_is_not_taken_for_a_full_link() -> None:
    auto = made()
    auto.decide(report(8, waited=3.0), step=10)
    told = auto.decide(dataclasses.replace(report(18, waited=2.9), slowest=1.5), step=50)
    assert "one replica computes 1.5 times as long as another" in told and auto.delay == 2


def test_memory_and_the_length_of_runs_limit_it() -> None:
    auto = made()
    assert "takes 40 steps of 100.0 ms (6 is the most here)" in auto.decide(report(40, 9.0, longest_delay=6), step=10)
    assert auto.delay == 6
    auto = made()
    auto.decide(report(1000, 900.0), step=10)
    assert auto.delay == LONGEST_AUTO_DELAY


def test_it_decides_on_exchanges_of_its_own_delay_alone() -> None:
    auto = made()
    assert [auto.is_due(step) for step in (1, 7, 8)] == [False, False, True]
    auto.decide(report(10, waited=2.0), step=10)
    assert [auto.is_due(step) for step in (33, 34)] == [False, True] and NUM_WATCHED == 4


def test_findings_are_the_usual_not_the_worst() -> None:
    auto = made()
    for steps in [3] * 9 + [50]:
        auto.add_exchange(steps, 2)
        auto.add_wait(0.05)
    assert auto.findings() == (3.0, pytest.approx(0.5), 2.0)


def test_it_goes_on_where_it_was_saved() -> None:
    auto = made()
    auto.decide(report(8, waited=3.0), step=10)
    again = AutoDelay(2, every=1)
    again.load_state(auto.state())
    assert again.state() == auto.state() and again.delay == 8
    assert "the links are full" in again.decide(report(18, waited=2.9), step=50)


@dataclasses.dataclass
class SlowLine:
    """A collective that is over at a time at the soonest."""

    real: Pending
    over_at_s: float

    @property
    def is_over(self) -> bool:
        return self.real.is_over and time.perf_counter() > self.over_at_s

    def wait(self) -> None:
        time.sleep(max(0.0, self.over_at_s - time.perf_counter()))
        self.real.wait()


@ranks(2)
def test_ranks_agree_on_the_delay_that_hides_slow_exchanges() -> None:
    plan = Plan(axes=Axes(data=2), data=Data(sync="delayed", delay="auto", check_every=0))
    trainer = make_trainer(small_gpt(), plan)
    sync = trainer.sync
    assert isinstance(sync, DelayedSync) and sync.auto is not None and sync.delay == 2
    takes_s = 0.1 + 0.08 * trainer.data_rank  # the ranks see different lines

    def begin(exchanges: ExchangesInFlight, one: BucketInFlight, waited_before_s: float) -> None:
        begun(exchanges, one, waited_before_s)
        one.under_way = SlowLine(one.under_way, time.perf_counter() + takes_s)  # type: ignore[arg-type,assignment]

    begun = ExchangesInFlight._begin_next
    with mock.patch.object(ExchangesInFlight, "_begin_next", begin):
        for step in range(40):
            time.sleep(0.03)
            trainer.step(*cut_evenly(token_batch(4, seed=step), 2)[trainer.data_rank])
    delays = gathered([sync.delay, sync.auto.changes])
    assert delays[0] == delays[1] and sync.auto.changes, delays
    assert 4 <= sync.delay <= 16, "a phase takes 180 ms, and a step 30 and more"
    trainer.close()


@ranks(2)
def test_a_run_is_resumed_from_any_step(tmp_path: Path) -> None:
    """A decision may be due at the merge of an exchange that was read from the checkpoint, without its reports."""
    plan = Plan(axes=Axes(data=2), data=Data(sync="delayed", delay="auto", check_every=0))
    trainer, again = make_trainer(small_gpt(), plan), make_trainer(small_gpt(), plan)
    for step in range(14):
        trainer.step(*cut_evenly(token_batch(4, seed=step), 2)[trainer.data_rank])
        trainer.save(tmp_path / str(step))
    for step in range(4, 14):
        again.load(tmp_path / str(step))
        for further in range(5):
            again.step(*cut_evenly(token_batch(4, seed=step + further), 2)[trainer.data_rank])
        assert isinstance(again.sync, DelayedSync)
        assert len(set(gathered(again.sync.delay))) == 1
    for one in (trainer, again):
        one.close()
