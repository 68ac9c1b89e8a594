"""A user's loss as a sum and a count, so that the mean over a global batch is exact however the batch is cut.

A loss is the built-in cross-entropy, a callable that returns the mean over its targets (weighted here by their number:
targets other than −100 if they are integers, else samples), or one that returns `(sum, count)` itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from weft.dtypes import HALF_DTYPES
from weft.errors import ModelError, nearest
from weft.parallel.tensor.cross_entropy import IGNORED_TARGET
from weft.training.data.trees import output_tensors, tensors_of

LossFunction = Callable[[Any, Any], torch.Tensor | tuple[torch.Tensor, torch.Tensor | int | float]]
Count = int | float | torch.Tensor
"""A number of targets: a plain number if the targets were on the host, else a tensor, which need not be waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A loss as the trainer calls it."""

    function: LossFunction
    counts_targets: bool = False
    """The function returns a plain sum over the targets that `count_targets` finds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerms:
    """One microbatch's loss: the sum over its targets is value · multiplier."""

    value: torch.Tensor
    multiplier: Count
    count: Count
    own_count: bool
    """The loss returned its own count, which was not known before the forward pass."""


def resolve_loss(loss: str | LossFunction, *, compiled: bool = False) -> Loss:
    """The loss of a name or a callable. The built-in one can be compiled: eager, it is a fifth of a GPU's step."""
    if callable(loss):
        return Loss(function=loss)
    if loss == "cross-entropy":
        function = torch.compile(cross_entropy_sum) if compiled else cross_entropy_sum
        return Loss(function=function, counts_targets=True)
    raise ModelError(f'unknown loss "{loss}"; {nearest(loss, ["cross-entropy"])}; or give a callable')


def cross_entropy_sum(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The built-in loss: the sum over targets other than −100."""
    wide = logits.float() if logits.dtype in HALF_DTYPES else logits
    flat = wide.flatten(0, -2) if wide.dim() > 2 else wide
    return F.cross_entropy(flat, targets.flatten(), ignore_index=IGNORED_TARGET, reduction="sum")


def loss_terms(loss: Loss, output: Any, targets: Any, count: Count) -> LossTerms:
    """Call a loss whose targets number `count`."""
    if loss.counts_targets and not (isinstance(output, torch.Tensor) and output.dim()):
        raise ModelError(_not_logits(output))
    result = loss.function(output, targets)
    if loss.counts_targets:
        assert isinstance(result, torch.Tensor)
        return LossTerms(value=result, multiplier=1, count=count, own_count=False)
    if isinstance(result, tuple):
        value, own = result
        _refuse_unless_scalar(value)
        is_known = not (isinstance(own, torch.Tensor) and own.is_cuda)
        if torch.is_grad_enabled() and (not value.requires_grad or (is_known and own == 0)):
            value = value + no_loss(output)  # others wait for this rank in the backward pass
        return LossTerms(value=value, multiplier=1, count=own, own_count=True)
    _refuse_unless_scalar(result)
    if isinstance(count, int) and count == 0:  # the mean over no targets is NaN, their sum is nothing
        result = no_loss(output)
    return LossTerms(value=result, multiplier=count, count=count, own_count=False)


def no_loss(output: Any) -> torch.Tensor:
    """A loss of zero that depends on the output, so that its backward pass runs, with zero gradients."""
    tensors = [tensor for tensor in output_tensors(output) if tensor.requires_grad]
    nothing = [(tensor if tensor.dim() else tensor.reshape(1))[:0].sum() for tensor in tensors]
    return sum(nothing[1:], nothing[0]) if nothing else torch.zeros((), requires_grad=True)


def count_targets(targets: Any) -> Count:
    """The number of targets in a mean: those other than −100 if they are integers, else samples."""
    tensors = tensors_of(targets)
    if not tensors:
        raise ModelError(
            "the targets hold no tensor, so weft cannot tell how many there are; let the loss return (sum, count)"
        )
    first = tensors[0]
    if are_samples_counted(targets):
        return first.shape[0]
    counted = (first != IGNORED_TARGET).sum()
    return counted if first.is_cuda else int(counted)


def are_samples_counted(targets: Any) -> bool:
    """True if a mean over these targets is one over samples, since they are not integers."""
    first = tensors_of(targets)[0]
    return first.is_floating_point() or first.is_complex() or first.dtype == torch.bool


def _not_logits(output: Any) -> str:
    """What a model returned that the built-in loss cannot take, and how to take it."""

    def shown(value: Any) -> str:
        return f"a tensor of {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"

    kind, which = type(output).__name__, "output"
    what = shown(output)
    if isinstance(output, tuple | list):
        what, which = f"a {kind} of {len(output)} ({', '.join(map(shown, output))})", "output[0]"
    elif isinstance(output, Mapping):
        what = f"a {kind} of {' and '.join(f'{name} ({shown(value)})' for name, value in output.items())}"
        which = f'output["{"logits" if "logits" in output else next(iter(output), "logits")}"]'
    return (
        f'the model returns {what}, and loss="cross-entropy" takes logits alone, a tensor of (samples, ..., classes); '
        f"return them alone, or give a loss of your own: loss=lambda output, targets: F.cross_entropy({which}, targets)"
    )


def _refuse_unless_scalar(value: object) -> None:
    if not isinstance(value, torch.Tensor) or value.dim() != 0:
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise ModelError(f"the loss must return a scalar mean or (sum, count), got {shape}; take its mean or sum")
