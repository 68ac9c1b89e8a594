"""Memory and sequence length: a rank's peak falls as 1 / ranks, and the longest sequence grows with them.

    python benchmarks/sequence_memory.py [--ranks 1 2 4] [--lengths 1024 2048 4096] [--memory-mib 128]
    python benchmarks/sequence_memory.py --quick        # 1 and 2 ranks, a ring, shorter sequences

Steps of a GPT of 12 blocks, 64 wide, on one sequence, in new processes for every split. "Counted" is the peak of the
tensors made in a step, and its growth per token from half the length; the rest of it is gradients of weights, which
splitting a sequence does not reduce. "Measured" is the rise of the process's proportional set size; glibc returns freed
blocks at once (benchmarks/memory.py). Messages go through sockets, so that all memory belongs to one rank and can be
limited.

Then the longest sequence is found by trial: after short steps, each rank may allocate `--memory-mib` more (RLIMIT_DATA)
and trains on one long sequence, or runs out of memory. A ring needs memory for blocks in flight, but only of one layer
at a time. Linux and glibc only.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import multiprocessing
import os
import re
import resource
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from memory import trim_malloc
from process_memory import PeakPss, read_pss_bytes
from sequence_sides import adamw, make_batch, make_model, sequence_plan

import weft
from weft.measure.liveness import LiveBytes
from weft.models.gpt import GPTConfig
from weft.plan.plan import Plan
from weft.units import format_bytes

SIZES = GPTConfig(vocab_size=64, num_layers=12, hidden=64, heads=4)
SHORT_PER_RANK = 8
"""Tokens of the steps that are not measured."""
GRAIN = 0.03
"""Relative precision of the longest sequence."""
REFUSALS = "can't allocate memory|not enough memory"
TIMEOUT_S, GRACE_S = 600.0, 5.0


def make_plans(num_ranks: int) -> dict[str, Plan]:
    """The ways to split a sequence over this number of ranks."""
    if num_ranks == 1:
        return {"whole": Plan()}
    axes = {"ring": {"ring": num_ranks}, "ulysses": {"ulysses": num_ranks}}
    if num_ranks >= 4:
        axes["ulysses 2 x ring"] = {"ulysses": 2, "ring": num_ranks // 2}
    return {name: sequence_plan(**sizes, transport="c10d") for name, sizes in axes.items()}


def chosen_plans(num_ranks: int, splits: list[str]) -> dict[str, Plan]:
    return {name: plan for name, plan in make_plans(num_ranks).items() if name in ("whole", *splits)}


def make_step(plan: Plan, num_tokens: int) -> Callable[[int], None]:
    """A step on a sequence up to this length; persistent gradient buffers are already allocated."""
    model = make_model(replace(SIZES, context=num_tokens))
    short = SHORT_PER_RANK * plan.axes.num_ranks
    example = make_batch(replace(SIZES, context=short))[0]
    trainer = weft.parallelize(model, plan, loss="cross-entropy", optimizer=adamw, example=example, device="cpu")

    def step(length: int) -> None:
        float(trainer.step(*make_batch(replace(SIZES, context=length))))

    for _ in range(2):
        step(short)
    return step


def count_peak_bytes(step: Callable[[], None]) -> int:
    """Peak of the tensors made in a step."""
    gc.collect()
    others = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter)]
    with LiveBytes(others=others, made=lambda *_: None) as live:
        step()
    return live.peak_bytes


def measure_peak_bytes(step: Callable[[], None]) -> int:
    """Peak of the process."""
    gc.collect()
    before = read_pss_bytes()
    with PeakPss(every_s=0.005) as watched:
        step()
    return watched.peak_bytes - before


def find_peaks(plan: Plan, lengths: list[int]) -> list[tuple[float, float, float]]:
    """(counted bytes, bytes per further token, measured bytes) of this rank for every length."""
    step = make_step(plan, max(lengths))
    peaks = []
    for length in lengths:
        half, whole = (count_peak_bytes(functools.partial(step, tokens)) for tokens in (length // 2, length))
        if dist.is_initialized():
            dist.barrier()
        peaks.append((whole, (whole - half) / (length - length // 2), measure_peak_bytes(lambda: step(length))))  # noqa: B023
    return peaks


def limit_memory(more_bytes: int) -> None:
    """Limit this process to allocating this much more than it has now."""
    found = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    allowed = int(found[1]) * 1024 + more_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (allowed, allowed))


def try_length(plan: Plan, num_tokens: int, memory_bytes: int) -> bool:
    """True if a step on a sequence of this length has enough memory on this rank."""
    step = make_step(plan, num_tokens)
    gc.collect()
    if dist.is_initialized():
        dist.barrier()
    limit_memory(memory_bytes)
    try:
        step(num_tokens)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryError) or re.search(REFUSALS, str(error)):
            return False
        time.sleep(GRACE_S)  # another rank ran out of memory; this process will soon be terminated
        raise
    return True


def run_rank(rank: int, num_ranks: int, folder: str, work: Callable[..., Any], given: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    trim_malloc()
    if num_ranks > 1:
        store = dist.FileStore(f"{folder}/store", num_ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    result = work(*given)
    Path(folder, f"{rank}.part").write_text(json.dumps(result))
    Path(folder, f"{rank}.part").rename(Path(folder, str(rank)))
    os._exit(0)  # other ranks may have no memory left to shut down


def run(plan: Plan, work: Callable[..., Any], *given: Any) -> list[Any]:
    """Results of all ranks, or the first False alone."""
    context, num_ranks = multiprocessing.get_context("spawn"), plan.axes.num_ranks
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=run_rank, args=(rank, num_ranks, folder, work, (plan, *given)), daemon=True)
            for rank in range(num_ranks)
        ]
        for process in ranks:
            process.start()
        try:
            return _collect(ranks, Path(folder))
        finally:
            for process in ranks:
                process.kill()
                process.join()


def _collect(ranks: list[Any], folder: Path) -> list[Any]:
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        has_ended = [not process.is_alive() for process in ranks]  # before reading their results
        files = [folder / str(rank) for rank in range(len(ranks))]
        results = [json.loads(file.read_text()) for file in files if file.exists()]
        if False in results:
            return [False]
        if len(results) == len(ranks):
            return results
        for rank, (process, file) in enumerate(zip(ranks, files, strict=True)):
            if has_ended[rank] and not file.exists():
                raise RuntimeError(f"rank {rank} ended with {process.exitcode} and no result; its error is above")
        time.sleep(0.05)
    raise RuntimeError(f"no result within {TIMEOUT_S:.0f} s")


@dataclass(slots=True)
class Search:
    """Search for the longest length that fits, from an estimate: doubling strides, then bisection."""

    fits: Callable[[int], bool]
    unit: int
    """Lengths are multiples of this."""

    def longest(self, estimate: int) -> int:
        low, high, length, stride = 0, 0, self._round(estimate), GRAIN
        while not (low and high and high - low <= max(GRAIN * low, self.unit)):
            if self.fits(length):
                low = length
            else:
                high = length
            if low and high:
                length = self._round((low + high) // 2)
                if length in (low, high):
                    break
            else:
                length = self._round(int(length * (1 + stride if low else 1 - stride)))
                stride = min(2 * stride, 0.5)
        return low

    def _round(self, length: int) -> int:
        return max(length // self.unit, 1) * self.unit


def print_peaks(args: argparse.Namespace) -> dict[tuple[int, str], float]:
    """Print a table of peaks; returns counted bytes per token."""
    print(
        f"{'ranks':>5s} {'split':>17s} {'tokens':>7s} {'counted':>10s} {'per token':>10s} {'whole / it':>10s}"
        f" {'measured':>10s}"
    )
    wholes: dict[int, float] = {}
    slopes = {}
    for num_ranks in args.ranks:
        for name, plan in chosen_plans(num_ranks, args.splits).items():
            of_ranks = run(plan, find_peaks, args.lengths)
            for length, peaks in zip(args.lengths, zip(*of_ranks, strict=True), strict=True):
                counted, slope, measured = map(max, zip(*peaks, strict=True))
                wholes.setdefault(length, slope)
                print(
                    f"{num_ranks:5d} {name:>17s} {length:7d} {format_bytes(counted):>10s} {format_bytes(slope):>10s} "
                    f"{wholes[length] / slope:10.2f} {format_bytes(measured):>10s}",
                    flush=True,
                )
                slopes[num_ranks, name] = slope
    return slopes


def print_longest(args: argparse.Namespace, slopes: dict[tuple[int, str], float]) -> None:
    memory_bytes = args.memory_mib << 20
    print(f"\nthe longest sequence in {format_bytes(memory_bytes)} per rank, within {GRAIN:.0%}")
    print(f"{'ranks':>5s} {'split':>17s} {'tokens':>7s} {'it / whole':>10s}")
    whole = 0
    for num_ranks in args.ranks:
        for name, plan in chosen_plans(num_ranks, args.splits).items():
            search = Search(
                fits=lambda length: all(run(plan, try_length, length, memory_bytes)),  # noqa: B023
                unit=8 * num_ranks,
            )
            found = search.longest(int(memory_bytes / slopes[num_ranks, name]))
            whole = whole or found
            print(f"{num_ranks:5d} {name:>17s} {found:7d} {found / whole:10.2f}", flush=True)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    splits = list(make_plans(4))
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="1 first, to compare with (1 2 4)")
    parser.add_argument("--splits", nargs="+", choices=splits, default=splits)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096], help="tokens (1024 2048 4096)")
    parser.add_argument("--memory-mib", type=int, default=128, help="per rank, for the longest sequence (128)")
    parser.add_argument("--quick", action="store_true", help="1 and 2 ranks, a ring, 1024 tokens, 64 MiB")
    args = parser.parse_args()
    if args.quick:
        args.ranks, args.splits, args.lengths, args.memory_mib = [1, 2], ["ring"], [1024], 64
    problems = [
        f"--ranks {count}: give 1, or even numbers" for count in args.ranks if count != 1 and (count < 2 or count % 2)
    ]
    if args.ranks[0] != 1:
        problems.append(f"--ranks begins with {args.ranks[0]}; the first must be 1, which others are compared with")
    problems += [
        f"--lengths {length}: half of it is less than one token per rank"
        for length in args.lengths
        if length // 2 < max(args.ranks)
    ]
    if problems:
        parser.error("; ".join(problems))
    return args


def main() -> None:
    args = read_arguments()
    with torch.device("meta"):
        numel = sum(one.numel() for one in make_model(replace(SIZES, context=1)).parameters())
    print(f"GPT of {numel / 1e6:.1f} M parameters, one sample, float32, gloo on the CPU, torch {torch.__version__}")
    print_longest(args, print_peaks(args))


if __name__ == "__main__":
    main()
