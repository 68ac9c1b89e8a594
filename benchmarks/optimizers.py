"""One GPU: the update of LARS and LAMB beside torch's fused AdamW, by torch's functions and by weft's kernels.

    python benchmarks/optimizers.py                       # a minute on one GPU
    python benchmarks/optimizers.py --sweep               # LAMB's kernel with other sizes of blocks
    TRITON_INTERPRET=1 python benchmarks/optimizers.py --check     # equality only, on any machine with Triton

First the kernels are compared with torch's functions: weights after a few steps, with biases left alone, a parameter
without a gradient, one of which this rank has nothing, a step that `found_inf` skips, and bfloat16. It exits with 1 if
they differ by more than rounding. Then the sides take turns in blocks of steps on float32 tensors of the shapes of
GPT-2 124M, and on 1,000 small ones; a time is the median over blocks of wall time per step, host and GPU together.
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from weft.models.gpt import GPT, gpt2_124m
from weft.optim.exclude_one_dim import exclude_one_dim
from weft.optim.fused_kernels import find_kernels
from weft.optim.lamb import LAMB
from weft.optim.lars import LARS
from weft.optim.tensor_norms import TensorNorms

Make = Callable[..., torch.optim.Optimizer]
Shapes = Sequence[tuple[int, ...]]
RULES: dict[str, Make] = {
    "LAMB": functools.partial(LAMB, lr=1e-3, weight_decay=0.01),
    "LARS, scaled gradient": functools.partial(LARS, lr=0.1, weight_decay=1e-4),
    "LARS, normalised momentum": functools.partial(LARS, lr=1e-3, weight_decay=1e-4, variant="normalised-momentum"),
}
TOLERANCES = ((torch.float32, 2e-6), (torch.bfloat16, 2e-2))
SOME: Shapes = [(40, 64), (3000,), (70, 130), (64,), (1, 7), (0, 4)]
SMALL: Shapes = [(64, 64), (64,)] * 500
TIMEOUT_S = 280.0


def gpt2_shapes() -> Shapes:
    with torch.device("meta"):
        return [tuple(parameter.shape) for parameter in GPT(gpt2_124m()).parameters()]


def make_weights(shapes: Shapes, device: torch.device, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator(device).manual_seed(0)
    drawn = (torch.randn(shape, generator=generator, device=device) * 0.02 for shape in shapes)
    return [nn.Parameter(one.to(dtype)) for one in drawn]


def set_gradients(weights: Sequence[nn.Parameter], seed: int, *, without: int | None = None) -> None:
    generator = torch.Generator(weights[0].device).manual_seed(seed)
    for number, weight in enumerate(weights):
        gradient = torch.randn(weight.shape, generator=generator, device=weight.device).to(weight.dtype)
        weight.grad = None if number == without else gradient * 0.01


def grouped(weights: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    excluded = [weight for weight in weights if weight.dim() < 2]
    adapted = [weight for weight in weights if weight.dim() >= 2]
    return [{"params": adapted}, {"params": excluded, **exclude_one_dim("", ())}]


def difference(one: Sequence[nn.Parameter], other: Sequence[nn.Parameter]) -> float:
    """The largest difference of an entry, relative to the largest entry of its tensor."""
    worst = 0.0
    for mine, theirs in zip(one, other, strict=True):
        if mine.numel():
            apart = (mine.detach().float() - theirs.detach().float()).abs().max() / mine.detach().float().abs().max()
            worst = max(worst, float(apart) if apart.isfinite() else float("inf"))
    return worst


class OtherRank(TensorNorms):
    """Norms to which another rank adds the squares of what it holds: 1 for each tensor."""

    exchanges = True

    def complete(self, squares_SN: torch.Tensor, parameters: tuple[int, ...]) -> torch.Tensor:
        self.given = squares_SN.clone()
        return squares_SN + 1


def check(shapes: Shapes, device: torch.device) -> bool:
    """Kernels against torch's functions; prints a line per rule and dtype."""
    is_equal = True
    for (name, make), kind in itertools.product(RULES.items(), (TensorNorms, OtherRank)):
        # Triton's interpreter does not round to bfloat16: it cuts off.
        for dtype, tolerance in TOLERANCES[: 2 if device.type == "cuda" else 1]:
            sides = [make_weights(shapes, device, dtype) for _ in range(2)]
            by_functions, by_kernels = (
                make(grouped(weights), fused=fused) for weights, fused in zip(sides, (False, True), strict=True)
            )
            norms: list[Any] = []
            for one in (by_functions, by_kernels):  # as where other ranks count the rest of a tensor
                order = [tuple(weight.shape) for group in one.param_groups for weight in group["params"]]
                counted = [((0, 100), (4000, 9000)) if shape == SOME[2] else None for shape in order]
                norms.append(kind((), slots=range(len(order)), counted=counted))
                one.use_norms(norms[-1])  # type: ignore[attr-defined]
            for step in range(4):
                for weights in sides:
                    set_gradients(weights, step, without=2 if step == 1 else None)
                by_kernels.step()
                by_functions.step()
            given = [one.given for one in norms if isinstance(one, OtherRank)]
            is_told = all(torch.allclose(one, given[0], rtol=10 * tolerance) for one in given)
            before = [weight.detach().clone() for weight in sides[1]]
            by_kernels.found_inf = torch.ones((), device=device)  # type: ignore[attr-defined]
            by_kernels.step()
            is_kept = all(torch.equal(old, new) for old, new in zip(before, sides[1], strict=True))
            error = difference(*sides)
            is_right = error <= tolerance and is_kept and is_told
            is_equal &= is_right
            ranks = "one rank" if kind is TensorNorms else "one of two ranks"
            wrong = "NOT SKIPPED" if not is_kept else "NOT EQUAL" if is_told else "OTHER SQUARES"
            outcome = "equal" if is_right else wrong
            print(f"{name}, {str(dtype)[6:]}, {ranks}: difference {error:.1e}: {outcome}", flush=True)
    return is_equal


