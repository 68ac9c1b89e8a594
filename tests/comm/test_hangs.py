"""Ways to hang, each of which is named: who waits where, for whom, and what those do instead.

The ranks are processes of their own (`launched_ranks.py`), with limits of a second instead of seconds and minutes; the
limits themselves are arithmetic, tested below. A test ends when the message is there, or fails after a minute.
"""

from __future__ import annotations

import inspect
import json
import os
import pdb
import signal
import socket
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from launched_ranks import Body, Ended, printed, run
from torch import nn

import weft.checkpoint.save
from weft.comm.failures.activity import Calls
from weft.comm.failures.hang_report import describe_different_calls
from weft.comm.failures.inquiries import Inquiries, RankProcess
from weft.comm.failures.limits import Limits
from weft.comm.failures.places import Place
from weft.comm.failures.rank_status import RankStatus, own_status
from weft.comm.failures.stuck_exchanges import Exchange, ExchangeStatus, as_runs, from_runs
from weft.plan.plan import Axes, Comm, Plan
from weft.training.parallelize import parallelize
from weft.training.trainer import Trainer

FOREVER_S = 600.0
SHORT = Limits(slack_s=0.8, first_s=FOREVER_S, checkpoint_s=1.0, poll_s=0.05)


def make_trainer(*, timeout_s: float = 0.0, transport: str = "auto") -> Trainer:
    plan = Plan(axes=Axes(data=2), comm=Comm(timeout_s=timeout_s, transport=transport))
    return parallelize(
        nn.Linear(8, 4), plan, loss="cross-entropy", optimizer=partial(torch.optim.SGD, lr=0.1), device="cpu"
    )


