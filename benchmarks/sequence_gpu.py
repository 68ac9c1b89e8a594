"""Cost of ring attention relative to flash attention on one GPU: all ranks of a ring in one process, no communication.

    python benchmarks/sequence_gpu.py [--ranks 4 8] [--tokens 32768] [--rounds N] [--where]
    python benchmarks/sequence_gpu.py --quick           # 8192 tokens

Causal attention in bf16, 16 heads of 128, forward and backward; also with 4 key heads for the 16. Plain is one call of
`F.scaled_dot_product_attention` on the whole sequence with torch's flash kernel. The ring is weft's own code, zigzag,
one thread per rank, all on one stream, and keys and values change hands without a copy. What it takes more is the
price of blocks: merging outputs, adding up gradients, packing, and kernels that run on shorter sequences; `--where`
says how the time of its kernels falls on these.

First, outputs and gradients of every kernel (flash, memory-efficient, matrix products), with and without masks, are
compared with attention in float64 by its definition. Sides alternate; times are medians, by the GPU's own clock.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from sequence_timing import FEWEST_ROUNDS, Times, median_ms, ratio, turns
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from weft.parallel.attention.masks import Pass
from weft.parallel.attention.ring import ring_backward, ring_forward
from weft.parallel.attention.ring_exchange import Ring as RingCall
from weft.plan.partition.sequence import make_places

HEADS, HEAD_DIM, FEWER_KEY_HEADS = 16, 128, 4
GOAL = 0.85
TOLERANCES = {torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.float32: 1e-4, torch.float64: 1e-11}
"""Tolerance relative to the largest entry."""
CHECKED_TOKENS = 500
"""A number of tokens that needs padding."""
CHECKED_RANKS = 4

Results = tuple[Tensor, Tensor, Tensor, Tensor]
"""(out, dq, dk, dv)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRing(RingCall):
    """One rank of a ring that is all in this process, one thread per rank: nothing is sent or copied."""

    queues: list[tuple[SimpleQueue[Tensor], SimpleQueue[Tensor]]]
    """To each rank, for each tag."""

    def pass_on(self, outgoing: Tensor, incoming: Tensor, tag: int) -> Callable[[], Tensor]:
        del incoming
        self.queues[(self.index + 1) % self.size][tag].put(outgoing)
        return self.queues[self.index][tag].get


class Ring:
    """Ring attention with all its ranks in this process."""

    def __init__(self, now: Pass, *, is_causal: bool = True) -> None:
        self._places = places = now.places
        queues: list[Any] = [(SimpleQueue(), SimpleQueue()) for _ in range(places.ring)]
        groups: list[Any] = [SimpleNamespace(index=index, size=places.ring) for index in range(places.ring)]
        scale = 1 / math.sqrt(HEAD_DIM)
        self._ranks = [
            LocalRing(group=group, now=now, is_causal=is_causal, scale=scale, queues=queues) for group in groups
        ]
        self._threads = ThreadPoolExecutor(places.ring)
        self._numbers = [
            torch.cat([torch.arange(*one) for one in places.ring_ranges(rank)]) for rank in range(places.ring)
        ]

    def cut(self, whole_BHSX: Tensor) -> list[Tensor]:
        """The tokens of every rank; the padding is zero."""
        padded = F.pad(whole_BHSX, (0, 0, 0, self._places.padded - whole_BHSX.shape[2]))
        return [padded[:, :, numbers.to(padded.device)] for numbers in self._numbers]

    def join(self, parts: list[Tensor]) -> Tensor:
        """The inverse, without the padding."""
        order = torch.cat(self._numbers).argsort().to(parts[0].device)
        return torch.cat(parts, 2)[:, :, order][:, :, : self._places.num_tokens]

    def forward(self, q: list[Tensor], k: list[Tensor], v: list[Tensor]) -> list[tuple[Tensor, ...]]:
        """(out, lse) of every rank."""
        return self._on_all(ring_forward, list(zip(q, k, v, strict=True)))

    def backward(
        self,
        grad: list[Tensor],
        q: list[Tensor],
        k: list[Tensor],
        v: list[Tensor],
        made: list[tuple[Tensor, ...]],
    ) -> list[tuple[Tensor, ...]]:
        """(dq, dk, dv) of every rank."""
        inputs = [(*some, *rest) for *some, rest in zip(grad, q, k, v, made, strict=True)]
        return self._on_all(ring_backward, inputs)

    def _on_all(self, work: Callable[..., Any], inputs: list[tuple[Tensor, ...]]) -> list[tuple[Tensor, ...]]:
        @torch.no_grad()
        def run(one: LocalRing) -> tuple[Tensor, ...]:
            made: tuple[Tensor, ...] = work(*inputs[one.index], one)
            return made

        return list(self._threads.map(run, self._ranks))


