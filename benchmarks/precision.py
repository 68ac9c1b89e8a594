"""One GPU: float32, TF32, bf16 and fp16 on GPT-2 124M: memory, tokens per second, loss; then recomputation and offload.

    python benchmarks/precision.py [--steps 200] [--batch 32] [--context 1024] [--csv losses.csv]
    python benchmarks/precision.py --tiny                  # seconds on a CPU, to see that it runs

Every side starts from the same weights and sees the same batches of real text (the source of the standard library, as
bytes). Sides take turns in blocks of steps; a side's first block is its warm-up and gives its peak of allocated memory,
without the memory that the other sides keep. The tables are Markdown.

"fp16, not scaled" is refused as a plan: here the loss scale of an fp16 trainer is set to 1, to show the effect of
scaling. Zeros are zero entries of the gradient that the optimizer gets, averaged over the ends of blocks.
"""

from __future__ import annotations

import argparse
import functools
import gc
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import weft
from weft.models.gpt import GPT, GPTConfig, gpt2_124m
from weft.plan.plan import Compile, Data, Plan, Precision, Recompute, Step
from weft.training.data.datasets import TokenWindows, standard_library_text
from weft.training.step.precision import LossScale
from weft.units import format_bytes

Batch = tuple[torch.Tensor, torch.Tensor]
BF16, FP16 = Precision(compute="bf16"), Precision(compute="fp16")
WARM_UP_STEPS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One variant of the same training."""

    name: str
    plan: Plan
    tf32: bool = False
    is_scaled: bool = True


def plan(**sections: Any) -> Plan:
    """Clipped, as in GPT-2's training: without clipping, one skipped step decides whether the loss spikes later."""
    return Plan(step=Step(clip_norm=1.0), **sections)


FORMATS = (
    Side(name="fp32", plan=plan()),
    Side(name="fp32, TF32", plan=plan(), tf32=True),
    Side(name="bf16", plan=plan(precision=BF16)),
    Side(name="fp16", plan=plan(precision=FP16)),
    Side(name="fp16, not scaled", plan=plan(precision=FP16), is_scaled=False),
)
SELECTIVE, FULL = Recompute(policy="selective"), Recompute(policy="full")
COMPILED = Compile(blocks=True)
SAVINGS = (
    Side(name="bf16", plan=plan(precision=BF16)),
    Side(name="bf16, recompute selective", plan=plan(precision=BF16, recompute=SELECTIVE)),
    Side(name="bf16, recompute full", plan=plan(precision=BF16, recompute=FULL)),
    Side(name="bf16, offload", plan=plan(precision=BF16, data=Data(offload=True))),
    Side(name="bf16, compiled", plan=plan(precision=BF16, compile=COMPILED)),
    Side(name="bf16, compiled, recompute selective", plan=plan(precision=BF16, compile=COMPILED, recompute=SELECTIVE)),
    Side(name="bf16, compiled, recompute full", plan=plan(precision=BF16, compile=COMPILED, recompute=FULL)),
)


class Run:
    """A running side: its trainer and its measurements."""

    def __init__(self, side: Side, config: GPTConfig, device: torch.device) -> None:
        self.side = side
        self.losses: list[torch.Tensor] = []
        self.speeds: list[float] = []
        """Tokens per second of each block except the first."""
        self.zeros: list[tuple[float, float]] = []
        """Fractions of zero entries in the gradient at the end of each block: overall, and without the embedding."""
        self.peak_bytes = 0
        self._device = device
        self._before_bytes = allocated_bytes(device)
        torch.manual_seed(0)
        with device:
            model = GPT(config)
        self.trainer = weft.parallelize(
            model,
            side.plan,
            loss="cross-entropy",
            optimizer=functools.partial(torch.optim.AdamW, lr=3e-4, fused=True),
            schedule=lambda step: min(1.0, (step + 1) / WARM_UP_STEPS),
            device=device,
        )
        if not side.is_scaled:
            self.trainer.update.loss_scale = LossScale(1.0, is_dynamic=False)

    def block(self, batches: Sequence[Batch]) -> None:
        """Run some steps, timed together."""
        is_first = not self.losses
        if is_first and self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        torch.set_float32_matmul_precision("high" if self.side.tf32 else "highest")
        synchronise(self._device)
        started = time.perf_counter()
        losses = [self.trainer.step(*batch) for batch in batches]
        synchronise(self._device)
        seconds = time.perf_counter() - started
        self.losses += losses
        self.zeros.append(self._count_zeros())
        if not is_first:
            self.speeds.append(sum(inputs.numel() for inputs, _ in batches) / seconds)
        elif self._device.type == "cuda":
            self.peak_bytes = torch.cuda.max_memory_allocated() - self._before_bytes

    def _count_zeros(self) -> tuple[float, float]:
        counted = {
            piece.name: (int((piece.tensor.grad == 0).sum()), piece.tensor.numel())
            for piece in self.trainer.sync.pieces
            if piece.tensor.grad is not None
        }
        rest = [counts for name, counts in counted.items() if name != "embedding.weight"]
        return share(counted.values()), share(rest)


def share(counts: Iterable[tuple[int, int]]) -> float:
    zeros, totals = zip(*counts, strict=True)
    return sum(zeros) / sum(totals)


