"""A step of a worker whose weights arrive while its next forward pass has begun, beside one that waits for all of them.

    python benchmarks/server_layers.py
    python benchmarks/server_layers.py --megabits 500 --layers 8 --servers 2

Both sides are one trainer of a GPT, over a relay between worker and servers that lets through so many bits a second in
each direction. They take turns in blocks of steps, within one run; medians of the blocks are shown, beside what can be
hidden at most: the time of a forward pass, or of the weights on the link where that is less.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import socket
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import weft
from weft.models.gpt import GPT, GPTConfig
from weft.plan.plan import Axes, Comm, Data, Plan, Server
from weft.server import worker_mesh
from weft.server.local_servers import LocalServers
from weft.training.trainer import Trainer

CHUNK_BYTES = 1 << 16
VOCABULARY, CONTEXT = 512, 64


def relay(pairs: list[tuple[str, str]], bytes_per_s: float, ready: Any) -> None:
    """Pass on what comes to sockets of this host, at a limited rate for all of them together in each direction."""
    links = (Link(bytes_per_s), Link(bytes_per_s))
    for near, far in pairs:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(near)
        listener.listen()
        threading.Thread(target=accept, args=(listener, far, links), daemon=True).start()
    ready.set()
    threading.Event().wait()


class Link:
    """One direction, which bytes leave one after the other."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s, self._lock, self._free_s = bytes_per_s, threading.Lock(), 0.0

    def take(self, num_bytes: int) -> None:
        """Return when so many bytes have left."""
        with self._lock:
            self._free_s = max(self._free_s, time.perf_counter()) + num_bytes / self._bytes_per_s
            until_s = self._free_s
        if (left_s := until_s - time.perf_counter()) > 0:
            time.sleep(left_s)


def accept(listener: socket.socket, far: str, links: tuple[Link, Link]) -> None:
    while True:
        near, _ = listener.accept()
        other = socket.socket(socket.AF_UNIX)
        other.connect(far)
        for source, sink, link in ((near, other, links[0]), (other, near, links[1])):
            threading.Thread(target=pass_on, args=(source, sink, link), daemon=True).start()


def pass_on(source: socket.socket, sink: socket.socket, link: Link) -> None:
    while found := source.recv(CHUNK_BYTES):
        link.take(len(found))
        sink.sendall(found)
    sink.shutdown(socket.SHUT_WR)


def relayed(folder: Path, bytes_per_s: float) -> type[LocalServers]:
    """Servers that are reached through a relay in a process of its own."""

    class Relayed(LocalServers):
        def __init__(self, num_servers: int, **settings: Any) -> None:
            super().__init__(num_servers, **settings)
            near = [str(folder / f"relay-{number}") for number in range(num_servers)]
            far = [address.removeprefix("ipc://") for address in self.addresses]
            context = mp.get_context("spawn")
            ready = context.Event()
            pairs = list(zip(near, far, strict=True))
            context.Process(target=relay, args=(pairs, bytes_per_s, ready), daemon=True).start()
            ready.wait()
            self.addresses = tuple(f"ipc://{one}" for one in near)

    return Relayed


def time_of_block(trainer: Trainer, batch: tuple[torch.Tensor, torch.Tensor], *, steps: int, waits: bool) -> float:
    """Seconds from the end of a step to that of the next one; `waits`: for all weights after each."""
    ends = []
    for _ in range(1 + steps):
        trainer.step(*batch)
        if waits:
            trainer.sync.settle()
        ends.append(time.perf_counter())
    trainer.sync.settle()
    return (ends[-1] - ends[0]) / steps


def forward_s(model: nn.Module, inputs: torch.Tensor) -> float:
    found = []
    for _ in range(5):
        begin = time.perf_counter()
        model(inputs)
        found.append(time.perf_counter() - begin)
    return statistics.median(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabits", type=float, default=1000.0, help="per second and direction")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--bucket-kilobytes", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=4, help="of a block")
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = GPTConfig(
        vocab_size=VOCABULARY,
        context=CONTEXT,
        num_layers=args.layers,
        hidden=args.hidden,
        heads=8,
        mlp_hidden=4 * args.hidden,
    )
    model = GPT(config)
    num_bytes = sum(one.nbytes for one in model.parameters())
    tokens = torch.randint(VOCABULARY, (args.samples, CONTEXT + 1))
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    plan = Plan(
        axes=Axes(data=1),
        data=Data(sync="server"),
        server=Server(shards=args.servers),
        comm=Comm(transport="c10d", bucket_bytes=args.bucket_kilobytes << 10),
    )
    bytes_per_s = args.megabits * 1e6 / 8
    times: dict[bool, list[float]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as folder:
        with mock.patch.object(worker_mesh, "LocalServers", relayed(Path(folder), bytes_per_s)):
            with weft.parallelize(
                model,
                plan,
                loss="cross-entropy",
                optimizer=lambda given: torch.optim.SGD(given, lr=1e-3),
                device="cpu",
            ) as trainer:
                time_of_block(trainer, batch, steps=2, waits=True)
                for _ in range(args.rounds):
                    for waits, found in times.items():
                        found.append(time_of_block(trainer, batch, steps=args.steps, waits=waits))
                hidden_s = min(num_bytes / bytes_per_s, forward_s(model, batch[0]))
    waiting_s, early_s = (statistics.median(found) for found in times.values())
    print(
        f"{num_bytes / 1e6:.1f} MB of weights, {args.megabits:g} Mbit/s, {args.servers} server(s), {os.cpu_count()} "
        f"cores, torch {torch.__version__}\n"
    )
    print("| the next forward pass begins | ms per step | ratio |\n|---|---|---|")
    print(f"| with all weights | {1e3 * waiting_s:.0f} | 1 |")
    print(f"| with the first ones | {1e3 * early_s:.0f} | {early_s / waiting_s:.2f} |")
    print(f"\nAt most {1e3 * hidden_s:.0f} ms could be hidden, {1e3 * (waiting_s - early_s):.0f} ms are.")


if __name__ == "__main__":
    main()