def batches(number: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for _ in range(number):
        yield torch.ones(4, 8), torch.zeros(4, dtype=torch.int64)


def train_some(trainer: Trainer) -> None:
    for inputs, targets in batches(6):
        trainer.step(inputs, targets)


def told(ended: list[Ended], text: str) -> str:
    """The message with this text, which one rank printed. On a busy machine other waits may have been told before."""
    lines = [line for line in printed(ended) if text in line]
    assert len({line[0] for line in lines}) == 1, [one.stderr for one in ended]
    return lines[-1]


def hang(body: Body, folder: Path, text: str) -> str:
    """The message with this text about a body that hangs on two ranks."""
    return told(run(body, 2, folder, limits=SHORT, until=text), text)


def line_of(function: Any, text: str) -> str:
    """ "test_hangs.py:28 (function)", of the first line of a function that begins with a text."""
    lines, first = inspect.getsourcelines(function)
    number = first + next(place for place, line in enumerate(lines) if line.strip().startswith(text))
    return f"{os.path.relpath(__file__)}:{number}"


def stopped(rank: int) -> None:
    trainer = make_trainer()
    train_some(trainer)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    train_some(trainer)


@pytest.mark.long
def test_a_stopped_rank_is_named(tmp_path: Path) -> None:
    line = hang(stopped, tmp_path, "not answer")
    assert (
        line.startswith("0 weft: rank 0 has waited ") and "along data/gradients, ranks 0, 1), in trainer.step (" in line
    )
    assert f"; rank 1: does not answer (on {socket.gethostname()}, process " in line
    assert "): it is stopped by a signal (SIGCONT lets it go on)" in line
    assert f"in {train_some.__name__}" in (tmp_path / "stacks" / "rank-0.txt").read_text()


def first_stopped(rank: int) -> None:
    stopped(1 - rank)


@pytest.mark.long
def test_rank_0_stopped_is_named_by_another_although_the_server_is_there(tmp_path: Path) -> None:
    line = hang(first_stopped, tmp_path, "not answer")
    assert line.startswith("1 weft: rank 1 has waited ") and "in trainer.step (" in line
    assert "; rank 0: does not answer (" in line and "it is stopped by a signal" in line


def first_saves(rank: int) -> None:
    trainer = make_trainer()
    first, second = batches(2)
    trainer.step(*first)
    if rank == 0:
        trainer.save("never written")
    trainer.step(*second)


def first_evaluates(rank: int) -> None:
    trainer = make_trainer()
    if rank == 0:
        trainer.evaluate(batches(2))
    else:
        train_some(trainer)


@pytest.mark.long
def test_a_save_on_one_rank_is_named_from_the_first_step_on(tmp_path: Path) -> None:
    line = hang(first_saves, tmp_path, "different calls")
    assert (
        f"0 weft: the ranks make different calls: rank 0 is in trainer.save ({line_of(first_saves, 'trainer.save')}), "
        f"rank 1 is in trainer.step ({line_of(first_saves, 'trainer.step(*second')}). Every rank must make "
    ) in line


def test_evaluate_on_one_rank_and_step_on_another_are_named(tmp_path: Path) -> None:
    """Also where the first exchanges of both meet, of different sizes, and are an error at once."""
    line = hang(first_evaluates, tmp_path, "different calls").replace(" was in ", " is in ")
    where = line_of(first_evaluates, "trainer.evaluate"), line_of(train_some, "trainer.step")
    said = f"rank 0 is in trainer.evaluate ({where[0]}), rank 1 is in trainer.step ({where[1]})"
    assert f"weft: the ranks make different calls: {said}. Every rank must " in line


def has_fewer_batches(rank: int) -> None:
    trainer = make_trainer()
    for inputs, targets in batches(6 - rank):
        trainer.step(inputs, targets)


def test_a_rank_with_fewer_batches_is_named_with_the_error_of_the_other(tmp_path: Path) -> None:
    ended = run(has_fewer_batches, 2, tmp_path, limits=SHORT)
    assert [one.code for one in ended] == [1, 0]
    assert "Connection closed by peer: rank 1 " in ended[0].stderr
    where = line_of(has_fewer_batches, "trainer.step")
    said = f"rank 0 was in trainer.step ({where}), rank 1 ended normally. Every rank must make "
    assert f"0 weft: the ranks make different calls: {said}" in told(ended, "different calls")


def disk_stalls(rank: int) -> None:
    trainer = make_trainer()
    if rank == 1:
        weft.checkpoint.save.force_to_disk = lambda path: time.sleep(FOREVER_S)  # type: ignore[assignment]
    trainer.save(Path(os.environ["WEFT_STACKS"]).parent / "checkpoint")


@pytest.mark.long
def test_a_stalled_disk_is_named(tmp_path: Path) -> None:
    line = hang(disk_stalls, tmp_path, "keeps waiting")
    assert f"in trainer.save ({line_of(disk_stalls, 'weft')})" in line, "rank 1"
    assert f" along world/saving, ranks 0, 1), in trainer.save ({line_of(disk_stalls, 'trainer.save')})" in line, (
        "rank 0"
    )


def debugs(rank: int) -> None:
    trainer = make_trainer()
    train_some(trainer)
    if rank == 1:
        reads, _ = os.pipe()
        sys.stdin, sys.stdout = os.fdopen(reads), open(os.devnull, "w")  # noqa: SIM115
        pdb.set_trace()
    train_some(trainer)


@pytest.mark.long
def test_a_debugger_is_named(tmp_path: Path) -> None:
    line = hang(debugs, tmp_path, "in a debugger")
    assert "; rank 1: in no exchange (its last one along data/gradients was number " in line
    assert "in a debugger at " in line and "(debugs)" in line


def loads_data_slowly(rank: int) -> None:
    trainer = make_trainer()
    train_some(trainer)
    if rank == 1:
        time.sleep(2.5)
    train_some(trainer)
    time.sleep(2.0)  # a run goes on, and its watch with it, which asks torch's recorder once a second at most


@pytest.mark.long
def test_a_wait_that_ends_is_told_too_and_ends_nothing(tmp_path: Path) -> None:
    ended = run(loads_data_slowly, 2, tmp_path, limits=SHORT)
    assert [one.code for one in ended] == [0, 0]
    waits = [line for line in printed(ended) if "rank 0 has waited " in line]
    assert any("(loads_data_slowly)" in line.partition("; rank 1: ")[2] for line in waits)
    assert any(line.startswith("0 weft: ") and "goes on after waiting " in line for line in printed(ended))


def hangs_with_a_timeout(rank: int) -> None:
    trainer = make_trainer(timeout_s=2.0, transport="c10d")
    train_some(trainer)
    if rank == 1:
        time.sleep(FOREVER_S)
    train_some(trainer)


@pytest.mark.long
def test_the_plans_timeout_ends_the_run_with_the_same_message(tmp_path: Path) -> None:
    """The process group's own is a minute here."""
    ended = run(hangs_with_a_timeout, 2, tmp_path, limits=SHORT)
    assert all(one.code not in (0, None) for one in ended)
    first, last = printed(ended)[-2:]
    assert first.endswith("; the run keeps waiting")
    assert " failed, and ends this run: rank 0 has waited " in last
    told_twice = first.split(" in all-reduce")[1].partition("; the run")[0]
    assert last.endswith(told_twice), "the same but for the seconds"


def status(*history: str, is_in_call: bool = True, place: str = "", **changes: Any) -> RankStatus:
    values: dict[str, Any] = {
        "exchanges": ExchangeStatus(waiting=(), latest={}),
        "call": history[-1] if is_in_call and history else "",
        "num_calls": len(history),
        "history": history,
        "place": Place(user=place),
    }
    return RankStatus(**{**values, **changes})


def test_a_rank_that_is_behind_makes_no_other_calls() -> None:
    ahead = status("weft.parallelize", "trainer.step", "trainer.save")
    behind = status("weft.parallelize", "trainer.step", is_in_call=False, place="train.py:9")
    assert describe_different_calls({0: ahead, 1: behind}) is None
    assert describe_different_calls({0: ahead, 1: ahead}) is None


def test_a_rank_that_has_gone_on_is_named_with_the_call_it_made_instead() -> None:
    waits = status("weft.parallelize", "trainer.evaluate", place="train.py:9")
    gone_on = status("weft.parallelize", "trainer.step", "trainer.save", place="train.py:20")
    text = describe_different_calls({0: waits, 1: gone_on, 2: gone_on})
    first, others = "rank 0 is in trainer.evaluate (train.py:9)", "ranks 1, 2 are in trainer.save (train.py:20)"
    assert text is not None and f"{first}, {others}, after trainer.step. " in text


def test_a_host_that_cannot_be_reached_is_named_once_and_again_after_three_times_as_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    inquiries = Inquiries(Limits())
    ranks = {
        rank: RankProcess(host_name=name, pid=10 + rank, is_here=rank == 0) for rank, name in enumerate(("a", "b"))
    }
    wait = Exchange(
        group="1", name="data/gradients", ranks=(0, 1), kind="all-reduce", number=7, num_bytes=64, waited_s=5
    )
    waiting = status("trainer.step", place="train.py:3", exchanges=ExchangeStatus(waiting=(wait,), latest={}))
    assert inquiries.begin(0, waiting, "late")
    assert inquiries.decide(ranks) is None, "rank 1 has time to answer"
    clock[0] += Limits().answer_s
    found = inquiries.decide(ranks)
    assert found is not None and not found.ends
    assert found.text == (
        "rank 0 has waited 5 s in all-reduce of 64 B (number 7 along data/gradients, ranks 0, 1), "
        "in trainer.step (train.py:3); "
        "rank 1: does not answer (on b, process 11): it is stopped, or its host cannot be reached"
    )
    for later_s, is_told in ((5.0, False), (15.0, True)):
        clock[0] += later_s
        inquiries.begin(0, waiting, "late")
        clock[0] += Limits().answer_s
        assert (inquiries.decide(ranks) is not None) == is_told
    inquiries.begin(0, waiting, "final")
    clock[0] += Limits().answer_s
    last = inquiries.decide(ranks)
    assert last is not None and last.ends and last.text == found.text


def test_waits_are_told_within_twice_the_usual_step_and_five_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    calls, limits = Calls(), Limits()
    monkeypatch.setattr("weft.comm.failures.limits.calls", calls)

    def call(name: str, seconds: float) -> None:
        calls.enter(name)
        clock[0] += seconds
        calls.leave()

    assert limits.reported_after_s("trainer.step") == 300.0, "the first steps compile"
    for seconds in (200.0, 50.0, 4.0, 4.0, 4.0):
        call("trainer.step", seconds)
    call("trainer.save", 100.0)
    call("trainer.step", 4.0)
    most_s = limits.reported_after_s("trainer.step") + limits.poll_s + limits.answer_s
    assert limits.reported_after_s("trainer.step") == 2 * 4.0 + limits.slack_s and most_s < 2 * 4.0 + 5.0
    assert limits.reported_after_s("") == limits.reported_after_s("trainer.step"), "between two steps"
    assert limits.reported_after_s("trainer.load") == 120.0
    assert (
        limits.reported_after_s("trainer.save")
        == limits.reported_after_s("", is_saving=True)
        == 2 * 100.0 + limits.slack_s
    )
    assert limits.reported_after_s("trainer.evaluate") == 300.0
    call("trainer.evaluate", 30.0)
    assert limits.reported_after_s("trainer.evaluate") == 2 * 30.0 + limits.slack_s
    calls.forget_durations()
    assert limits.reported_after_s("trainer.step") == 300.0


def test_ranks_of_a_status_travel_as_runs() -> None:
    """A status of a thousand ranks would otherwise be as long as all of theirs together."""
    for ranks in ((), (5,), (0, 1), tuple(range(0, 4096, 8)), (0, 1, 4, 5, 8, 9), (3, 2, 9)):
        assert from_runs(as_runs(ranks)) == ranks
    one = Exchange(
        group="1", name="data", ranks=tuple(range(4096)), kind="all-reduce", number=7, num_bytes=64, waited_s=5
    )
    sent = json.dumps(status("trainer.step", exchanges=ExchangeStatus(waiting=(one,) * 8, latest={})).as_json())
    assert len(sent) < 4096
    assert RankStatus.from_json(json.loads(sent)).exchanges.waiting[0] == one


def test_a_look_becomes_a_question_with_the_recorder_once_something_may_be_told() -> None:
    inquiries = Inquiries(Limits())
    ranks = {rank: RankProcess(host_name="a", pid=10 + rank, is_here=False) for rank in range(3)}
    wait = Exchange(group="1", name="data", ranks=(0, 1, 2), kind="all-reduce", number=7, num_bytes=64, waited_s=5)
    waiting = status("trainer.step", exchanges=ExchangeStatus(waiting=(wait,), latest={}))
    light = status("trainer.step")
    assert inquiries.begin(0, light, "look") and inquiries.urgency == "look"
    assert inquiries.begin(1, waiting, "late") and inquiries.urgency == "late", "all ranks are asked again"
    inquiries.answer(0, light, "look")
    inquiries.answer(2, light, "look")
    assert not inquiries.may_decide(3) and inquiries.decide(ranks) is None, "these answer the earlier question"
    assert not inquiries.begin(2, light, "look"), "which tells less than the answer that is to come"
    inquiries.answer(0, waiting, "late")
    assert not inquiries.may_decide(3)
    inquiries.answer(2, light, "late")
    assert inquiries.may_decide(3)
    found = inquiries.decide(ranks)
    assert found is not None
    assert found.text.startswith("rank 1 has waited 5 s in all-reduce") and "rank 0: waiting in it too" in found.text


def test_a_look_does_not_read_the_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    def read() -> Iterator[Any]:
        raise AssertionError("a look reads 2,000 operations, and queries CUDA events")

    monkeypatch.setattr("weft.comm.failures.stuck_exchanges._entries", read)
    assert own_status(reads_recorder=False).exchanges.latest is not None
    with pytest.raises(AssertionError):
        own_status()
