"""One slow rank: tokens per second with and without `[data] balance`, the losses, and how soon a share comes back.

    python benchmarks/stragglers.py [--ranks 2 4] [--slow 3] [--microbatches 8] [--rounds 8] [--recoveries 3]

Ranks train a small GPT, and sleep after each microbatch as if their machine computed longer: the last rank of two sides
so many times as long as the others. Sleeping ranks need no core, so that four of them on two cores show what four
machines would. The sides take turns, in an order that rotates every round; a round is a few steps, from a barrier until
the slowest rank is done. They train on the same batches from the same weights, so their losses must agree.

For the last column the slow rank of the balanced side recovers, and is slowed again: the number of steps from its first
quick one until it has its even share again.
"""

from __future__ import annotations

import argparse
import functools
import logging
import multiprocessing
import statistics
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import weft
from weft.models.gpt import GPT, GPTConfig
from weft.plan.plan import Axes, Data, Plan, Step
from weft.training.trainer import Trainer

CONTEXT, VOCABULARY, SAMPLES_PER_MICROBATCH, SAMPLE_S = 16, 64, 2, 0.005
EVEN, UNBALANCED, BALANCED = "even", "slowed", "slowed, balanced"
SIDES = (EVEN, UNBALANCED, BALANCED)
STEPS_PER_ROUND, WARM_UP_STEPS, MOST_STEPS = 4, 10, 40


class Sleeping(nn.Module):
    """A model on a machine that takes `factor` times as long for each sample."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.factor = model, 1.0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        time.sleep(SAMPLE_S * self.factor * len(tokens))
        logits: torch.Tensor = self.model(tokens)
        return logits


class Side:
    """A trainer, the machine it runs on, and its losses."""

    def __init__(self, name: str, num_ranks: int, microbatches: int) -> None:
        torch.manual_seed(0)
        sizes = {"num_layers": 2, "hidden": 32, "heads": 2, "mlp_hidden": 64}
        self.machine = Sleeping(GPT(GPTConfig(vocab_size=VOCABULARY, context=CONTEXT, **sizes)))
        self.trainer: Trainer = weft.parallelize(
            self.machine,
            Plan(
                axes=Axes(data=num_ranks),
                step=Step(microbatches=microbatches),
                data=Data(balance=name == BALANCED, check_every=0),
            ),
            loss="cross-entropy",
            optimizer=functools.partial(torch.optim.AdamW, lr=3e-4),
            device="cpu",
        )
        self.global_batch = num_ranks * microbatches * SAMPLES_PER_MICROBATCH
        self.losses: list[float] = []

    def step(self) -> None:
        generator = torch.Generator().manual_seed(self.trainer.steps_done)
        text = torch.randint(VOCABULARY, (self.global_batch, CONTEXT + 1), generator=generator)
        start, stop = self.trainer.batch_range(self.global_batch)
        self.losses.append(float(self.trainer.step(text[start:stop, :-1], text[start:stop, 1:])))


def steps_until(side: Side, is_done: Any) -> int:
    """Steps until shares are as wanted; `MOST_STEPS` if they never are."""
    for number in range(MOST_STEPS):
        if is_done(side.trainer.shares):
            return number
        side.step()
    return MOST_STEPS


def run_rank(rank: int, num_ranks: int, folder: str, settings: dict[str, Any], results: Any) -> None:
    torch.set_num_threads(1)
    logging.getLogger("weft").setLevel(logging.ERROR)  # slow ranks are what is measured
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", num_ranks), rank=rank, world_size=num_ranks)
    microbatches, slow = settings["microbatches"], settings["slow"] if rank == num_ranks - 1 else 1.0
    sides = {name: Side(name, num_ranks, microbatches) for name in SIDES}
    for name, side in sides.items():
        side.machine.factor = 1.0 if name == EVEN else slow
        for _ in range(WARM_UP_STEPS):
            side.step()
    times: dict[str, list[float]] = {name: [] for name in SIDES}
    for number in range(settings["rounds"]):
        turn = number % len(SIDES)
        for name in (*SIDES[turn:], *SIDES[:turn]):
            dist.barrier()
            started = time.perf_counter()
            for _ in range(STEPS_PER_ROUND):
                sides[name].step()
            times[name].append((time.perf_counter() - started) / STEPS_PER_ROUND)
    slowest = torch.tensor([times[name] for name in SIDES], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    balanced, even = sides[BALANCED], (microbatches,) * num_ranks
    shares, recoveries = balanced.trainer.shares, []
    losses = [list(sides[name].losses) for name in SIDES]
    for _ in range(settings["recoveries"]):
        balanced.machine.factor = slow
        steps_until(balanced, lambda shares: shares[-1] < microbatches)
        balanced.machine.factor = 1.0
        recoveries.append(steps_until(balanced, lambda shares: shares == even))
    if rank == 0:
        results.put((dict(zip(SIDES, slowest.tolist(), strict=True)), losses, shares, recoveries))
    for side in sides.values():
        side.trainer.close()
    dist.destroy_process_group()


def off(mine: list[float], true: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(mine, true, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--slow", type=float, default=3.0)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--recoveries", type=int, default=3)
    args = parser.parse_args()
    print(f"one rank {args.slow:g}x slower, {args.microbatches} microbatches per rank, torch {torch.__version__}")
    titles = " ".join(f"{name:>16s}" for name in SIDES)
    print(f"{'ranks':>5s} {titles}  gain  loss off by  steps to recover  shares      (tokens/s)")
    context = multiprocessing.get_context("spawn")
    for num_ranks in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            results = context.Queue()
            ranks = [
                context.Process(target=run_rank, args=(rank, num_ranks, folder, vars(args), results))
                for rank in range(num_ranks)
            ]
            for process in ranks:
                process.start()
            times, (even, _, balanced), shares, recoveries = results.get(timeout=600)
            for process in ranks:
                process.join()
        tokens = num_ranks * args.microbatches * SAMPLES_PER_MICROBATCH * CONTEXT
        speeds = " ".join(f"{tokens / statistics.median(times[name]):16.0f}" for name in SIDES)
        gains = [slow / quick for slow, quick in zip(times[UNBALANCED], times[BALANCED], strict=True)]
        print(
            f"{num_ranks:5d} {speeds}  {statistics.median(gains):.2f}  {off(balanced, even):11.1e}  "
            f"{', '.join(map(str, recoveries)):>16s}  {' '.join(map(str, shares))}",
            flush=True,
        )


if __name__ == "__main__":
    main()
