"""A worker whose gradients count: that of a clock is 1 at a place of its own and 0 elsewhere, so that weights which SGD
with a rate of 1 has updated say how often each was applied.

    python counting_worker.py NUMBER START STEP_FILE STOP_FILE ADDRESS...

It writes a line for each clock that all servers have said is applied, and ends when the stop file is there."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

from weft.hosts import host_id
from weft.plan.partition.server_shards import ServedTensor
from weft.server.protocol.client import ServerClient
from weft.server.protocol.layout import ServerLayout
from weft.server.protocol.message import Commit
from weft.server.protocol.settings import Settings
from weft.server.protocol.worker_rank import WorkerRank

NUM_CLOCKS = 40_000
"""Enough for servers to share the memory of their parts."""


def counting_settings(*, num_servers: int, num_workers: int) -> Settings:
    """One tensor, with a row per clock and an element for each worker."""
    numel = NUM_CLOCKS * num_workers
    return Settings(
        job="count",
        weft="0",
        mode="async",
        num_servers=num_servers,
        num_workers=num_workers,
        num_ranks=1,
        staleness=0,
        backups=0,
        compensation=0.0,
        lr_scaling="none",
        clip_norm=0.0,
        bucket_bytes=1 << 20,
        pull="master",
        codec={},
        tensors=(ServedTensor(name="count", numel=numel, item_bytes=4, row_numel=num_workers),),
        dtypes=("float32",),
        optimizer={"class": "torch.optim.sgd.SGD", "groups": [{"settings": {"lr": 1.0}, "tensors": ["count"]}]},
        splits=True,
    )


class CountingRank:
    """A worker's only rank, with its weights. Worker 0 shares memory with servers, the others do not."""

    def __init__(self, settings: Settings, number: int, start: int) -> None:
        self.num_workers = settings.num_workers
        self.weights, self.gradient = torch.zeros(2, NUM_CLOCKS * self.num_workers).unbind()
        earlier = [_start_of(number, one) for one in range(start)]
        layouts = [ServerLayout.of(settings, server) for server in range(settings.num_servers)]
        self.rank = WorkerRank(
            settings,
            [[self.weights[one.start : one.stop] for one in layout.parts] for layout in layouts],
            worker=number,
            start=_start_of(number, start),
            gives_first=number == 0,
            earlier_starts=earlier,
            host=host_id() if number == 0 else "",
        )

    def step(self, client: ServerClient) -> None:
        """Push the gradient of this clock, in the memory of the last one."""
        self.gradient.zero_()
        self.gradient[self.rank.clock * self.num_workers + self.rank.worker] = 1.0
        for layout in self.rank.layouts:
            for bucket, parts in enumerate(layout.buckets):
                own = [layout.parts[part] for part in parts]
                client.push(layout.server, bucket, [self.gradient[one.start : one.stop] for one in own])
        client.commit(Commit(count=1, loss_sum=0.0, scale=1.0, lr_factor=1.0, compute_s=0.0, num_buckets=0))


def _start_of(number: int, start: int) -> int:
    return 1000 * number + start + 1


def main() -> None:
    number, start = int(sys.argv[1]), int(sys.argv[2])
    steps, stop, addresses = Path(sys.argv[3]), Path(sys.argv[4]), sys.argv[5:]
    torch.set_num_threads(1)
    settings = counting_settings(num_servers=len(addresses), num_workers=2)
    worker = CountingRank(settings, number, start)
    with ServerClient(addresses, None, worker.rank) as client, steps.open("a", buffering=1) as file:
        client.wait_for_weights(timeout_s=100)
        while not stop.exists():
            clock = worker.rank.clock
            worker.step(client)
            client.wait_for_weights(timeout_s=100)
            file.write(f"{clock}\n")
            time.sleep(0.01)
        assert any(worker.rank.shares.read_bytes) == (number == 0)


if __name__ == "__main__":
    main()
