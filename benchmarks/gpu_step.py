"""One GPU: weft's bf16 compiled step of GPT-2 124M against a bare hand-written loop, tokens per second, in one run.

    python benchmarks/gpu_step.py [--rounds 8] [--steps 10] [--compiled] [--profile]

Batches come from the host, from pinned memory, as a DataLoader gives them; the bare loop copies them without waiting.
Sides alternate in blocks of steps; the table gives the median over rounds of each side's speed and of its ratio to the
bare loop in the same round, with the middle half of the rounds. Every side has its own model and optimizer, bf16
parameters and fused AdamW. Compiled sides: the bare loop compiles model and loss as one function; weft either compiles
blocks and loss (`[compile] blocks = true`) or gets a model that the user compiled whole. "ZeRO-3 on one rank" runs the
code of sharded parameters, gathers included, on a single rank. `--profile` shows, for each compiled side, how long the
GPU computes in a step and how long it has nothing to do, and the kernels that take longer than in the bare loop.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

import weft
from weft.models.gpt import GPT, gpt2_124m
from weft.plan.plan import Compile, Data, Plan

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def make_model() -> GPT:
    torch.manual_seed(0)
    return GPT(gpt2_124m()).to(device="cuda", dtype=torch.bfloat16)


def bare_loop(*, compiled: bool, by_blocks: bool = False) -> Step:
    model = make_model()
    if by_blocks:
        for block in model.blocks:
            block.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)

    def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    compiled_loss = torch.compile(loss_of) if by_blocks else loss_of

    def forward(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return compiled_loss(model(tokens), targets)

    function = torch.compile(forward) if compiled else forward

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = function(tokens.to("cuda", non_blocking=True), targets.to("cuda", non_blocking=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def weft_step(plan: Plan, *, whole: bool = False) -> Step:
    model = make_model()
    loss: object = "cross-entropy"
    if whole:
        model.compile()
        loss = torch.compile(lambda logits, targets: F.cross_entropy(logits.float().flatten(0, 1), targets.flatten()))
    trainer = weft.parallelize(
        model, plan, loss=loss, optimizer=functools.partial(torch.optim.AdamW, lr=3e-4, fused=True)
    )
    return trainer.step


def seconds_of(step: Step, batch: tuple[torch.Tensor, torch.Tensor], num_steps: int) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(num_steps):
        step(*batch)
    torch.cuda.synchronize()
    return time.perf_counter() - started


def kernel_times(step: Step, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[float, dict[str, float]]:
    """Milliseconds of a step, and of each of its kernels."""
    num_steps = 5
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        seconds = seconds_of(step, batch, num_steps)
    times = {event.key: event.self_device_time_total / 1e3 / num_steps for event in profiler.key_averages()}
    return 1e3 * seconds / num_steps, {name: ms for name, ms in times.items() if ms > 0}


def show_profiles(sides: dict[str, Step], batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    bare: dict[str, float] = {}
    for name, step in sides.items():
        step_ms, kernels = kernel_times(step, batch)
        busy_ms = sum(kernels.values())
        print(f"{name}: {step_ms:.2f} ms per step, {busy_ms:.2f} in kernels and copies, {step_ms - busy_ms:.2f} idle")
        bare = bare or kernels
        longer = sorted(((ms - bare.get(one, 0.0), one) for one, ms in kernels.items()), reverse=True)
        for more_ms, kernel in longer[:6] if kernels is not bare else ():
            print(f"    {more_ms:+.3f} ms  {kernel[:100]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--compiled", action="store_true", help="leave out the sides that are not compiled")
    parser.add_argument("--profile", action="store_true", help="show where compiled sides differ from the bare loop")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a GPU")
    sides: dict[str, Step] = {
        "bare loop, compiled whole": bare_loop(compiled=True),
        "bare loop, compiled by blocks": bare_loop(compiled=False, by_blocks=True),
        "weft, [compile] blocks": weft_step(Plan(compile=Compile(blocks=True))),
        "ZeRO-3 on one rank, blocks": weft_step(Plan(data=Data(shard="parameters"), compile=Compile(blocks=True))),
        "weft, model compiled by the user": weft_step(Plan(), whole=True),
    }
    if not args.compiled:
        sides["bare loop, not compiled"] = bare_loop(compiled=False)
        sides["weft, not compiled"] = weft_step(Plan())
        sides["ZeRO-3 on one rank, not compiled"] = weft_step(Plan(data=Data(shard="parameters")))
    tokens = torch.randint(0, 50257, (args.batch, args.context + 1))
    batch = (tokens[:, :-1].contiguous().pin_memory(), tokens[:, 1:].contiguous().pin_memory())
    losses = {name: [float(step(*batch)) for _ in range(5)] for name, step in sides.items()}
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    for round_number in range(args.rounds):
        names = list(sides) if round_number % 2 == 0 else list(reversed(sides))
        for name in names:
            seconds = seconds_of(sides[name], batch, args.steps)
            speeds[name].append(args.batch * args.context * args.steps / seconds)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, GPT-2 124M bf16, {args.batch}×{args.context}")
    print(f"{'side':34s} {'tokens/s':>9s}  {'relative to its bare loop':>24s}  loss of step 5")
    for name in sides:
        bare = "bare loop, not compiled" if name.endswith("not compiled") else "bare loop, compiled whole"
        ratios = sorted(mine / theirs for mine, theirs in zip(speeds[name], speeds[bare], strict=True))
        low, _, high = statistics.quantiles(ratios, n=4)
        against = f"{statistics.median(ratios):.4f} ({low:.4f} to {high:.4f})"
        print(f"{name:34s} {statistics.median(speeds[name]):9.0f}  {against}  {losses[name][-1]:.4f}")
    if args.profile:
        show_profiles({name: step for name, step in sides.items() if not name.endswith("not compiled")}, batch)


if __name__ == "__main__":
    main()
