"""Push and pull of 25 MB between a worker and a server of one host, beside gloo's all-reduce of the same bytes.

    python benchmarks/server_transport.py
    python benchmarks/server_transport.py --megabytes 100 --servers 2

One worker pushes a gradient and gets the weights back, as in a synchronous step of one worker: through memory that both
share, over an ipc socket, and over TCP with CURVE, as between hosts. The server adds, updates with SGD and answers;
gloo's two ranks add and return the sum. Sides take turns, medians of the rounds are shown.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from weft.hosts import host_id
from weft.plan.partition.server_shards import ServedTensor
from weft.server.local_servers import LocalServers
from weft.server.protocol.client import ServerClient
from weft.server.protocol.keys import JobKey, write_key
from weft.server.protocol.layout import ServerLayout
from weft.server.protocol.message import Commit
from weft.server.protocol.settings import MASTER, Settings
from weft.server.protocol.worker_rank import WorkerRank

BUCKET_BYTES = 4 << 20


def settings_of(numel: int, num_servers: int) -> Settings:
    tensors = tuple(ServedTensor(name=str(number), numel=numel // 8, item_bytes=4) for number in range(8))
    groups = [{"settings": {"lr": 1e-3}, "tensors": [one.name for one in tensors]}]
    return Settings(
        job="benchmark",
        weft="",
        mode="sync",
        num_servers=num_servers,
        num_workers=1,
        num_ranks=1,
        staleness=0,
        backups=0,
        compensation=0.0,
        lr_scaling="none",
        clip_norm=0.0,
        bucket_bytes=BUCKET_BYTES,
        pull=MASTER,
        codec={},
        tensors=tensors,
        dtypes=("float32",) * len(tensors),
        optimizer={"class": "torch.optim.sgd.SGD", "groups": groups},
        splits=True,
    )


class Worker:
    """Pushes a gradient of ones, and waits for the weights."""

    def __init__(self, settings: Settings, addresses: tuple[str, ...], key: JobKey | None, *, host: str = "") -> None:
        layouts = [ServerLayout.of(settings, server) for server in range(settings.num_servers)]
        weights = [torch.zeros(one.numel) for one in settings.tensors]
        gradients = [torch.ones(one.numel) for one in settings.tensors]

        def views(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
            return [[tensors[one.tensor][one.start : one.stop] for one in layout.parts] for layout in layouts]

        self.gradients = views(gradients)
        rank = WorkerRank(settings, views(weights), worker=0, start=1, host=host)
        self.client = ServerClient(addresses, key, rank)
        self.client.wait_for_weights(timeout_s=60.0)

    def step(self) -> None:
        for layout in self.client.rank.layouts:
            for bucket, parts in enumerate(layout.buckets):
                self.client.push(layout.server, bucket, [self.gradients[layout.server][part] for part in parts])
        self.client.commit(Commit(count=1, loss_sum=0, scale=1, lr_factor=1, compute_s=0, num_buckets=0))
        self.client.wait_for_weights(timeout_s=60.0)


def gloo_rank(rank: int, path: str, numel: int, rounds: int, channel: mp.SimpleQueue, turn: mp.Event) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{path}", rank=rank, world_size=2, timeout=timedelta(seconds=600))
    values = torch.ones(numel)
    dist.all_reduce(values)
    for _ in range(rounds):
        turn.wait()
        dist.barrier()
        if rank == 0:
            turn.clear()
        begin = time.perf_counter()
        dist.all_reduce(values)
        if rank == 0:
            channel.put(time.perf_counter() - begin)
        dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=25.0)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    torch.set_num_threads(1)
    numel = int(args.megabytes * 1e6 / 4) // 8 * 8
    settings = settings_of(numel, args.servers)
    context = mp.get_context("spawn")
    channel, turn = context.SimpleQueue(), context.Event()
    with tempfile.TemporaryDirectory() as folder:
        key_file = Path(folder) / "key"
        key = write_key(key_file)
        ipc = LocalServers(args.servers, most_frame_bytes=BUCKET_BYTES)
        shared = LocalServers(args.servers, most_frame_bytes=BUCKET_BYTES)
        curve = LocalServers(args.servers, most_frame_bytes=BUCKET_BYTES, tcp_host="127.0.0.1", key_file=key_file)
        ranks = [
            context.Process(target=gloo_rank, args=(rank, f"{folder}/store", numel, args.rounds, channel, turn))
            for rank in range(2)
        ]
        for one in ranks:
            one.start()
        with ipc, curve, shared:
            workers = {
                "shared memory": Worker(settings, shared.addresses, None, host=host_id()),
                "ipc": Worker(settings, ipc.addresses, None),
                "TCP with CURVE": Worker(settings, curve.addresses, key),
            }

            def gloo() -> float:
                turn.set()
                return float(channel.get())

            def through(worker: Worker) -> Callable[[], float]:
                def timed() -> float:
                    begin = time.perf_counter()
                    worker.step()
                    return time.perf_counter() - begin

                return timed

            sides = {"gloo all-reduce, 2 ranks": gloo, **{name: through(one) for name, one in workers.items()}}
            times: dict[str, list[float]] = {name: [] for name in sides}
            for _ in range(args.rounds):
                for name, side in sides.items():
                    times[name].append(side())
            for one in workers.values():
                one.client.close()
        for one in ranks:
            one.join()
    base = statistics.median(times["gloo all-reduce, 2 ranks"])
    print(f"{args.megabytes:g} MB, {args.servers} server(s), {os.cpu_count()} cores, torch {torch.__version__}\n")
    print("| side | ms | as fast as gloo |\n|---|---|---|")
    for name, found in times.items():
        median = statistics.median(found)
        print(f"| {name} | {1e3 * median:.1f} | {base / median:.2f}× |")


if __name__ == "__main__":
    main()
