"""How weft's data parallelism scales over the cores of one machine, and how long its ranks wait for each other.

    python benchmarks/scaling.py --json scaling.json                 # 1, 2, 4, 8 and 16 ranks of one thread
    python benchmarks/plots.py scaling.json -o docs/methods/scaling.svg

A byte GPT of 3 M parameters, trained by all-reduce, ZeRO-1, ZeRO-3, local steps (every = 8) and torch's DDP. *Weak*:
every rank has the same work, so ideal is n times the tokens per second of one process. *Strong*: the global batch is
fixed, so ideal is an n-th of its time. Beside them "no exchange": as many processes that share nothing but the machine,
which is as fast as these cores and their memory get.

The base of all speed-ups is one process alone, a plain loop on rank 0 while the other ranks sleep, measured in every
round of every number of ranks: a speed-up is a ratio inside one round, and tables have the median over rounds with the
lowest and highest. A side runs a block of 8 steps after a barrier, with none in between, so that local steps may
drift apart as they do in training; the block lasts until the slowest rank is done. The order of sides is drawn anew in
every round. The share of waiting is a rank's time blocked in exchanges divided by its time; DDP does not tell it.
Losses are compared before anything is timed. Linux only.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.multiprocessing.spawn import start_processes
from torch.nn.parallel import DistributedDataParallel

import weft
from weft.models.gpt import GPT, GPTConfig
from weft.plan.plan import Axes, Data, Plan

CONTEXT = 64
EVERY = 8
"""Steps of a block, and local steps between two exchanges: every block has one."""
ALONE, NOTHING, DDP = "one process alone", "no exchange", "DDP"
DATA_OF = {
    "all-reduce": Data(),
    "ZeRO-1": Data(shard="optimizer"),
    "ZeRO-3": Data(shard="parameters"),
    f"local, every {EVERY}": Data(sync="local", every=EVERY),
}
SIDES = (NOTHING, DDP, *DATA_OF)
LOSSLESS = tuple(name for name, data in DATA_OF.items() if data.sync == "all-reduce")
MODES = ("weak", "strong")
NEAR_LINEAR = 0.9
"""Share of the ideal speed-up that is called near-linear."""
SHARE_OF_WEAK = 0.65
"""Part of the time that goes to weak scaling."""
MIN_ROUNDS = {"weak": 3, "strong": 2}
WARM_UP_STEPS = 3
LEARNING_RATE = 3e-4
TOLERANCE = 1e-3

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A way to train, as this rank runs it."""

    step: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    settle: Callable[[], None] = lambda: None
    """Waits for what a step left under way."""
    waited_s: Callable[[], float] = lambda: 0.0
    """Seconds blocked in exchanges so far."""
    close: Callable[[], None] = lambda: None


def make_model(args: argparse.Namespace) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=256, context=CONTEXT, num_layers=args.layers, hidden=args.hidden, heads=4))


def torch_side(model: torch.nn.Module) -> Side:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Side(step=step)


def make_side(name: str, num_ranks: int, args: argparse.Namespace) -> Side:
    if name == NOTHING:
        return torch_side(make_model(args))
    if name == DDP:
        return torch_side(DistributedDataParallel(make_model(args), gradient_as_bucket_view=True))
    trainer = weft.parallelize(
        make_model(args),
        Plan(axes=Axes(data=num_ranks), data=DATA_OF[name]),
        loss="cross-entropy",
        optimizer=functools.partial(torch.optim.AdamW, lr=LEARNING_RATE, fused=True),
        device="cpu",
    )
    return Side(
        step=trainer.step,
        settle=trainer.sync.settle,
        waited_s=lambda: sum(traffic.wait_s for traffic in trainer.mesh.traffic.values()),
        close=trainer.close,
    )


