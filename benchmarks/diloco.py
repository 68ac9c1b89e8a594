"""DiLoCo against synchronous AdamW at equal tokens: held-out loss of a GPT on bytes, by replicas in process on one GPU.

    python benchmarks/diloco.py [--minutes 10] [--steps 1000] [--every 50 100 200 500] [--replicas 8 4] [--json FILE]
    python benchmarks/diloco.py --runs 4@50 4@50,warm 4@50,average --text "/usr/lib/python3/**/*.py"   # these, in order
    python benchmarks/diloco.py --tiny                       # a minute on a CPU, to try the script

Every run sees the same batches in the same order, starts from the same weights and has the same inner optimizer and
schedule: AdamW with warm-up and cosine. The synchronous one makes one update per global batch of 64 windows; with W
replicas each makes one update per 64 / W windows of it, and every so many steps they make an outer Nesterov step
(rate 0.7, momentum 0.9), or a plain average. So tokens and computation are equal, and a real cluster would exchange
1 / every of the bytes.
"After warm-up": replicas average after every step of the first tenth, as DiLoCo is published for models that are
trained a little already (`[data] switch_step`).

The text is the source of Python's standard library, or files of your own; its last twentieth is held out, and the loss
of the average of the replicas is measured on it along the way (on a part) and at the end (on all of it). The most
important runs come first; one that would pass the time given is left out and said. Results are printed and written to
the file run by run.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import time
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

import weft
from weft.models.gpt import GPT, GPTConfig
from weft.optim.schedule import warmup_cosine
from weft.plan.plan import Axes, Compile, Data, Plan, Precision, Step
from weft.training.data.datasets import TokenWindows, split_held_out, standard_library_text, text_files

OUTER_LR, OUTER_MOMENTUM = 0.7, 0.9
HELD_OUT = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The model, its data and its hyperparameters."""

    config: GPTConfig
    global_batch: int
    steps: int
    lr: float
    num_evaluations: int
    """Of the held-out loss along the way."""
    evaluation_batches: int
    """Batches of held-out windows in each of these."""
    text_bytes: int | None = None
    """Bytes of the text that are used; None: all."""