def make_tensors(num_tokens: int, num_keys: int, *, num_samples: int = 1, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and the gradient of the output."""
    torch.manual_seed(0)
    return [
        torch.randn(num_samples, heads, num_tokens, HEAD_DIM, device="cuda").to(dtype)
        for heads in (HEADS, num_keys, num_keys, HEADS)
    ]


def by_definition(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, allowed_B1SS: Tensor) -> Results:
    """Outputs and gradients in float64; a query whose keys are all masked has output 0."""
    leaves = [one.double().requires_grad_() for one in (q, k, v)]
    repeats = q.shape[1] // k.shape[1]
    wide_q, wide_k, wide_v = leaves[0], *(one.repeat_interleave(repeats, 1) for one in leaves[1:])
    scores = (wide_q @ wide_k.mT / math.sqrt(HEAD_DIM)).masked_fill(~allowed_B1SS, -1e300)
    shares = scores.softmax(-1) * allowed_B1SS.any(-1, keepdim=True)
    out = shares @ wide_v
    dq, dk, dv = torch.autograd.grad(out, leaves, grad.double())
    return out.detach(), dq, dk, dv


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A kind of attention to check."""

    dtype: torch.dtype
    num_keys: int
    is_causal: bool
    mask: str
    """none | keys | documents."""

    def __str__(self) -> str:
        kind = "causal" if self.is_causal else "full"
        return f"{str(self.dtype).removeprefix('torch.')}, {kind}, {self.num_keys} key heads, mask: {self.mask}"


def check(case: Case) -> float:
    """Largest error of a case, relative to the largest entry."""
    tensors = make_tensors(CHECKED_TOKENS, case.num_keys, num_samples=2, dtype=case.dtype)
    places = make_places(CHECKED_TOKENS, ring=CHECKED_RANKS, ulysses=1, layout="zigzag")
    numbers = torch.arange(places.padded, device="cuda").expand(2, -1)
    keys = numbers % 7 != 0 if case.mask == "keys" else None  # causal: the first query has no keys
    documents = numbers // 111 if case.mask == "documents" else None
    square = torch.ones(CHECKED_TOKENS, CHECKED_TOKENS, dtype=torch.bool, device="cuda")
    allowed = (square.tril() if case.is_causal else square).expand(2, 1, -1, -1)
    if keys is not None:
        allowed = allowed & keys[:, None, None, :CHECKED_TOKENS]
    if documents is not None:
        own = documents[:, :CHECKED_TOKENS]
        allowed = allowed & (own[:, None, :, None] == own[:, None, None, :])
    ring = Ring(Pass(places=places, key_mask_BS=keys, documents_BS=documents), is_causal=case.is_causal)
    q, k, v, grad = (ring.cut(one) for one in tensors)
    made = ring.forward(q, k, v)
    gradients = ring.backward(grad, q, k, v, made)
    got = [ring.join([part[0] for part in made])]
    got += [ring.join([part[number] for part in gradients]) for number in range(3)]
    wanted = by_definition(*tensors, allowed)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(got, wanted, strict=True))


def check_all() -> Iterator[str]:
    worst: dict[torch.dtype, tuple[float, str]] = {}
    problems = []
    for dtype, tolerance in TOLERANCES.items():
        for num_keys in (HEADS, FEWER_KEY_HEADS):
            for is_causal in (True, False):
                for mask in ("none", "keys", "documents"):
                    case = Case(dtype=dtype, num_keys=num_keys, is_causal=is_causal, mask=mask)
                    error = check(case)
                    worst[dtype] = max(worst.get(dtype, (0.0, "")), (error, str(case)))
                    if not error < tolerance:
                        problems.append(f"{case}: wrong by {error:.1e} of the largest entry, more than {tolerance:.0e}")
    if problems:
        raise RuntimeError(
            "\n".join(["ring attention does not compute the same as attention by definition", *problems])
        )
    for error, case in worst.values():
        yield f"largest error {error:.1e} of the largest entry: {case}"


def time_in_turn(sides: dict[str, Callable[[], Any]], num_rounds: int) -> Times:
    """Seconds by the GPU's clock."""
    times: Times = {name: [] for name in sides}
    for name in turns(tuple(sides), num_rounds):
        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        started.record()
        sides[name]()
        ended.record()
        ended.synchronize()
        times[name].append(started.elapsed_time(ended) / 1e3)
    return times


