"""Whole training steps with every codec on slow lines, against DDP and its hooks, in one run per bandwidth.

    python benchmarks/codecs_lab.py [--bandwidth 100Mbit 1Gbit] [--delay 0.2ms] [--hosts 4] [--seconds 100]
    python benchmarks/codecs_lab.py --tiny                   # a small model and few steps, to try it

Emulated hosts of one rank each (docs/lab.md; it needs root), a GPT of 4.8 M parameters on few tokens, so that the
exchange decides, SGD with momentum. torch's sides are DistributedDataParallel without and with the fp16 hook and the
PowerSGD hook of rank 4, whose future is waited for inside the hook: with several buckets it does not survive otherwise.
All sides have torch's bucket size of 25 MiB. weft's codecs have no warm-up here. "No exchange" is what is left to gain.

Sides take turns, one step each, in an order that rotates every round, as long as there is time; the first two rounds
warm up. A step lasts from a barrier until the slowest rank has the loss and the new weights. The table has the median
step; bytes per step that crossed from the first host to the others, headers included, as the switch counted them; the
compression, which is DDP's bytes over these; and the median over rounds of DDP's step divided by this one.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import weft
from weft.lab.counters import read_counters
from weft.measure.codecs import MEASURED
from weft.models.gpt import GPT, GPTConfig
from weft.plan.plan import Axes, Plan, Precision
from weft.planning.compression import describe
from weft.units import format_bytes
from weft.world import join_world, leave_world

Batch = tuple[torch.Tensor, torch.Tensor]
Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

RANK = 4
"""Of PowerSGD, on both sides."""
NUM_WARM_UP_ROUNDS = 2
SGD = functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9)


def make_model(*, tiny: bool) -> GPT:
    torch.manual_seed(0)
    hidden, num_layers = (64, 2) if tiny else (256, 6)
    return GPT(GPTConfig(vocab_size=256, context=64, num_layers=num_layers, hidden=hidden, heads=4))


def make_batch(rank: int) -> Batch:
    tokens = torch.randint(0, 256, (1, 65), generator=torch.Generator().manual_seed(rank))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


# DDP refuses annotations that are not the classes themselves, and here they are text.
def waited_power_sgd_hook(state, bucket):  # type: ignore[no-untyped-def]
    """Buckets one after the other: the hook starts collectives from callbacks, in an order that differs by rank."""
    pending = powerSGD_hook(state, bucket)
    pending.wait()
    return pending


def torch_side(hook: str | None, *, tiny: bool) -> Step:
    """DDP with this hook, or none (""); None: the model by itself."""
    model = make_model(tiny=tiny) if hook is None else DistributedDataParallel(make_model(tiny=tiny))
    if hook == "fp16":
        model.register_comm_hook(None, fp16_compress_hook)
    elif hook == "powersgd":
        state = PowerSGDState(process_group=None, matrix_approximation_rank=RANK, start_powerSGD_iter=2)
        model.register_comm_hook(state, waited_power_sgd_hook)
    optimizer = SGD(model.parameters())

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def weft_side(plan: Plan, *, tiny: bool) -> Step:
    return weft.parallelize(
        make_model(tiny=tiny),
        plan,
        loss="cross-entropy",
        optimizer=SGD,
        device="cpu",
    ).step


def make_sides(num_ranks: int, *, tiny: bool) -> dict[str, Step]:
    """By name; all ranks make them in this order."""
    sides = {
        "no exchange": torch_side(None, tiny=tiny),
        "DDP": torch_side("", tiny=tiny),
        "DDP, fp16 hook": torch_side("fp16", tiny=tiny),
        f"DDP, PowerSGD hook, rank {RANK}": torch_side("powersgd", tiny=tiny),
    }
    dense = Plan(axes=Axes(data=num_ranks))
    plans = {"weft": dense, "weft, reduced in bf16": replace(dense, precision=Precision(reduce="bf16"))}
    plans |= {f"weft {describe(one)}": replace(dense, codec=one) for one in MEASURED if one.name != "half"}
    return sides | {name: weft_side(plan, tiny=tiny) for name, plan in plans.items()}


def sent_bytes() -> int:
    """Bytes that the first host has sent so far."""
    return sum(pair.bytes for (source, _), pair in read_counters().items() if source == 0)


def time_step(step: Step, batch: Batch) -> tuple[float, int]:
    """Seconds of a step on the slowest rank, and the bytes that the first host sent in it."""
    dist.barrier()
    before, started = sent_bytes(), time.perf_counter()
    float(step(*batch))
    taken = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return taken.item(), sent_bytes() - before


def is_time_up(began: float, seconds: float) -> bool:
    """The same answer on all ranks."""
    spent = torch.tensor(time.perf_counter() - began)
    dist.all_reduce(spent, op=dist.ReduceOp.MAX)
    return spent.item() > seconds


def run_rank(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    world = join_world("cpu")
    batch = make_batch(world.rank)
    sides = make_sides(world.size, tiny=args.tiny)
    steps: dict[str, list[tuple[float, int]]] = {name: [] for name in sides}
    began, number, names = time.perf_counter(), 0, list(sides)
    while number < NUM_WARM_UP_ROUNDS + 3 or not is_time_up(began, args.seconds):
        turn = number % len(names)
        for name in (*names[turn:], *names[:turn]):
            found = time_step(sides[name], batch)
            if number >= NUM_WARM_UP_ROUNDS:
                steps[name].append(found)
        number += 1
    if world.rank == 0:
        numel = sum(parameter.numel() for parameter in make_model(tiny=args.tiny).parameters())
        print(f"{numel / 1e6:.1f} M parameters; medians of {number - NUM_WARM_UP_ROUNDS} steps")
        print_sides(steps)
    dist.barrier()
    leave_world()


def print_sides(steps: dict[str, list[tuple[float, int]]]) -> None:
    dense_s = [taken_s for taken_s, _ in steps["DDP"]]
    dense_bytes = statistics.median(sent for _, sent in steps["DDP"])
    print(f"{'':34s} {'ms/step':>9s} {'sent/step':>10s} {'compression':>12s} {'DDP / this':>11s}")
    for name, rows in steps.items():
        sent = statistics.median(sent for _, sent in rows)
        step_ms = 1e3 * statistics.median(taken_s for taken_s, _ in rows)
        ratio = statistics.median(theirs / mine for theirs, (mine, _) in zip(dense_s, rows, strict=True))
        compression = "" if name == "no exchange" else f"{dense_bytes / sent:.1f}"
        print(f"{name:34s} {step_ms:9.1f} {format_bytes(sent):>10s} {compression:>12s} {ratio:11.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bandwidth", nargs="+", default=["100Mbit", "1Gbit"], help="of each line (100Mbit 1Gbit)")
    parser.add_argument("--delay", default="0.2ms", help="one way, between emulated hosts (0.2ms)")
    parser.add_argument("--hosts", type=int, default=4, help="(4)")
    parser.add_argument("--seconds", type=float, default=100, help="after which no new round begins, each (100)")
    parser.add_argument("--tiny", action="store_true", help="a small model and few steps")
    args = parser.parse_args()
    if args.tiny:
        args.seconds = 0.0
    if "WEFT_LAB_HOST" in os.environ:
        run_rank(args)
        return
    environment: dict[str, Any] = {**os.environ, "OMP_NUM_THREADS": "1"}
    for bandwidth in args.bandwidth:
        print(
            f"{args.hosts} hosts of one rank of one thread, {bandwidth}/s, {args.delay} one way, "
            f"torch {torch.__version__}, {os.cpu_count()} cores",
            flush=True,
        )
        lab = ("lab", "--hosts", str(args.hosts), "--bandwidth", bandwidth, "--delay", args.delay)
        command = [sys.executable, "-m", "weft", *lab, "--", sys.executable, *sys.argv]
        if code := subprocess.call(command, env=environment):
            sys.exit(code)


if __name__ == "__main__":
    main()
