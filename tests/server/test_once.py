"""Asynchronous servers under random delays and lost connections: every gradient is applied once on every server, and no
worker is let go further ahead than the bound."""

from __future__ import annotations

import random
from typing import Any

import pytest
from served_workers import PlayedWorker, make_settings
from test_server_agreement import Recording

from weft.server.protocol.worker_rank import State
from weft.server.server import ParameterServer

STEPS = 7


class Applied:
    """Notes of what each update of a server is made, and how far apart workers are when one is let go."""

    def __init__(self, server: ParameterServer) -> None:
        self.steps: list[tuple[int, int]] = []
        self.gaps: list[int] = []
        self._server = server

    def attach(self) -> bool:
        server, mode = self._server, self._server.mode
        if server.updates is None or mode is None:
            return False
        by_one, may_begin, clocks = server.updates.by_one, mode.may_begin, mode.clocks  # type: ignore[union-attr]

        def noted(worker: int, arrival: Any) -> bool:
            self.steps.append((worker, server.arrivals[worker].next_clock - 1))  # it was taken just before
            return by_one(worker, arrival)

        def let_go(worker: int) -> bool:
            may = may_begin(worker)
            if may:
                self.gaps.append(server.arrivals[worker].next_clock - min(clocks._clocks.values()))
            return may

        server.updates.by_one = noted  # type: ignore[method-assign]
        mode.may_begin = let_go  # type: ignore[method-assign]
        return True


@pytest.mark.parametrize("num_servers", [1, 2])
@pytest.mark.parametrize(("mode", "staleness"), [("async", 0), ("bounded", 1), ("bounded", 3)])
@pytest.mark.parametrize("seed", range(4))
def test_every_gradient_counts_once(mode: str, staleness: int, num_servers: int, seed: int) -> None:
    settings = make_settings(num_workers=3, mode=mode, staleness=staleness, num_servers=num_servers, bucket_bytes=96)
    chance = random.Random(seed)
    made = Recording(settings, [PlayedWorker(number, settings) for number in range(3)])
    for one in made.workers.values():
        made.hello(one)
    made.steps_at_most = STEPS
    waiting = {server.number: Applied(server) for server in made.servers}
    noted = dict(waiting)
    num_lost = 0
    while found := made.open():
        # Worker 0's messages are slow, those of others come in any order.
        fast = [one for one in found if one[0] == "across" or one[1][0] != 0]
        made.deliver(*chance.choice(fast if fast and chance.random() < 0.9 else found))
        waiting = {number: one for number, one in waiting.items() if not one.attach()}
        if not waiting and num_lost < 5 and chance.random() < 0.02:
            made.lose(chance.randrange(3))
            num_lost += 1
    assert num_lost and not waiting
    assert all(one.rank.state == State.SENT for one in made.workers.values()), "a worker waits for weights"
    for server in made.servers:
        applied = noted[server.number]
        assert sorted(applied.steps) == [(worker, clock) for worker in range(3) for clock in range(STEPS)]
        assert server.version == 3 * STEPS
        if mode == "bounded":
            assert max(applied.gaps) <= staleness
        else:
            assert max(applied.gaps) >= 2, "a worker was ahead, as it may be"
