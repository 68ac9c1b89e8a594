"""Tensor parallelism: weft's step against DTensor's, a split by hand, and weft over sockets, in one run.

    python benchmarks/tensor.py [--ranks 2 4] [--sizes small middle] [--modes eager compiled] [--rounds N]
    python benchmarks/tensor.py --quick              # 2 ranks, the small model, eager: half a minute

Each side runs a whole training step (forward, cross-entropy, backward, fused AdamW) of the same Llama, weights and
batch. torch's side is `parallelize_module` with its column and row styles, in three forms: logits gathered, logits
sharded (`loss_parallel`), and norms on a part of the sequence (SequenceParallel); weft is compared with the fastest of
a table. "By hand" is the minimum for this one model, over gloo's `all_reduce`, eager only. Compiled: `torch.compile` of
each block, and of a loss that is not split.

Ranks are gloo processes of one thread. Sides alternate, in an order that rotates every round; a barrier precedes each
step, and the slowest rank counts. Losses of every side are compared with one process's before anything is timed. "No
update" excludes the optimizer's step. Ratios are medians over rounds with the 95 % interval of that median (order
statistics).
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from tensor_by_hand import hand_side
from tensor_sides import SIZES, Batch, Side, Size, check, make_batch, torch_side, weft_side
from torch.multiprocessing.spawn import start_processes

RIVALS: dict[str, Callable[..., Side]] = {
    "DTensor": functools.partial(torch_side, split_loss=False),
    "DTensor, loss split": torch_side,
    "DTensor, sequence": functools.partial(torch_side, split_loss=False, sequence=True),
}
OURS: dict[str, Callable[..., Side]] = {
    "weft": weft_side,
    "weft, sockets": functools.partial(weft_side, transport="c10d"),
    "weft, sequence": functools.partial(weft_side, sequence=True),
}
MODES = ("eager", "compiled")
COMPILED_GOAL = 1.0

Times = dict[str, list[float]]
"""Seconds by round, for each side."""


class Stopwatch:
    """Times a side's steps and the optimizer's part of them."""

    def __init__(self, side: Side) -> None:
        self._step, self._update_s, self._since = side.step, 0.0, 0.0
        side.optimizer.register_step_pre_hook(self._begin)
        side.optimizer.register_step_post_hook(self._end)

    def _begin(self, *_: object) -> None:
        self._since = time.perf_counter()

    def _end(self, *_: object) -> None:
        self._update_s += time.perf_counter() - self._since

    def time(self, batch: Batch) -> tuple[float, float]:
        """Seconds of a step, with and without the update."""
        self._update_s = 0.0
        started = time.perf_counter()
        self._step(*batch)
        step_s = time.perf_counter() - started
        return step_s, step_s - self._update_s


def time_in_turn(watches: dict[str, Stopwatch], batch: Batch, *, num_rounds: int, repeats: int) -> tuple[Times, Times]:
    """Seconds of each side on the slowest rank, by round: the whole step, then without the update."""
    names = tuple(watches)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for number in range(num_rounds):
        turn = number % len(names)
        for name in (*names[turn:], *names[:turn]):
            for _ in range(repeats):
                dist.barrier()
                times[name].append(watches[name].time(batch))
    slowest = torch.tensor([times[name] for name in names], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    by_round = slowest.view(len(names), num_rounds, repeats, 2).mean(2)
    whole, rest = (dict(zip(names, by_round[..., part].tolist(), strict=True)) for part in range(2))
    return whole, rest


def ratio(times: Times, numerator: str, denominator: str) -> str:
    """The median over rounds of one side's time over another's, with the 95 % interval of that median."""
    ordered = sorted(a / b for a, b in zip(times[numerator], times[denominator], strict=True))
    count, half = len(ordered), math.ceil(0.98 * math.sqrt(len(ordered)))
    low, high = ordered[max(count // 2 - half, 0)], ordered[min(count // 2 + half, count - 1)]
    return f"{statistics.median(ordered):.2f} ({low:.2f} to {high:.2f})"


def make_sides(size: Size, *, compiled: bool) -> dict[str, Side]:
    sides = {name: make(size, compiled=compiled) for name, make in (RIVALS | OURS).items()}
    if not compiled:
        sides["by hand"] = hand_side(size)
    for name, side in sides.items():
        check(name, side, size)
    return sides


def compare(size_name: str, mode: str, num_rounds: int) -> Iterator[str]:
    size, is_compiled = SIZES[size_name], mode == "compiled"
    batch = make_batch(size)
    watches = {name: Stopwatch(side) for name, side in make_sides(size, compiled=is_compiled).items()}
    time_in_turn(watches, batch, num_rounds=2, repeats=size.steps)
    whole, rest = time_in_turn(watches, batch, num_rounds=num_rounds, repeats=size.steps)
    best = min(RIVALS, key=lambda name: statistics.median(whole[name]))
    yield f"\n{dist.get_world_size()} ranks, {size_name} model, {mode}"
    yield (
        f"{'side':>20s} {'step, ms':>9s} {'no update':>10s}"
        f" {'fastest torch / side (95 %)':>28s} {'the same, no update':>24s}"
    )
    for name in watches:
        step_ms, rest_ms = (1e3 * statistics.median(times[name]) for times in (whole, rest))
        ratios = f"{ratio(whole, best, name):>28s} {ratio(rest, best, name):>24s}"
        yield f"{name:>20s} {step_ms:9.2f} {rest_ms:10.2f} {ratios if name != best else '1':>28s}"
    goal = COMPILED_GOAL if is_compiled else size.goal
    yield f"{best} / weft: {ratio(whole, best, 'weft')}; goal: {goal:.1f}"


def run_rank(rank: int, num_ranks: int, folder: str, size_name: str, mode: str, num_rounds: int) -> None:
    torch.set_num_threads(1)
    # All sides run the code of one block, so one side's compiled code must neither evict the next one's nor make its
    # shapes dynamic.
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.automatic_dynamic_shapes = False
    store = dist.FileStore(f"{folder}/store", num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    for line in compare(size_name, mode, num_rounds):
        if rank == 0:
            print(line, flush=True)
    dist.barrier()
    dist.destroy_process_group()


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--rounds", type=int, default=20, help="turns of each side (20)")
    parser.add_argument("--quick", action="store_true", help="2 ranks, the small model, eager, 6 rounds")
    args = parser.parse_args()
    if args.quick:
        args.ranks, args.sizes, args.modes, args.rounds = [2], ["small"], ["eager"], 6
    kv_heads = min(SIZES[name].kv_heads for name in args.sizes)
    problems = [
        f"--ranks {count} cannot share {kv_heads} key heads out evenly, as torch must; give 2 or {kv_heads}"
        for count in args.ranks
        if count < 2 or kv_heads % count
    ]
    if args.rounds < 6:
        problems.append(f"--rounds {args.rounds} give no 95 % interval; use 6 or more")
    if problems:
        parser.error("; ".join(problems))
    return args


def main() -> None:
    args = read_arguments()
    print(f"gloo on the CPU, one thread per rank, torch {torch.__version__}; medians of {args.rounds} rounds")
    for num_ranks in args.ranks:
        for mode in args.modes:
            for size_name in args.sizes:
                with tempfile.TemporaryDirectory() as folder:  # new processes: no compiled code is shared
                    given = (num_ranks, folder, size_name, mode, args.rounds)
                    start_processes(run_rank, args=given, nprocs=num_ranks, start_method="spawn")


if __name__ == "__main__":
    main()
