"""Exchanges beside the main thread: their order, what becomes of errors, and whose memory is whose afterwards."""

from __future__ import annotations

import gc
import signal
import threading
import weakref

import pytest
import torch

from weft.comm.shared_memory.worker import Work, Worker


class Gate:
    """A task that waits until it is let through."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.entered = threading.Event()

    def __call__(self) -> None:
        self.entered.set()
        assert self.opened.wait(30)


def fail() -> None:
    raise RuntimeError("Connection closed by peer: rank 1 is gone")


def test_tasks_run_in_the_order_in_which_they_were_given() -> None:
    background, done, gate = Worker("test"), [], Gate()
    works = [background.start(gate)]
    works += [background.start(lambda number=number: done.append(number)) for number in range(50)]  # type: ignore[misc]
    assert gate.entered.wait(30) and not done, "the caller goes on while the first task waits"
    gate.opened.set()
    background.run(lambda: done.append(50))
    assert done == list(range(51))
    works.append(background.start(lambda: done.append(51)))
    for work in works:
        work.wait()
        work.wait()
    background.run(lambda: done.append(52))
    assert done == list(range(53))


def test_only_what_need_not_be_waited_for_takes_a_thread() -> None:
    background, threads = Worker("test"), []
    background.run(lambda: threads.append(threading.current_thread()))
    background.start(lambda: threads.append(threading.current_thread())).wait()
    background.run(lambda: threads.append(threading.current_thread()))
    main = threading.current_thread()
    assert threads[0] is main and threads[1] is not main and threads[2] is main


def test_no_task_records_gradients() -> None:
    background, seen = Worker("test"), []
    background.run(lambda: seen.append(torch.is_grad_enabled()))
    background.start(lambda: seen.append(torch.is_grad_enabled())).wait()
    assert seen == [False, False] and torch.is_grad_enabled()


@pytest.mark.parametrize("first", ["run", "start"])
@pytest.mark.parametrize("then", ["run", "start"])
def test_nothing_is_exchanged_after_a_failure(first: str, then: str) -> None:
    """A task that failed half way has left its ranks out of step: the next would add up the wrong tensors."""
    background, done = Worker("test"), []
    with pytest.raises(RuntimeError, match="rank 1 is gone"):
        if first == "run":
            background.run(fail)
        else:
            background.start(fail).wait()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="rank 1 is gone"):
            if then == "run":
                background.run(lambda: done.append(1))
            else:
                background.start(lambda: done.append(1)).wait()
    assert not done


def test_tasks_behind_one_that_fails_fail_too() -> None:
    background, done, gate = Worker("test"), [], Gate()
    works = [background.start(task) for task in (gate, fail, lambda: done.append(1))]
    gate.opened.set()
    works[0].wait()
    for work in works[1:]:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="rank 1 is gone"):
                work.wait()
    assert not done


def test_who_has_waited_finds_the_tasks_memory_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket that was exchanged can be laid out anew at once: the thread holds nothing of it any more."""
    held: list[weakref.ref[torch.Tensor]] = []
    at_the_end, finish = [], Work.finish

    def look_and_finish(work: Work, error: BaseException | None) -> None:
        at_the_end.append(held[0]())
        finish(work, error)

    monkeypatch.setattr(Work, "finish", look_and_finish)
    tensor, gate = torch.zeros(10), Gate()
    held.append(weakref.ref(tensor))

    def task(tensor: torch.Tensor = tensor) -> None:
        gate()
        tensor.add_(1)

    work = Worker("test").start(task)
    del task, tensor
    gate.opened.set()
    work.wait()
    assert at_the_end == [None]


def test_an_interrupted_wait_does_not_let_the_next_task_overtake() -> None:
    """Ctrl-C strikes while a task waits for those before it; the next one must still wait for them."""
    background, done, gate = Worker("test"), [], Gate()
    background.start(gate)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            background.run(lambda: done.append(1))
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert not done
    threading.Timer(0.05, gate.opened.set).start()
    background.run(lambda: done.append(gate.opened.is_set()))
    assert done == [True]


def test_the_thread_ends_with_its_queue() -> None:
    before = threading.active_count()
    background = Worker("test")
    background.start(lambda: None).wait()
    (thread,) = [one for one in threading.enumerate() if one.name == "test" and one.is_alive()][-1:]
    del background
    gc.collect()
    thread.join(30)
    assert not thread.is_alive() and threading.active_count() <= before