FULL = Size(
    config=GPTConfig(context=512, num_layers=5, hidden=768, heads=12),  # wide: small batches wait for launches
    global_batch=64,
    steps=1000,
    lr=1e-3,
    num_evaluations=20,
    evaluation_batches=4,
)
TINY = Size(
    config=GPTConfig(context=64, num_layers=2, hidden=64, heads=4),
    global_batch=16,
    steps=40,
    lr=3e-3,
    num_evaluations=4,
    evaluation_batches=2,
    text_bytes=200_000,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training run; a single replica is the synchronous one."""

    num_replicas: int = 1
    every: int = 1
    warm_up_steps: int = 0
    outer: str = "nesterov"

    @property
    def name(self) -> str:
        if self.num_replicas == 1:
            return "synchronous"
        how = ", averaged" * (self.outer == "average") + ", after warm-up" * (self.warm_up_steps > 0)
        return f"{self.num_replicas} replicas, every {self.every}{how}"

    @classmethod
    def parse(cls, text: str, steps: int) -> Run:
        """A run from its text: "8@50", "8@50,warm", "8@50,average"."""
        sizes, *options = text.split(",")
        num_replicas, every = map(int, sizes.split("@"))
        return cls(
            num_replicas=num_replicas,
            every=every,
            warm_up_steps=steps // 10 if "warm" in options else 0,
            outer="average" if "average" in options else "nesterov",
        )

    def plan(self, precision: Precision, *, compiled: bool) -> Plan:
        common = Plan(step=Step(clip_norm=1.0), precision=precision, compile=Compile(blocks=compiled))
        if self.num_replicas == 1:
            return common
        is_nesterov = self.outer == "nesterov"
        data = Data(
            sync="local",
            every=self.every,
            switch_step=self.warm_up_steps,
            **({"outer": "nesterov", "outer_lr": OUTER_LR, "outer_momentum": OUTER_MOMENTUM} if is_nesterov else {}),
        )
        return replace(common, axes=Axes(data=self.num_replicas), data=data)


def runs_of(replicas: list[int], every: list[int], steps: int) -> list[Run]:
    """All runs, the most important first: each number of replicas at the two ends, then what lies between."""
    ends = [every[0], every[-1]] if len(every) > 1 else every
    between = every[1:-1]
    plain = [
        *(Run(num_replicas=many, every=some) for some in ends for many in replicas),
        *(Run(num_replicas=many, every=some) for many in replicas for some in between),
    ]
    warm = [Run(num_replicas=many, every=some, warm_up_steps=steps // 10) for some in ends for many in replicas]
    return [Run(), *plain, *warm]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one run gave."""

    name: str
    num_replicas: int
    every: int
    warm_up_steps: int
    outer: str
    held_out_loss: float
    spread: float | None
    """Distance of a replica from the average, relative to its norm, before the last exchange."""
    num_exchanges: int
    seconds: float
    """Of the steps and measurements, without the building."""
    curve_tokens: list[int]
    curve_loss: list[float]


def train(run: Run, size: Size, data: tuple[TokenWindows, TokenWindows], device: str, *, compiled: bool) -> Outcome:
    torch.manual_seed(0)
    fused: dict[str, Any] = {"fused": True} if device == "cuda" else {}
    trainer = weft.parallelize(
        GPT(size.config),
        run.plan(Precision(compute="bf16" if device == "cuda" else "model"), compiled=compiled),
        loss="cross-entropy",
        optimizer=functools.partial(torch.optim.AdamW, lr=size.lr, betas=(0.9, 0.95), weight_decay=0.1, **fused),
        schedule=warmup_cosine(size.steps // 20, size.steps, 0.1),
        device=device,
        replicas_in_process=run.num_replicas > 1,
    )
    training, held_out = data
    held_out_batches = weft.batches(held_out, trainer, global_batch=min(2 * size.global_batch, len(held_out)))
    tokens_per_step = size.global_batch * size.config.context
    curve_tokens: list[int] = []
    curve_loss: list[float] = []
    with trainer:
        started = time.perf_counter()
        samples = weft.batches(
            training, trainer, global_batch=size.global_batch, shuffle_seed=0, epochs=None, drop_last=True
        )
        for inputs, targets in islice(samples, size.steps):
            trainer.step(inputs, targets)
            if trainer.steps_done % max(size.steps // size.num_evaluations, 1) == 0:
                curve_tokens.append(trainer.steps_done * tokens_per_step)
                curve_loss.append(trainer.evaluate(islice(held_out_batches.from_start(), size.evaluation_batches)))
        loss = trainer.evaluate(held_out_batches)
        seconds = time.perf_counter() - started
        spread = getattr(trainer.sync, "spread", None)
        return Outcome(
            **asdict(run),
            name=run.name,
            held_out_loss=loss,
            spread=None if spread is None else float(spread),
            num_exchanges=getattr(trainer.sync, "num_exchanges", size.steps),
            seconds=seconds,
            curve_tokens=curve_tokens,
            curve_loss=curve_loss,
        )


def report(outcomes: list[Outcome], size: Size, environment: str) -> dict[str, Any]:
    """The curves as a picture reads them, and the table beside them."""
    base = outcomes[0].held_out_loss
    return {
        "title": "DiLoCo against synchronous AdamW at equal tokens",
        "x_label": "tokens",
        "y_label": "held-out loss, nats per byte",
        "series": [{"name": one.name, "x": one.curve_tokens, "y": one.curve_loss} for one in outcomes],
        "environment": environment,
        "steps": size.steps,
        "global_batch": size.global_batch,
        "context": size.config.context,
        "rows": [
            {
                **{name: value for name, value in asdict(one).items() if not name.startswith("curve_")},
                "relative_to_synchronous": one.held_out_loss / base - 1,
            }
            for one in outcomes
        ],
    }


def line(one: Outcome, base: Outcome, tokens: int) -> str:
    spread = "" if one.spread is None else f"{one.spread:.2e}"
    return (
        f"{one.name:38s} {one.held_out_loss:9.4f} {100 * (one.held_out_loss / base.held_out_loss - 1):+8.2f} % "
        f"{spread:>9s} {one.num_exchanges:9d} {one.seconds:8.1f} {tokens / one.seconds / 1e3:10.0f}"
    )


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="no run begins that would end later (10)")
    parser.add_argument("--steps", type=int, help="of each run (1000)")
    parser.add_argument("--global-batch", type=int, help="windows per step, over all replicas (64)")
    parser.add_argument(
        "--runs", nargs="+", help='besides the synchronous one, such as 8@50 "4@50,warm" "4@50,average"'
    )
    parser.add_argument("--text", nargs="+", help="files or globs to learn from (Python's standard library)")
    parser.add_argument("--lr", type=float, help="of AdamW, in all runs (1e-3)")
    parser.add_argument("--every", type=int, nargs="+", help="steps between exchanges (50 100 200 500)")
    parser.add_argument("--replicas", type=int, nargs="+", help="replicas (8 4)")
    parser.add_argument("--json", type=Path, default=Path("diloco.json"), help="file of the results (diloco.json)")
    parser.add_argument("--compile", action="store_true", help="compile the model's blocks, once for all replicas")
    parser.add_argument("--tiny", action="store_true", help="a small model and few steps, for a CPU")
    return parser.parse_args()


def main() -> None:
    args = read_arguments()
    began = time.perf_counter()
    size = TINY if args.tiny else FULL
    size = replace(
        size,
        steps=args.steps or size.steps,
        lr=args.lr or size.lr,
        global_batch=args.global_batch or size.global_batch,
    )
    every = sorted(args.every or ([5, 10, 20] if args.tiny else [50, 100, 200, 500]))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    text = (text_files(args.text) if args.text else standard_library_text())[: size.text_bytes]
    parts = split_held_out(text, HELD_OUT, size.config.context)
    data = (TokenWindows(parts[0], size.config.context), TokenWindows(parts[1], size.config.context))
    with torch.device("meta"):
        num_parameters = sum(parameter.numel() for parameter in GPT(size.config).parameters())
    where = f"{torch.cuda.get_device_name()}, bf16" if device == "cuda" else "CPU, float32"
    environment = f"{where}, torch {torch.__version__}, {num_parameters / 1e6:.1f} M parameters"
    tokens = size.steps * size.global_batch * size.config.context
    print(
        f"{environment}\n"
        f"{size.steps} steps of {size.global_batch} x {size.config.context} tokens = {tokens / 1e6:.1f} M tokens, "
        f"of a text of {len(text) / 1e6:.1f} MB; AdamW {size.lr:g}, outer {OUTER_LR} / {OUTER_MOMENTUM}\n"
        f"{'':38s} {'held-out':>9s} {'to synchr.':>10s} {'spread':>9s} {'exchanges':>9s} {'s':>8s} {'k tokens/s':>10s}",
        flush=True,
    )
    outcomes: list[Outcome] = []
    expected: dict[int, float] = {}
    runs = runs_of(args.replicas or ([4, 2] if args.tiny else [8, 4]), every, size.steps)
    if args.runs:
        runs = [Run(), *(Run.parse(text, size.steps) for text in args.runs)]
    for run in runs:
        left_s = 60 * args.minutes - (time.perf_counter() - began)
        needed_s = 1.1 * expected.get(run.num_replicas, 2.5 * expected.get(1, 0.0))
        if needed_s > left_s:
            print(f"{run.name:38s} left out: it needs {needed_s:.0f} s, {left_s:.0f} s are left", flush=True)
            continue
        outcomes.append(train(run, size, data, device, compiled=args.compile))
        expected[run.num_replicas] = outcomes[-1].seconds
        print(line(outcomes[-1], outcomes[0], tokens), flush=True)
        gc.collect()  # a trainer's hooks refer to it, and its memory is the next one's
        args.json.write_text(json.dumps(report(outcomes, size, environment), indent=1))


if __name__ == "__main__":
    main()