def warm_up(sides: dict[str, Side], batch: Batch, *, compares: bool) -> None:
    """A few steps of every side. `compares`: lossless ones must have DDP's losses, the others the first of them."""
    losses = {}
    for name, side in sides.items():
        # Local steps need a whole block, so that those that follow end with an exchange.
        num_steps = EVERY if name in DATA_OF and name not in LOSSLESS else WARM_UP_STEPS
        mean = torch.stack([side.step(*batch).double() for _ in range(num_steps)])
        side.settle()
        dist.all_reduce(mean)  # some losses are of all ranks, some of one
        losses[name] = (mean / dist.get_world_size()).tolist()
    wanted = losses.get(DDP) or next(iter(losses.values()))
    for name, got in losses.items() if compares else ():
        compared = WARM_UP_STEPS if name in LOSSLESS and DDP in losses else 1
        if not all(math.isclose(a, b, rel_tol=TOLERANCE) for a, b in zip(got[:compared], wanted, strict=False)):
            raise RuntimeError(f"{name} has losses {got}, others {wanted}; it does not compute the same")


def run_block(side: Side, batch: Batch | None) -> tuple[float, float]:
    """(seconds per step, share of them spent waiting) of this rank; None: it sleeps while others run."""
    dist.barrier()
    if batch is None:
        return 0.0, 0.0
    waited_s, started = side.waited_s(), time.perf_counter()
    for _ in range(EVERY):
        side.step(*batch)
    side.settle()
    taken_s = time.perf_counter() - started
    return taken_s / EVERY, (side.waited_s() - waited_s) / taken_s


