"""Counters by which ranks wait for each other: order, wrapping, sleeping with and without the kernel's help, and ends
that come too soon."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from weft.comm.shared_memory import counters as signals
from weft.comm.shared_memory.counters import LINE_BYTES, Counter, Peer

LAST = 2**32 - 1


@pytest.fixture(params=["futex", "naps"])
def _wait_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "naps":
        monkeypatch.setattr(signals, "_find_futex", lambda: None)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that lives until it is killed."""
    process = subprocess.Popen(["sleep", "1000"])
    yield process
    process.kill()
    process.wait()


def myself() -> Peer:
    return Peer(0, os.getpid())


def make_pair(owner: Peer, *, start: int = 0, timeout_s: float = 60.0) -> tuple[Counter, Counter]:
    """The owner's side of a counter and another's."""
    line = memoryview(mmap.mmap(-1, LINE_BYTES))
    line.cast("I")[0] = start
    pair = tuple(Counter(line, owner=owner, timeout_s=timeout_s, spin=False) for _ in range(2))
    pair[0].count = start
    return pair[0], pair[1]


def in_thread(body: Callable[[], None]) -> tuple[threading.Thread, list[BaseException]]:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            body()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, errors


@pytest.mark.usefixtures("_wait_by")
@pytest.mark.parametrize("start", [0, 1, 2**31 - 2, 2**31, LAST - 2, LAST])
def test_a_count_is_waited_for_over_every_wrap(start: int) -> None:
    mine, other = make_pair(myself(), start=start)
    for step in range(1, 4):
        awaited = (start + step) % 2**32
        assert not other.reached(awaited)
        thread, errors = in_thread(lambda awaited=awaited: other.wait(awaited))  # type: ignore[misc]
        time.sleep(0.002)
        assert mine.post() == awaited
        thread.join(30)
        assert not thread.is_alive() and not errors and other.reached(awaited)
        other.wait((start + 1) % 2**32)  # what was reached long ago is no reason to wait


@pytest.mark.usefixtures("_wait_by")
def test_ping_and_pong_lose_no_wake_up() -> None:
    """Two threads by turns, a thousand times: a lost wake-up would cost a fifth of a second each."""
    first, seen_by_second = make_pair(myself())
    second, seen_by_first = make_pair(myself())
    rounds, order = 1000, []

    def answer() -> None:
        for number in range(1, rounds + 1):
            seen_by_second.wait(number)
            order.append(-number)
            second.post()

    thread, errors = in_thread(answer)
    for number in range(1, rounds + 1):
        order.append(number)
        first.post()
        seen_by_first.wait(number)
    thread.join(30)
    assert not errors and order == [sign * number for number in range(1, rounds + 1) for sign in (1, -1)]


@pytest.mark.usefixtures("_wait_by")
def test_a_peer_that_is_killed_is_missed(sleeper: subprocess.Popen[bytes]) -> None:
    _, other = make_pair(Peer(3, sleeper.pid))
    thread, errors = in_thread(lambda: other.wait(1))
    time.sleep(0.05)
    assert thread.is_alive()
    sleeper.kill()  # and nobody has asked for its exit code yet: it is a zombie
    thread.join(30)
    assert [type(error) for error in errors] == [RuntimeError]
    assert "Connection closed by peer" in str(errors[0]) and "rank 3" in str(errors[0])


@pytest.mark.usefixtures("_wait_by")
def test_what_a_peer_did_before_its_end_counts(sleeper: subprocess.Popen[bytes]) -> None:
    mine, other = make_pair(Peer(3, sleeper.pid))
    mine.post()
    sleeper.kill()
    sleeper.wait()
    other.wait(1)
    with pytest.raises(RuntimeError, match="gone"):
        other.wait(2)


@pytest.mark.usefixtures("_wait_by")
def test_a_peer_that_lives_but_never_comes_is_given_up() -> None:
    _, other = make_pair(myself(), timeout_s=0.1)
    with pytest.raises(RuntimeError, match="Timed out waiting 100ms for rank 0"):
        other.wait(1)


def test_a_stopped_peer_is_waited_for(sleeper: subprocess.Popen[bytes]) -> None:
    os.kill(sleeper.pid, signal.SIGSTOP)
    assert not Peer(1, sleeper.pid).is_gone


def test_a_process_under_the_same_number_is_another_one(sleeper: subprocess.Popen[bytes]) -> None:
    peer = Peer(1, sleeper.pid)
    assert not peer.is_gone
    peer.started = Peer(0, 1).started  # as if the number had belonged to a process of long ago
    assert peer.is_gone


def test_a_peer_is_missed_without_proc(sleeper: subprocess.Popen[bytes]) -> None:
    peer, first = Peer(1, sleeper.pid), Peer(0, 1)
    peer.started = first.started = None
    assert not peer.is_gone and not first.is_gone  # the first process of all is not ours, but it lives
    sleeper.kill()
    sleeper.wait()
    assert peer.is_gone


@pytest.mark.skipif(sys.platform != "linux", reason="names of processes as Linux has them")
def test_a_process_may_have_any_name() -> None:
    """A name is cut after 15 bytes, be that in the middle of a letter; and it may hold brackets and spaces."""
    library, before = ctypes.CDLL(None), ctypes.create_string_buffer(16)
    library.prctl(16, before)
    try:
        for name in ("обучение".encode()[:15], b") R 1 (x", b"\xff\xfe"):
            library.prctl(15, ctypes.create_string_buffer(name, 16))
            peer = myself()
            assert peer.started is not None and not peer.is_gone
    finally:
        library.prctl(15, before)


def test_waits_are_interrupted_by_signals() -> None:
    """A handler runs while its thread waits, and what it raises ends the wait."""
    _, other = make_pair(myself())

    class Stop(Exception):
        pass

    def stop(*_: object) -> None:
        raise Stop

    previous = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Stop):
            other.wait(1)
    finally:
        signal.signal(signal.SIGALRM, previous)
