"""One pass of an example through a model, forward and backward, so that two models can be compared by it.

A model that has learned nothing yet hides much: scores of attention are near 0, so that positions hardly matter, and
some layers are 0 altogether. And 16 bits hide what is a hundredth of the largest entry. So a copy is tried: with
weights as large as its layers bear, and in 32 bits; if the model cannot do with that, as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weft.parallel.wrapping.replacements import Replacements, autocast_entry, exact_float32
from weft.training.data.sample_split import MakeWhole
from weft.training.data.trees import map_tensors, output_tensors
from weft.training.step.evaluating import evaluating
from weft.training.step.loss import forward

GRADIENT = "the gradient of "
_NOISE = 0.1
"""Of biases and of weights of norms."""
_NUM_DRAWN, _APART = 1_000_003, 7_919
"""Random numbers, taken round and round, from another place on for every parameter: to draw one for each entry of a
large model takes minutes."""
_HALF = (torch.float16, torch.bfloat16)


class CannotCopyError(Exception):
    """There is no copy of the model to try."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What a whole model made of an example."""

    model: nn.Module
    """The copy that was tried."""
    found: dict[str, Tensor]
    """Outputs and gradients by name; empty if nothing learns from its output."""
    is_wide: bool
    """It was tried in 32 bits, instead of its own 16."""
    casts: bool
    """The model itself computes in fewer bits, under torch.autocast."""


def try_whole(model: nn.Module, inputs: Any, device: torch.device) -> Trial:
    """On this rank's device if the whole model fits there."""
    before = next(model.parameters()).device
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    moves = device.type == "cuda" and before != device and 8 * num_bytes < torch.cuda.mem_get_info(device)[0]
    place = device if moves else before
    given = map_tensors(lambda leaf: leaf.to(place), inputs)
    is_half = any(parameter.dtype in _HALF for parameter in model.parameters())
    # The last is the model as it is, whose errors are the user's to see.
    for has_noise, is_wide in ((True, is_half), (True, False), (False, False)):
        copied = _copy(model).to(place)
        if is_wide:
            copied.float()
        if has_noise:
            _add_noise(copied)
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
    """The output of a copy for an example, and every gradient of a fixed mix of its entries.

    `part` takes this rank's part of something of the shape that an output has in the whole.
    """
    with evaluating(model), torch.enable_grad(), Replacements(*exact_float32()):
        output = forward(model, inputs) if call is None else call(inputs)
        # What is masked out with -inf says nothing.
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
    """The same with 32 bits where there were 16."""
    return map_tensors(lambda one: one.float() if is_wide and one.dtype in _HALF else one, tree)


def _copy(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except (torch.OutOfMemoryError, MemoryError, TypeError, RuntimeError) as error:
        raise CannotCopyError(f"{type(error).__name__}: {error}") from error


@torch.no_grad()
def _add_noise(model: nn.Module) -> None:
    """Weights that are not small: each has the spread that keeps the size of what a layer is given."""
    drawn = torch.randn(_NUM_DRAWN, generator=torch.Generator().manual_seed(0))
    looked_up = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for number, parameter in enumerate(model.parameters()):
        if not parameter.is_floating_point():
            continue
        spread = parameter[0].numel() ** -0.5 if parameter.dim() > 1 and len(parameter) else _NOISE
        others = drawn.roll(number * _APART).to(parameter.device, parameter.dtype)
        noise = others.repeat(-(-parameter.numel() // _NUM_DRAWN))[: parameter.numel()].view(parameter.shape)
        parameter.add_(noise, alpha=1.0 if id(parameter) in looked_up else spread)