def allocated_bytes(device: torch.device) -> int:
    gc.collect()
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def make_batches(num_batches: int, *, batch: int, context: int, device: torch.device) -> list[Batch]:
    """Batches for every side: windows of the corpus in a shuffled order, repeated if it ends."""
    corpus = TokenWindows(standard_library_text(), context)
    order = np.random.default_rng(0).permutation(len(corpus))
    rows = [order[np.arange(number * batch, (number + 1) * batch) % len(order)] for number in range(num_batches)]
    return [(inputs.to(device), targets.to(device)) for inputs, targets in map(corpus.take, rows)]


def take_turns(sides: Sequence[Side], config: GPTConfig, batches: list[Batch], *, block: int) -> list[Run]:
    """Run all sides over all batches."""
    device = batches[0][0].device
    runs = []
    for side in sides:
        runs.append(Run(side, config, device))
        runs[-1].block(batches[:block])
    for number, start in enumerate(range(block, len(batches), block)):
        for run in runs if number % 2 == 0 else reversed(runs):
            run.block(batches[start : start + block])
    return runs


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)) + "\n"


def cost_table(runs: Sequence[Run]) -> str:
    """Memory and speed, also relative to the first side."""
    first, rows = runs[0], []
    for run in runs:
        ratios = sorted(mine / theirs for mine, theirs in zip(run.speeds, first.speeds, strict=True))
        low, _, high = statistics.quantiles(ratios, n=4)
        memory = [format_bytes(run.peak_bytes), f"{run.peak_bytes / first.peak_bytes:.2f}"] if first.peak_bytes else []
        against = f"{statistics.median(ratios):.2f} ({low:.2f} to {high:.2f})"
        rows.append([run.side.name, *(memory or ["-", "-"]), f"{statistics.median(run.speeds):,.0f}", against])
    return table(["", "peak memory", "against the first", "tokens/s", "relative to the first (middle half)"], rows)


def curve_table(runs: Sequence[Run], *, block: int) -> str:
    """Mean losses of some blocks."""
    num_blocks = len(runs[0].losses) // block
    shown = sorted({0, *(num_blocks * eighth // 8 for eighth in (1, 2, 4, 6)), num_blocks - 1})
    rows = [
        [f"{number * block + 1} to {(number + 1) * block}", *(f"{mean_loss(run, number, block):.4f}" for run in runs)]
        for number in shown
    ]
    return table(["loss of steps", *(run.side.name for run in runs)], rows)


def mean_loss(run: Run, number: int, block: int) -> float:
    return statistics.mean(map(float, run.losses[number * block : (number + 1) * block]))


def gradient_table(runs: Sequence[Run], *, block: int) -> str:
    """Differences of the loss from the first side's, skipped steps and zero gradients."""
    last = len(runs[0].losses) // block - 1
    rows = []
    for run in runs:
        off = mean_loss(run, last, block) - mean_loss(runs[0], last, block)
        everything, rest = (statistics.mean(shares) for shares in zip(*run.zeros, strict=True))
        rows.append([run.side.name, f"{mean_loss(run, last, block):.4f}", f"{off:+.4f}", f"{everything:.2%}"])
        rows[-1] += [f"{rest:.2%}", str(run.trainer.num_skipped), f"{run.trainer.update.loss_scale.value:g}"]
    head = [
        "",
        "last loss",
        "difference from the first",
        "zeros in the gradient",
        "without the embedding",
        "skipped steps",
    ]
    return table([*head, "loss scale"], rows)


def write_losses(path: Path, runs: Sequence[Run]) -> None:
    steps = zip(*(map(float, run.losses) for run in runs), strict=True)
    lines = [",".join(f"{loss:.6f}" for loss in losses) for losses in steps]
    path.write_text("\n".join([",".join(run.side.name.replace(",", "") for run in runs), *lines]) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="of each number format")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--tiny", action="store_true", help="a tiny model and few steps, on any machine")
    parser.add_argument("--csv", type=Path, help="file for every loss of every number format")
    args = parser.parse_args()
    config, block, num_steps, batch, context = gpt2_124m(), 10, args.steps, args.batch, args.context
    if args.tiny:
        config = GPTConfig(vocab_size=512, context=32, num_layers=2, hidden=32, heads=2, positions="learned", bias=True)
        block, num_steps, batch, context = 4, 16, 4, 32
    elif not torch.cuda.is_available():
        sys.exit("this benchmark needs a GPU; --tiny does not")
    num_blocks = max(num_steps // block, 3)  # one warm-up, and two for the middle half
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    batches = make_batches(num_blocks * block, batch=batch, context=context, device=device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    with torch.device("meta"):
        num_parameters = sum(parameter.numel() for parameter in GPT(config).parameters())
    print(f"{name}, torch {torch.__version__}, GPT of {num_parameters:,} parameters, {batch}×{context}, not compiled\n")
    runs = take_turns(FORMATS, config, batches, block=block)
    print(cost_table(runs), curve_table(runs, block=block), gradient_table(runs, block=block), sep="\n", flush=True)
    if args.csv:
        write_losses(args.csv, runs)
    runs.clear()
    short = max(block // 2, 1)
    print(cost_table(take_turns(SAVINGS, config, batches[: 6 * short], block=short)))


if __name__ == "__main__":
    main()
