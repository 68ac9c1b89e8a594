"""One pass of an example through a model, forward and backward, by which two models are compared.

A new model hides many mistakes: attention scores are near 0, so that positions hardly matter, and some layers are 0
altogether. 16-bit formats hide differences of a hundredth of the largest entry. So the pass runs on a copy with noise
added to its weights, in 32 bits; if the model fails that way, it runs as it is.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weft.dtypes import HALF_DTYPES
from weft.parallel.wrapping.replacements import Replacements, autocast_entry, exact_float32
from weft.training.data.sample_split import MakeWhole
from weft.training.data.trees import forward, map_tensors, output_tensors
from weft.training.step.evaluating import evaluating

GRADIENT = "the gradient of "
_NOISE = 0.1
"""Standard deviation of the noise in biases and in weights of norms."""
ROUNDING = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 0.2, torch.float16: 0.1}
"""Allowed difference, relative to the largest entry of the whole tensor. Models of float64 may have norms that compute
in float32; the 16-bit formats are for models that cannot run in 32 bits."""
SMALL = 1e-3
"""A gradient is measured against this fraction of the model's largest entry, if its own largest entry is smaller."""
_NUM_DRAWN, _APART = 1_000_003, 7_919
"""Random numbers that are drawn, and reused in a cycle from another start for every parameter: to draw one per entry of
a large model takes minutes."""


class CannotCopyError(Exception):
    """The model cannot be copied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Outputs and gradients of a whole model for an example."""

    model: nn.Module
    """The copy that was tried."""
    found: dict[str, Tensor]
    """Tensors by name; empty if the output has no gradients."""
    is_wide: bool
    """The pass ran in 32 bits, instead of the model's own 16."""
    casts: bool
    """The model itself computes in fewer bits, under torch.autocast."""


def try_whole(model: nn.Module, inputs: Any, device: torch.device) -> Trial:
    """Run the pass on a copy of a whole model, on this rank's device if the model fits there."""
    before = next(model.parameters()).device
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    moves = device.type == "cuda" and before != device and 8 * num_bytes < torch.cuda.mem_get_info(device)[0]
    place = device if moves else before
    given = map_tensors(lambda leaf: leaf.to(place), inputs)
    is_half = any(parameter.dtype in HALF_DTYPES for parameter in model.parameters())
    # The last trial is the model as it is, whose errors the user sees.
    for has_noise, is_wide in ((True, is_half), (True, False), (False, False)):
        copied = _copy(model).to(place)
        if is_wide:
            copied.float()
        if has_noise:
            add_noise(copied)
        try:
            casts: list[object] = []
            with Replacements(autocast_entry(casts.append)):
                found = run_pass(copied, widened(given, is_wide))
        except Exception:
            if not has_noise:
                raise
            continue
        gradients = [tensor for what, tensor in found.items() if what.startswith(GRADIENT)]
        if not has_noise or all(bool(gradient.isfinite().all()) for gradient in gradients):
            break
    return Trial(
        model=copied, found={what: one.to(device) for what, one in found.items()}, is_wide=is_wide, casts=bool(casts)
    )


def run_pass(
    model: nn.Module,
    inputs: Any,
    *,
    call: Callable[[Any], Any] | None = None,
    part: Callable[[Tensor, MakeWhole], Tensor] | None = None,
) -> dict[str, Tensor]:
    """Outputs of a copy for an example, and the gradients of a fixed weighted sum of their entries.

    `part` takes this rank's part of a tensor that has the whole shape of an output.
    """
    with evaluating(model), torch.enable_grad(), Replacements(*exact_float32()):
        output = forward(model, inputs) if call is None else call(inputs)
        # Entries that are masked out with -inf are not compared.
        outputs = [leaf.masked_fill(~leaf.isfinite(), 0.0) for leaf in output_tensors(output) if leaf.requires_grad]
        if not outputs:
            return {}
        drawn = torch.Generator().manual_seed(0)

        def draw(shape: Sequence[int]) -> Tensor:
            return torch.randn(tuple(shape), generator=drawn, dtype=torch.float64)

        mixes = [(draw(o.shape) if part is None else part(o, draw)).to(o.device, o.dtype) for o in outputs]
        torch.autograd.backward(outputs, mixes)
    found = {GRADIENT + name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for parameter in model.parameters():
        parameter.grad = None
    found |= {f"output {number}": output.detach() for number, output in enumerate(outputs)}
    return {what: torch.view_as_real(one) if one.is_complex() else one for what, one in found.items()}


def widened(tree: Any, is_wide: bool = True) -> Any:
    """The same tree with 16-bit tensors in 32 bits."""
    return map_tensors(lambda one: one.float() if is_wide and one.dtype in HALF_DTYPES else one, tree)


def _copy(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except (torch.OutOfMemoryError, MemoryError, TypeError, RuntimeError) as error:
        raise CannotCopyError(f"{type(error).__name__}: {error}") from error


@torch.no_grad()
def add_noise(model: nn.Module) -> None:
    """Add noise to all weights, of a spread by which a layer's output is about as large as its input."""
    drawn = _drawn()
    looked_up = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for number, parameter in enumerate(model.parameters()):
        if not parameter.is_floating_point():
            continue
        spread = parameter[0].numel() ** -0.5 if parameter.dim() > 1 and len(parameter) else _NOISE
        first = number * _APART % _NUM_DRAWN
        noise = drawn[first : first + parameter.numel()]
        if len(noise) < parameter.numel():  # goes on from the beginning, as often as it takes
            missing = parameter.numel() - len(noise)
            noise = torch.cat([noise, drawn.repeat(-(-missing // _NUM_DRAWN))[:missing]])
        noise = noise.to(parameter.device, parameter.dtype).view(parameter.shape)
        parameter.add_(noise, alpha=1.0 if id(parameter) in looked_up else spread)


@functools.cache
def _drawn() -> Tensor:
    return torch.randn(_NUM_DRAWN, generator=torch.Generator().manual_seed(0))