def plain_sides(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> dict[str, Callable[[], Any]]:
    attention = functools.partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    leaves = [one.detach().requires_grad_() for one in (q, k, v)]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = attention(*leaves)

    def forward() -> None:
        with torch.no_grad(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            attention(q, k, v)

    return {
        "plain forward": forward,
        "plain backward": lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True),
    }


def ring_sides(ring: Ring, tensors: list[Tensor]) -> dict[str, Callable[[], Any]]:
    q, k, v, grad = (ring.cut(one) for one in tensors)
    made = ring.forward(q, k, v)
    return {"forward": lambda: ring.forward(q, k, v), "backward": lambda: ring.backward(grad, q, k, v, made)}


def compare(num_keys: int, args: argparse.Namespace) -> Iterator[str]:
    tensors = make_tensors(args.tokens, num_keys, dtype=torch.bfloat16)
    sides = plain_sides(*tensors)
    for count in args.ranks:
        ring = Ring(Pass(places=make_places(args.tokens, ring=count, ulysses=1, layout="zigzag")))
        sides |= {f"{count} {name}": run for name, run in ring_sides(ring, tensors).items()}
    time_in_turn(sides, 2)
    times = time_in_turn(sides, args.rounds)
    for who in ("plain", *map(str, args.ranks)):
        both = zip(times[f"{who} forward"], times[f"{who} backward"], strict=True)
        times[f"{who} both"] = [forward + backward for forward, backward in both]
    yield f"\n{args.tokens} tokens, {HEADS} heads of {HEAD_DIM}, {num_keys} key heads, bf16, causal"
    yield f"{'pass':>10s} {'plain, ms':>10s} {'ranks':>6s} {'ring, ms':>9s} {'share of plain speed (95 %)':>28s}"
    for what in ("forward", "backward", "both"):
        for count in args.ranks:
            share = ratio(times, f"plain {what}", f"{count} {what}")
            plain_ms, ring_ms = median_ms(times, f"plain {what}"), median_ms(times, f"{count} {what}")
            yield f"{what:>10s} {plain_ms:10.2f} {count:6d} {ring_ms:9.2f} {share:>28s}"
    if args.where:
        for name, run in sides.items():
            yield from where_time_goes(name, run)


def where_time_goes(name: str, run: Callable[[], Any]) -> Iterator[str]:
    """Kernels of one pass by their time."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        run()
        torch.cuda.synchronize()
    kernels = [one for one in profiled.key_averages() if one.self_device_time_total > 0]
    total_us = sum(one.self_device_time_total for one in kernels)
    yield f"\n{name}: {total_us / 1e3:.2f} ms in kernels"
    for one in sorted(kernels, key=lambda one: -one.self_device_time_total)[:8]:
        yield f"{one.self_device_time_total / 1e3:9.2f} ms {one.count:5d} x  {one.key[:90]}"


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8], help="of the ring (4 8)")
    parser.add_argument("--tokens", type=int, default=32768, help="of the sequence (32768)")
    parser.add_argument("--rounds", type=int, default=20, help="turns of each side (20)")
    parser.add_argument("--where", action="store_true", help="list the slowest kernels")
    parser.add_argument("--quick", action="store_true", help="8192 tokens, 6 rounds")
    args = parser.parse_args()
    if args.quick:
        args.tokens, args.rounds = 8192, FEWEST_ROUNDS
    problems = [f"--ranks {count} is no ring; give 2 or more" for count in args.ranks if count < 2]
    problems += [
        f"{args.tokens} tokens cannot be cut into {2 * count} equal chunks, and padding would be work that plain "
        "attention has not"
        for count in args.ranks
        if count > 1 and args.tokens % (2 * count)
    ]
    if args.rounds < FEWEST_ROUNDS:
        problems.append(f"--rounds {args.rounds} give no 95 % interval; use {FEWEST_ROUNDS} or more")
    if problems:
        parser.error("; ".join(problems))
    return args


def main() -> None:
    args = read_arguments()
    if not torch.cuda.is_available():
        sys.exit("no GPU here; this benchmark is about CUDA's attention kernels")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; medians of {args.rounds} rounds")
    for line in check_all():
        print(line, flush=True)
    for num_keys in (HEADS, FEWER_KEY_HEADS):
        for line in compare(num_keys, args):
            print(line, flush=True)
    print(f"goal: {GOAL:.2f} of plain speed, both passes")


if __name__ == "__main__":
    main()