def measure(mode: str, sides: dict[str, Side], args: argparse.Namespace, limit_s: float) -> list[dict[str, Any]]:
    """One round after the other: seconds per step of the slowest rank, and every rank's share of waiting, by side."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    num_samples = args.samples if mode == "weak" else args.global_samples // num_ranks
    text = torch.randint(256, (args.global_samples, CONTEXT + 1), generator=torch.Generator().manual_seed(rank))
    whole = text[: args.samples if mode == "weak" else args.global_samples]
    batch, batch_alone = ((one[:, :-1].contiguous(), one[:, 1:].contiguous()) for one in (text[:num_samples], whole))
    warm_up(sides, batch, compares=mode == MODES[0])  # later, replicas without an exchange have gone their own ways
    rounds, started = [], time.perf_counter()
    for number in range(args.rounds):
        names = (ALONE, *sides)
        taken, waiting = torch.zeros(len(names), dtype=torch.float64), torch.zeros(num_ranks, len(names))
        for name in random.Random(number).sample(names, len(names)):
            at = names.index(name)
            if name == ALONE:
                taken[at], _ = run_block(sides[NOTHING], batch_alone if rank == 0 else None)
            else:
                taken[at], waiting[rank, at] = run_block(sides[name], batch)
        dist.all_reduce(taken, op=dist.ReduceOp.MAX)
        dist.all_reduce(waiting)
        rounds.append({name: {"s": taken[k].item(), "waits": waiting[:, k].tolist()} for k, name in enumerate(names)})
        go_on = torch.tensor([number + 1 < MIN_ROUNDS[mode] or time.perf_counter() - started < limit_s])
        dist.broadcast(go_on, src=0)  # rank 0's clock decides, so that ranks stop together
        if not go_on:
            break
    return rounds


def run_rank(rank: int, num_ranks: int, folder: str, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    sides = {name: make_side(name, num_ranks, args) for name in SIDES if name == NOTHING or name in args.sides}
    share = {"weak": SHARE_OF_WEAK / len(args.ranks), "strong": (1 - SHARE_OF_WEAK) / max(1, len(args.ranks) - 1)}
    modes = MODES if num_ranks > 1 else MODES[:1]  # one rank's part of a global batch is all of it
    measured = {mode: measure(mode, sides, args, args.limit_s * share[mode]) for mode in modes}
    if rank == 0:
        Path(folder, "measured").write_text(json.dumps(measured))
    while sides:  # nothing is left of them then: DDP's destructor may hang once its process group is gone
        sides.popitem()[1].close()
    dist.destroy_process_group()


def summary(rounds: list[dict[str, Any]], name: str, factor: int) -> dict[str, Any]:
    """What became of a side: its speed-up over one process alone is their ratio times `factor`."""
    speed_ups = [factor * one[ALONE]["s"] / one[name]["s"] for one in rounds]
    waits = [statistics.median(shares) for shares in zip(*(one[name]["waits"] for one in rounds), strict=True)]
    return {
        "ms": 1e3 * statistics.median(one[name]["s"] for one in rounds),
        "speed_up": statistics.median(speed_ups),
        "lowest": min(speed_ups),
        "highest": max(speed_ups),
        "waits_by_rank": [round(share, 4) for share in waits],
    }


def report(mode: str, num_ranks: int, found: dict[str, dict[str, Any]], num_rounds: int) -> None:
    print(f"{mode} scaling, {num_ranks} rank{'s' if num_ranks > 1 else ''}, {num_rounds} rounds")
    for name, one in found.items():
        share, waits = one["speed_up"] / num_ranks, one["waits_by_rank"]
        told = f"waits {statistics.median(waits):5.1%}, most {max(waits):5.1%} (rank {waits.index(max(waits))})"
        print(
            f"  {name:16s} {one['ms']:8.1f} ms   speed-up {one['speed_up']:6.2f} ({one['lowest']:.2f} to "
            f"{one['highest']:.2f})   of ideal {share:6.1%}   {told if name in DATA_OF else ''}".rstrip(),
            flush=True,
        )


def tables(results: dict[str, dict[int, dict[str, Any]]]) -> list[str]:
    """Speed-ups and waiting as tables for a page: a row per method, a column per number of ranks."""
    lines = []
    for mode, by_ranks in results.items():
        columns = sorted(by_ranks)
        rule = "|---" * (len(columns) + 1) + "|"
        lines += [f"\n| {mode}: speed-up | " + " | ".join(map(str, columns)) + " |", rule]
        for name in by_ranks[columns[0]]:
            found = [by_ranks[ranks][name] for ranks in columns]
            cells = [f"{one['speed_up']:.2f} ({one['lowest']:.2f} to {one['highest']:.2f})" for one in found]
            lines.append(f"| {name} | {' | '.join(cells)} |")
        lines += [f"\n| {mode}: waiting, median and most of all ranks | " + " | ".join(map(str, columns)) + " |", rule]
        for name in (name for name in by_ranks[columns[0]] if name in DATA_OF):
            waits = [by_ranks[ranks][name]["waits_by_rank"] for ranks in columns]
            cells = [f"{statistics.median(shares):.1%}, {max(shares):.1%}" for shares in waits]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def verdicts(results: dict[str, dict[int, dict[str, Any]]]) -> list[str]:
    """Up to how many ranks each method is near-linear, and what there is of the ideal and of the machine at 8."""
    lines = []
    for mode, by_ranks in results.items():
        for name in next(iter(by_ranks.values())):
            shares = {ranks: found[name]["speed_up"] / ranks for ranks, found in sorted(by_ranks.items())}
            below = [ranks for ranks, share in shares.items() if share < NEAR_LINEAR]
            near = [ranks for ranks in shares if not below or ranks < below[0]]
            line = f"{mode}, {name}: near-linear up to {near[-1]}" if near else f"{mode}, {name}: never near-linear"
            if 8 in shares:
                of_machine = by_ranks[8][name]["speed_up"] / by_ranks[8][NOTHING]["speed_up"]
                line += f"; at 8 ranks {shares[8]:.1%} of ideal and {of_machine:.1%} of no exchange"
                if name in DATA_OF:
                    line += f': "near-linear up to 8" {"confirmed" if 8 in near else "corrected"}'
            lines.append(line)
    return lines


def picture(results: dict[str, dict[int, dict[str, Any]]], title: str) -> dict[str, Any]:
    """The form that `plots.py` draws: speed-ups beside the ideal line, and waiting; with everything measured."""
    panels: list[dict[str, Any]] = []
    for mode, by_ranks in results.items():
        xs = sorted(by_ranks)
        series = [
            {"name": name, "x": xs, "y": [by_ranks[ranks][name]["speed_up"] for ranks in xs]}
            for name in by_ranks[xs[0]]
        ]
        panels.append(
            {
                "title": f"{mode} scaling",
                "x_label": "ranks",
                "y_label": "speed-up over one process",
                "log_x": True,
                "log_y": True,
                "series": [{"name": "ideal", "dashed": True, "x": xs, "y": xs}, *series],
            }
        )
        waits = [
            {"name": name, "x": xs, "y": [100 * pick(by_ranks[ranks][name]["waits_by_rank"]) for ranks in xs]}
            for name in by_ranks[xs[0]]
            if name in DATA_OF
            for pick in (min, statistics.median, max)
        ]
        labels = {"title": f"waiting, {mode} scaling", "x_label": "ranks", "y_label": "% of time, over ranks"}
        panels.append({**labels, "log_x": True, "series": waits})
    return {"title": title, "panels": panels, "measured": results}


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--sides", nargs="+", default=list(SIDES), metavar="NAME", help=f"of {', '.join(SIDES)}")
    parser.add_argument("--samples", type=int, default=6, help=f"per rank, of {CONTEXT} tokens, weak scaling (6)")
    parser.add_argument("--global-samples", type=int, default=16, help="of all ranks together, strong scaling (16)")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=12, help="at most (12)")
    parser.add_argument("--limit-s", type=float, default=200, help="seconds for the rounds of all ranks (200)")
    parser.add_argument("--json", type=Path, help="a file for the picture and everything measured")
    args = parser.parse_args()
    problems = [f"--sides {name} is not one of {', '.join(SIDES)}" for name in args.sides if name not in SIDES]
    problems += [
        f"--ranks {ranks} does not divide --global-samples {args.global_samples}"
        for ranks in args.ranks
        if args.global_samples % ranks
    ]
    if args.samples > args.global_samples:
        problems.append(f"--samples {args.samples} are more than --global-samples {args.global_samples}")
    if problems:
        parser.error("; ".join(problems))
    return args


def main() -> None:
    args = read_arguments()
    with torch.device("meta"):
        numel = sum(parameter.numel() for parameter in make_model(args).parameters())
    title = (
        f"GPT of {numel / 1e6:.1f} M parameters, ranks of one thread on {os.cpu_count()} cores, "
        f"{args.samples * CONTEXT} tokens per rank (weak), {args.global_samples * CONTEXT} in all (strong)"
    )
    print(f"{title}, torch {torch.__version__}; medians", flush=True)
    results: dict[str, dict[int, dict[str, Any]]] = {mode: {} for mode in MODES}
    for num_ranks in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            # Forked ranks start fast; this process has run no kernel, so it has no threads that a fork would lose.
            start_processes(run_rank, (num_ranks, folder, args), nprocs=num_ranks, start_method="fork")
            measured = json.loads(Path(folder, "measured").read_text())
        for mode, rounds in measured.items():
            factor = num_ranks if mode == "weak" else 1
            found = {name: summary(rounds, name, factor) for name in rounds[0] if name != ALONE}
            results[mode][num_ranks] = found
            report(mode, num_ranks, found, len(rounds))
    results = {mode: by_ranks for mode, by_ranks in results.items() if by_ranks}
    print("\n".join(tables(results)), end="\n\n")
    print("\n".join([f"near-linear: at least {NEAR_LINEAR:.0%} of the ideal speed-up", *verdicts(results)]))
    if args.json:
        args.json.write_text(json.dumps(picture(results, title)))


if __name__ == "__main__":
    main()
