"""Counting what is exchanged, from several threads at once."""

from __future__ import annotations

import sys
import threading

from weft.comm.group import Traffic
from weft.plan.partition.wire import sent_bytes


def test_two_threads_lose_no_count() -> None:
    """`x.sent += f()` reads before it calls, and the other thread's count in between would be overwritten."""
    traffic, rounds = Traffic(), 20_000

    def count() -> None:
        for _ in range(rounds):
            traffic.add(num_calls=1, sent_bytes=sent_bytes("all-reduce", 32, 2), wait_s=0.5)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=count) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert (traffic.num_calls, traffic.sent_bytes, traffic.wait_s) == (2 * rounds, 64 * rounds, rounds)
