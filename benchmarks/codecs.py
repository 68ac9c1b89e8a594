"""Codecs on a CPU: encoding and decoding, against the usual implementations in torch, in one run.

    python benchmarks/codecs.py [--sizes 1M 25M 100M] [--rounds 9] [--threads 1] [--codecs dgc powersgd ...]
    python benchmarks/codecs.py --sizes 1M --rounds 3        # to try it

The gradients are those of transformer blocks (matrices of hidden size 288 or 1024, normal numbers), in buckets of
25 MiB. Every codec encodes each bucket and decodes two replicas' messages of it; nothing is sent. Rivals:

- dgc: momentum and accumulation in place, torch.topk of |v| per tensor, values gathered, both buffers cleared by index;
  decoding adds two replicas' values by index. Same density, no warm-up. weft's keeps, besides, the state before, so
  that a step can be skipped.
- powersgd: torch's own DDP hook on the same buckets, in a group of one rank, its future waited for; with its defaults,
  and with matrices batched by shape. Same rank, feedback and warm start.

Sides take turns, in an order that changes every round. The table has the median of each side, the bytes of the dense
gradients over that time, and the median over rounds of the rival's time divided by weft's, with the 95 % interval of
that median.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from data_parallel import interval
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from weft.measure.codecs import MEASURED, MOMENTUM, TimedExchange
from weft.plan.partition.wire import Member, assign_buckets
from weft.plan.plan import Codec, Comm
from weft.planning.compression import describe

Shape = tuple[int, int]
Side = Callable[[], float]
"""One exchange of all buckets; returns its seconds."""

MODELS = {"1M": (288, 1), "25M": (1024, 2), "100M": (1024, 8)}
"""Hidden size and number of transformer blocks, by the elements they have."""
CPU = torch.device("cpu")
NUM_REPLICAS = 2


def shapes_of(size: str) -> list[Shape]:
    hidden, num_blocks = MODELS[size]
    block = [(3 * hidden, hidden), (hidden, hidden), (4 * hidden, hidden), (hidden, 4 * hidden)]
    return block * num_blocks


def buckets_of(size: str) -> list[list[Shape]]:
    shapes = shapes_of(size)
    members = [Member(numel=rows * columns, item_bytes=4) for rows, columns in shapes]
    return [[shapes[place] for place in bucket] for bucket in assign_buckets(members, Comm().bucket_bytes)]


def weft_side(section: Codec, size: str) -> Side:
    exchanges = [TimedExchange(section, [*bucket], CPU, num_replicas=NUM_REPLICAS) for bucket in buckets_of(size)]
    return lambda: sum(exchange.seconds() for exchange in exchanges)


def given_values(bucket: list[Shape]) -> torch.Tensor:
    numel = sum(rows * columns for rows, columns in bucket)
    return torch.randn(numel, generator=torch.Generator().manual_seed(0))


class TopkDgc:
    """DGC as it is usually written, on one bucket."""

    def __init__(self, section: Codec, bucket: list[Shape]) -> None:
        self._density, self._momentum = section.density, MOMENTUM[0]
        self._given = given_values(bucket)
        self._values = torch.empty_like(self._given)
        self._sizes = [rows * columns for rows, columns in bucket]
        self._u = [torch.zeros(numel) for numel in self._sizes]
        self._v = [torch.zeros(numel) for numel in self._sizes]

    def seconds(self) -> float:
        self._values.copy_(self._given)
        started = time.perf_counter()
        for gradient, u, v in zip(self._values.split(self._sizes), self._u, self._v, strict=True):
            u.mul_(self._momentum).add_(gradient)
            v.add_(u)
            _, index = torch.topk(v.abs(), max(1, int(self._density * v.numel() + 0.5)), sorted=False)
            values = v[index]
            v[index] = 0
            u[index] = 0
            gradient.zero_()
            for _ in range(NUM_REPLICAS):
                gradient.index_add_(0, index, values)
        return time.perf_counter() - started


def topk_dgc_side(section: Codec, size: str) -> Side:
    buckets = [TopkDgc(section, bucket) for bucket in buckets_of(size)]
    return lambda: sum(bucket.seconds() for bucket in buckets)


class HookBucket:
    """What the hook asks of DDP's bucket."""

    def __init__(self, index: int, bucket: list[Shape], *, is_last: bool) -> None:
        self.given = given_values(bucket)
        self.values = torch.empty_like(self.given)
        sizes = [rows * columns for rows, columns in bucket]
        self._gradients = [part.view(shape) for part, shape in zip(self.values.split(sizes), bucket, strict=True)]
        self._index, self._is_last = index, is_last

    def buffer(self) -> torch.Tensor:
        return self.values

    def gradients(self) -> list[torch.Tensor]:
        return self._gradients

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._is_last


