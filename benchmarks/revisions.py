"""Two revisions of weft under the same plans, in one run: losses to the bit, and step times as a ratio.

    python benchmarks/revisions.py bits  --base HEAD~20             # 10 steps of every plan in examples/plans
    python benchmarks/revisions.py times --base HEAD~20 [--plans data-parallel zero tensor] [--rounds 30] [--steps 4]

The base revision's `src` is unpacked into a temporary folder, and each side's ranks are processes of their own with
that folder on PYTHONPATH. Both sides of a plan are alive at once and take turns: a side runs a block of steps while the
other waits at its pipe, and the order turns every round. A block lasts until its slowest rank is done. The ratio is the
median over rounds of the working tree's time divided by the base's, with the 95 % interval of that median (order
statistics). Ranks are CPU processes of one thread. Where a plan leaves the stage cuts open they are fixed here, because
`parallelize` would time the blocks and might cut each side differently.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PLANS = ROOT / "examples" / "plans"
TIMED = "data-parallel shared-memory zero-1 zero-2 zero hybrid pipeline pipeline-zero-bubble 2bw tensor tensor-sequence"
BATCH = 8


class Side:
    """The ranks of one revision under one plan."""

    def __init__(self, source: Path, plan: Path, num_ranks: int, size: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        shared = {
            "PYTHONPATH": str(source),
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16",  # some virtual machines advertise AMX and refuse it
        }
        self.ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "rank", str(plan), size],
                env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(num_ranks)
        ]

    def run(self, num_steps: int) -> tuple[float, list[str]]:
        """Seconds of the slowest rank for so many steps, and the losses, which all ranks must agree on."""
        for rank in self.ranks:
            assert rank.stdin is not None
            rank.stdin.write(f"{num_steps}\n")
            rank.stdin.flush()
        answers = []
        for rank in self.ranks:
            assert rank.stdout is not None
            line = rank.stdout.readline()
            if not line:
                raise SystemExit("a rank ended early; its error is above")
            answers.append(json.loads(line))
        assert all(answer["losses"] == answers[0]["losses"] for answer in answers)
        return max(answer["seconds"] for answer in answers), answers[0]["losses"]

    def close(self) -> None:
        for rank in self.ranks:
            assert rank.stdin is not None
            rank.stdin.close()
        for rank in self.ranks:
            rank.wait(timeout=60)


def run_rank(plan_file: str, size: str) -> None:
    """Train on command: a line on stdin is a number of steps, the answer is a line of JSON."""
    import functools

    import torch
    import torch.nn.functional as F

    import weft
    from weft.models.convnet import ConvNet, ConvNetConfig
    from weft.models.gpt import GPT, GPTConfig

    torch.set_num_threads(1)
    plan = weft.read_plan(plan_file)
    large, is_images = size == "large", "image-rows" in plan_file
    num_layers = 6 if large else 4
    if plan.axes.pipeline > 1 and not plan.pipeline.cuts:
        stages = plan.axes.pipeline * plan.pipeline.chunks
        num_layers = -(-num_layers // stages) * stages
        cuts = tuple(range(num_layers // stages, num_layers, num_layers // stages))
        plan = dataclasses.replace(plan, pipeline=dataclasses.replace(plan.pipeline, cuts=cuts))
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    if is_images:
        model: Any = ConvNet(ConvNetConfig(width=8, num_blocks=2))
        inputs = torch.randn(16, BATCH, 1, 8, 8, generator=generator)
        targets = torch.randint(10, (16, BATCH), generator=generator)
    else:
        hidden, vocab, context = (384, 4096, 128) if large else (32, 64, 16)
        model = GPT(
            GPTConfig(
                vocab_size=vocab, context=context, num_layers=num_layers, hidden=hidden, heads=4, kv_heads=4, tied=False
            )
        )
        tokens = torch.randint(vocab, (16, BATCH, context + 1), generator=generator)
        inputs, targets = tokens[..., :-1], tokens[..., 1:]
    trainer = weft.parallelize(
        model,
        plan,
        loss=F.cross_entropy if is_images else "cross-entropy",
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-3, fused=True),
        example=inputs[0, : max(1, BATCH // (plan.axes.replicate * plan.axes.data * plan.step.microbatches))],
        device="cpu",
    )
    each = BATCH // trainer.data_size
    mine = slice(trainer.data_rank * each, (trainer.data_rank + 1) * each)
    number = 0
    for line in sys.stdin:
        losses, start = [], time.perf_counter()
        for _ in range(int(line)):
            losses.append(trainer.step(inputs[number % 16, mine], targets[number % 16, mine]))
            number += 1
        texts = [float(loss).hex() for loss in losses]
        print(json.dumps({"seconds": time.perf_counter() - start, "losses": texts}), flush=True)


def median_interval(values: list[float]) -> tuple[float, float, float]:
    """The median and the 95 % interval that order statistics give for it."""
    ordered, n = sorted(values), len(values)
    reach = math.ceil(0.98 * math.sqrt(n))
    return statistics.median(ordered), ordered[max(0, n // 2 - reach)], ordered[min(n - 1, n // 2 + reach)]


def num_ranks_of(plan: Path) -> int:
    import tomllib

    return math.prod(tomllib.loads(plan.read_text())["axes"].get(axis, 1) for axis in AXES)


AXES = ("pipeline", "replicate", "data", "ring", "ulysses", "tensor")


def compare(plan: Path, base: Path, args: argparse.Namespace) -> bool:
    """One line about one plan; whether the losses are the same to the bit."""
    num_ranks, size = num_ranks_of(plan), "large" if args.what == "times" else "small"
    sides = [Side(source, plan, num_ranks, size) for source in (base, ROOT / "src")]
    try:
        if args.what == "bits":
            (_, old), (_, new) = (side.run(10) for side in sides)
            print(
                f"{plan.stem:24s} {num_ranks} ranks  {'same' if old == new else f'DIFFERENT {old} {new}'}", flush=True
            )
            return old == new
        equal = sides[0].run(3)[1] == sides[1].run(3)[1]
        ratios, medians = [], ([], [])
        for number in range(args.rounds):
            seconds = {}
            for index in (0, 1) if number % 2 else (1, 0):
                seconds[index] = sides[index].run(args.steps)[0] / args.steps
                medians[index].append(seconds[index])
            ratios.append(seconds[1] / seconds[0])
        middle, low, high = median_interval(ratios)
        old_ms, new_ms = (1e3 * statistics.median(values) for values in medians)
        print(
            f"{plan.stem:24s} {num_ranks} ranks {old_ms:8.1f} ms {new_ms:8.1f} ms   "
            f"{middle:.3f} ({low:.3f} to {high:.3f})   losses {'same' if equal else 'DIFFERENT'}",
            flush=True,
        )
        return equal
    finally:
        for side in sides:
            side.close()


def main() -> None:
    if sys.argv[1:2] == ["rank"]:
        run_rank(*sys.argv[2:4])
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("bits", "times"))
    parser.add_argument("--base", default="HEAD", help="a revision, or another checkout's folder, to compare with")
    parser.add_argument("--plans", nargs="+", help="names of files in examples/plans")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    names = args.plans or (
        TIMED.split() if args.what == "times" else sorted(plan.stem for plan in PLANS.glob("*.toml"))
    )
    with tempfile.TemporaryDirectory() as folder:
        base = Path(args.base, "src")
        if not base.is_dir():
            archive = ["git", "archive", args.base, "src"]
            packed = subprocess.run(archive, cwd=ROOT, check=True, capture_output=True).stdout
            subprocess.run(["tar", "-x", "-C", folder], input=packed, check=True)
            base = Path(folder, "src")
        same = [compare(PLANS / f"{name}.toml", base.resolve(), args) for name in names]
    print(f"{sum(same)} of {len(same)} plans have the same losses to the bit")
    sys.exit(int(not all(same)))


if __name__ == "__main__":
    main()
