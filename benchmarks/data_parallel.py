"""All-reduce data parallelism: weft's step, DistributedDataParallel's, and one without communication, in one run.

    python benchmarks/data_parallel.py [--ranks 2 4] [--tokens 128 1024] [--rounds 30] [--steps 4]

All sides have the same GPT (about 12 M parameters), optimizer and batches. Sides alternate in blocks of steps, in an
order that rotates every round. A barrier precedes every step, and a step lasts until the slowest rank is done, so
that ranks wait for each other equally on every side. The table gives each side's median step; the median over rounds of
weft's step divided by that of the better DDP in the same round, with the 95 % interval of that median (order
statistics); and weft's median time above no exchange divided by that DDP's, with a bootstrap interval over rounds.
"""

from __future__ import annotations

import argparse
import functools
import math
import multiprocessing
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import weft
from weft.models.gpt import GPT, GPTConfig
from weft.plan.plan import Axes, Plan

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
SIDES = ("no exchange", "DDP", "DDP, bucket views", "weft")
CONTEXT = 128
NUM_RESAMPLES = 4000


def make_model() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=4096, context=CONTEXT, num_layers=6, hidden=384, heads=6, tied=True))


def torch_step(model: torch.nn.Module) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def make_side(name: str, num_ranks: int) -> Step:
    match name:
        case "no exchange":
            return torch_step(make_model())
        case "DDP":
            return torch_step(DistributedDataParallel(make_model()))
        case "DDP, bucket views":
            return torch_step(DistributedDataParallel(make_model(), gradient_as_bucket_view=True))
    trainer = weft.parallelize(
        make_model(),
        Plan(axes=Axes(data=num_ranks)),
        loss="cross-entropy",
        optimizer=functools.partial(torch.optim.AdamW, lr=3e-4, fused=True),
        device="cpu",
    )
    return trainer.step


def run_rank(rank: int, num_ranks: int, folder: str, settings: dict[str, Any], results: Any) -> None:
    torch.set_num_threads(settings["threads"])
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", num_ranks), rank=rank, world_size=num_ranks)
    sides = {name: make_side(name, num_ranks) for name in SIDES}
    generator = torch.Generator().manual_seed(rank)
    for tokens_per_rank in settings["tokens"]:
        tokens = torch.randint(0, 4096, (tokens_per_rank // CONTEXT, CONTEXT + 1), generator=generator)
        batch = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        for step in sides.values():
            for _ in range(3):
                step(*batch)
        times: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(settings["rounds"]):
            turn = number % len(SIDES)
            for name in (*SIDES[turn:], *SIDES[:turn]):
                for _ in range(settings["steps"]):
                    dist.barrier()
                    started = time.perf_counter()
                    sides[name](*batch)
                    times[name].append(time.perf_counter() - started)
        slowest = torch.tensor([times[name] for name in SIDES], dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        by_round = slowest.view(len(SIDES), -1, settings["steps"]).mean(2).tolist()
        if rank == 0:
            results.put((tokens_per_rank, dict(zip(SIDES, by_round, strict=True))))
    dist.destroy_process_group()


def interval(values: list[float]) -> tuple[float, float]:
    """The 95 % interval of a median, from order statistics."""
    ordered, count = sorted(values), len(values)
    half = math.ceil(0.98 * math.sqrt(count))
    return ordered[max(count // 2 - half, 0)], ordered[min(count // 2 + half, count - 1)]


def share_above(times: dict[str, list[float]], rival: str) -> tuple[float, float, float]:
    """weft's time above no exchange divided by a rival's, and its 95 % bootstrap interval over rounds."""
    chance, rounds = random.Random(0), range(len(times["weft"]))

    def share(drawn: Sequence[int]) -> float:
        mine, theirs = (
            statistics.median(times[name][k] - times["no exchange"][k] for k in drawn) for name in ("weft", rival)
        )
        return mine / theirs if theirs > 0 else math.inf

    found = sorted(share(chance.choices(rounds, k=len(rounds))) for _ in range(NUM_RESAMPLES))
    return share(rounds), found[int(0.025 * NUM_RESAMPLES)], found[int(0.975 * NUM_RESAMPLES)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    numel = sum(parameter.numel() for parameter in make_model().parameters())
    print(f"GPT of {numel / 1e6:.1f} M parameters, gloo on the CPU, torch {torch.__version__}; ms per step, medians")
    titles = " ".join(f"{name:>17s}" for name in SIDES)
    print(f"{'ranks':>5s} {'tokens':>6s} {titles}   weft / best DDP (95 %)   above no exchange")
    context = multiprocessing.get_context("spawn")
    for num_ranks in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            results = context.Queue()
            settings = {key: getattr(args, key) for key in ("tokens", "rounds", "steps", "threads")}
            ranks = [
                context.Process(target=run_rank, args=(rank, num_ranks, folder, settings, results))
                for rank in range(num_ranks)
            ]
            for process in ranks:
                process.start()
            for _ in args.tokens:
                tokens, times = results.get(timeout=1200)
                report(num_ranks, tokens, times)
            for process in ranks:
                process.join()


def report(num_ranks: int, tokens: int, times: dict[str, list[float]]) -> None:
    best = min(("DDP", "DDP, bucket views"), key=lambda name: statistics.median(times[name]))
    ratios = [mine / theirs for mine, theirs in zip(times["weft"], times[best], strict=True)]
    low, high = interval(ratios)
    share, share_low, share_high = share_above(times, best)
    medians = " ".join(f"{1e3 * statistics.median(times[name]):17.1f}" for name in SIDES)
    print(
        f"{num_ranks:5d} {tokens:6d} {medians}   {statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})   "
        f"{share:.3f} ({share_low:.3f} to {share_high:.3f})",
        flush=True,
    )


if __name__ == "__main__":
    main()
