"""Local SGD: weft's local steps, torch's periodic model averaging, and no exchange at all, in one run.

    python benchmarks/local_exchange.py [--ranks 2 4] [--every 2 8] [--rounds 20]

All sides have the GPT, optimizer and batches of `data_parallel.py`. A round is `every` steps and the exchange of
weights after them, from a barrier until the slowest rank is done; sides alternate, in an order that rotates every
round. The table gives each side's median time per step, and the median over rounds of weft's divided by torch's, with
the 95 % interval of that median. DiLoCo has no counterpart in torch: its side shows what the outer step adds.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import statistics
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from data_parallel import CONTEXT, Step, interval, make_model, torch_step
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

import weft
from weft.plan.plan import Axes, Data, Plan

SIDES = ("no exchange", "torch averager", "weft", "weft DiLoCo")


def averaged_step(every: int) -> Step:
    model = make_model()
    step = torch_step(model)
    averager = PeriodicModelAverager(period=every, warmup_steps=0)

    def run(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = step(tokens, targets)
        averager.average_parameters(model.parameters())
        return loss

    # It averages at steps 0, every, 2 every, ...: one more makes it the last step of a round.
    averager.step = 1 % every
    return run


def make_side(name: str, num_ranks: int, every: int) -> Step:
    if name == "no exchange":
        return torch_step(make_model())
    if name == "torch averager":
        return averaged_step(every)
    outer: dict[str, Any] = {"outer": "nesterov", "outer_lr": 0.7, "outer_momentum": 0.9} if "DiLoCo" in name else {}
    return weft.parallelize(
        make_model(),
        Plan(axes=Axes(data=num_ranks), data=Data(sync="local", every=every, check_every=0, **outer)),
        loss="cross-entropy",
        optimizer=functools.partial(torch.optim.AdamW, lr=3e-4, fused=True),
        device="cpu",
    ).step


def run_rank(rank: int, num_ranks: int, folder: str, settings: dict[str, Any], results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", num_ranks), rank=rank, world_size=num_ranks)
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(0, 4096, (1, CONTEXT + 1), generator=generator)
    batch = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    for every in settings["every"]:
        sides = {name: make_side(name, num_ranks, every) for name in SIDES}
        times: dict[str, list[float]] = {name: [] for name in SIDES}
        for number in range(-2, settings["rounds"]):
            turn = number % len(SIDES)
            for name in (*SIDES[turn:], *SIDES[:turn]):
                dist.barrier()
                started = time.perf_counter()
                for _ in range(every):
                    sides[name](*batch)
                if number >= 0:  # the first two warm up
                    times[name].append((time.perf_counter() - started) / every)
        slowest = torch.tensor([times[name] for name in SIDES], dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        if rank == 0:
            results.put((every, dict(zip(SIDES, slowest.tolist(), strict=True))))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--every", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    numel = sum(parameter.numel() for parameter in make_model().parameters())
    print(f"GPT of {numel / 1e6:.1f} M parameters, {CONTEXT} tokens per rank, torch {torch.__version__}; ms per step")
    titles = " ".join(f"{name:>14s}" for name in SIDES)
    print(f"{'ranks':>5s} {'every':>5s} {titles}   weft / torch (95 %)")
    context = multiprocessing.get_context("spawn")
    for num_ranks in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            results = context.Queue()
            settings = {"every": args.every, "rounds": args.rounds}
            ranks = [
                context.Process(target=run_rank, args=(rank, num_ranks, folder, settings, results))
                for rank in range(num_ranks)
            ]
            for process in ranks:
                process.start()
            for _ in args.every:
                every, times = results.get(timeout=1200)
                ratios = [mine / theirs for mine, theirs in zip(times["weft"], times["torch averager"], strict=True)]
                low, high = interval(ratios)
                medians = " ".join(f"{1e3 * statistics.median(times[name]):14.1f}" for name in SIDES)
                print(
                    f"{num_ranks:5d} {every:5d} {medians}   {statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})",
                    flush=True,
                )
            for process in ranks:
                process.join()


if __name__ == "__main__":
    main()