def hook_side(section: Codec, size: str, *, batched: bool) -> Side:
    shapes = buckets_of(size)
    buckets: list[Any] = [HookBucket(index, one, is_last=index == len(shapes) - 1) for index, one in enumerate(shapes)]
    state = PowerSGDState(
        process_group=None,
        matrix_approximation_rank=section.rank,
        start_powerSGD_iter=2,
        batch_tensors_with_same_shape=batched,
    )
    state.iter = state.start_powerSGD_iter  # past its dense steps

    def exchange() -> float:
        for bucket in buckets:
            bucket.values.copy_(bucket.given)
        started = time.perf_counter()
        for bucket in buckets:
            powerSGD_hook(state, bucket).wait()
        return time.perf_counter() - started

    return exchange


def rivals_of(section: Codec, size: str) -> dict[str, Side]:
    match section.name:
        case "dgc":
            return {"torch.topk": topk_dgc_side(section, size)}
        case "powersgd":
            return {
                "torch's hook": hook_side(section, size, batched=False),
                "torch's hook, batched": hook_side(section, size, batched=True),
            }
        case _:
            return {}


def run(section: Codec, size: str, rounds: int) -> None:
    sides = {"weft": weft_side(section, size), **rivals_of(section, size)}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(-2, rounds):
        turn = number % len(sides)
        for name in [*list(sides)[turn:], *list(sides)[:turn]]:
            taken_s = sides[name]()
            if number >= 0:  # the first two warm up
                times[name].append(taken_s)
    num_bytes = 4 * sum(rows * columns for rows, columns in shapes_of(size))
    for name, taken in times.items():
        median_s, told = statistics.median(taken), ""
        if name != "weft":
            ratios = [theirs / mine for theirs, mine in zip(taken, times["weft"], strict=True)]
            low, high = interval(ratios)
            told = f"{statistics.median(ratios):8.2f} ({low:.2f} to {high:.2f})"
        rate = num_bytes / median_s / 1e9
        print(f"{size:>5s} {describe(section):18s} {name:22s} {1e3 * median_s:10.2f} {rate:8.2f} {told}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(dict.fromkeys(section.name for section in MEASURED))
    parser.add_argument("--sizes", nargs="+", choices=list(MODELS), default=list(MODELS), help="(all)")
    parser.add_argument("--rounds", type=int, default=9, help="timed exchanges of each side (9)")
    parser.add_argument("--threads", type=int, default=1, help="(1, as a rank has)")
    parser.add_argument("--codecs", nargs="+", choices=names, default=names, help="(all)")
    args = parser.parse_args()
    if os.environ.get("OMP_NUM_THREADS") != str(args.threads):
        # The hook computes in gloo's threads, whose number of threads only the environment decides.
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "OMP_NUM_THREADS": str(args.threads)})
    torch.set_num_threads(args.threads)
    print(
        f"torch {torch.__version__}, {args.threads} thread(s); medians of {args.rounds} rounds, {NUM_REPLICAS} replicas"
    )
    print(f"{'':5s} {'codec':18s} {'side':22s} {'ms':>10s} {'GB/s':>8s} {'this / weft':>11s}")
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        for size in args.sizes:
            for section in MEASURED:
                if section.name in args.codecs:
                    run(section, size, args.rounds)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