def make_sides(shapes: Shapes, device: torch.device) -> dict[str, torch.optim.Optimizer]:
    makers: dict[str, Make] = {"AdamW, fused": functools.partial(torch.optim.AdamW, lr=1e-3, fused=True)}
    for name, make in RULES.items():
        makers[f"{name}, foreach"] = functools.partial(make, fused=False)
        makers[f"{name}, kernels"] = functools.partial(make, fused=True)
    made = {}
    for name, make in makers.items():
        weights = make_weights(shapes, device)
        set_gradients(weights, 1)
        made[name] = make(weights)
    return made


def step_ms(optimizer: torch.optim.Optimizer, num_steps: int) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(num_steps):
        optimizer.step()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / num_steps * 1e3


def medians(sides: Mapping[str, Callable[[], float]], num_blocks: int) -> dict[str, float]:
    """Medians of blocks that take turns; the first block of each side is its warm-up."""
    seen: dict[str, list[float]] = {name: [] for name in sides}
    for block in range(num_blocks + 1):
        for name, run in sides.items():
            taken = run()
            if block:
                seen[name].append(taken)
    return {name: statistics.median(values) for name, values in seen.items()}


def compare(title: str, shapes: Shapes, device: torch.device, *, num_steps: int, num_blocks: int) -> None:
    made = make_sides(shapes, device)
    sides = {name: functools.partial(step_ms, optimizer, num_steps) for name, optimizer in made.items()}
    found = medians(sides, num_blocks)
    numel = sum(torch.Size(shape).numel() for shape in shapes)
    print(f"\n{title}: {len(shapes)} tensors, {numel:,} elements\n\n| side | ms per step | × AdamW |\n|---|---|---|")
    for name, value in found.items():
        print(f"| {name} | {value:.3f} | {value / found['AdamW, fused']:.2f} |", flush=True)


def sweep(shapes: Shapes, device: torch.device) -> None:
    """LAMB's kernel with other sizes of blocks, beside fused AdamW."""
    from weft.optim import layerwise_triton as module

    usual = module.BLOCK
    weights = make_weights(shapes, device)
    set_gradients(weights, 1)
    adamw = torch.optim.AdamW(weights, lr=1e-3, fused=True)
    sides = {"AdamW, fused": functools.partial(step_ms, adamw, 20)}
    for module.BLOCK in (1024, 2048, 4096):
        copies = make_weights(shapes, device)
        set_gradients(copies, 1)
        lamb = LAMB(copies, fused=True)
        lamb.step()  # which lays out its jobs with this size
        sides[f"LAMB, block {module.BLOCK}"] = functools.partial(step_ms, lamb, 20)
    module.BLOCK = usual
    found = medians(sides, 5)
    print("\n| side | ms per step | × AdamW |\n|---|---|---|")
    for name, value in found.items():
        print(f"| {name} | {value:.3f} | {value / found['AdamW, fused']:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="compare results only")
    parser.add_argument("--sweep", action="store_true", help="LAMB's kernel with other sizes of blocks")
    parser.add_argument("--blocks", type=int, default=15, help="blocks of steps per side")
    options = parser.parse_args()
    faulthandler.dump_traceback_later(TIMEOUT_S, exit=True)
    if find_kernels() is None:
        sys.exit("the kernels do not run here: Triton and a GPU are needed, or TRITON_INTERPRET=1 and --check")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shapes: Shapes = SOME if device.type == "cpu" else [*SOME, *gpt2_shapes()]
    if not check(shapes, device):
        sys.exit(1)
    if options.check or device.type == "cpu":
        return
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}")
    if options.sweep:
        sweep(gpt2_shapes(), device)
        return
    compare("GPT-2 124M", gpt2_shapes(), device, num_steps=20, num_blocks=options.blocks)
    compare("Small tensors", SMALL, device, num_steps=20, num_blocks=options.blocks)


if __name__ == "__main__":
    main()
