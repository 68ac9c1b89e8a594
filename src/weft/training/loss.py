"""From a user's loss to a sum and a count, so that the mean over a global batch is exact however it is cut.

A loss may be the built-in cross-entropy, a callable that returns the mean over its targets (weighted here by how many
there are: targets other than −100 if they are integers, else samples), or one that returns `(sum, count)` itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from weft.errors import ModelError, nearest
from weft.training.trees import tensors_of

IGNORED_TARGET = -100

LossFunction = Callable[[Any, Any], torch.Tensor | tuple[torch.Tensor, torch.Tensor | int | float]]
Count = int | float | torch.Tensor
"""A number of targets: plain where the targets were on the host, a tensor where reading it would block a device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerms:
    """One micro-batch's loss: the sum over its targets is value · multiplier."""

    value: torch.Tensor
    multiplier: Count
    count: Count
    own_count: bool
    """The loss counted by itself; the number was not known before the forward pass."""


def resolve_loss(loss: str | LossFunction) -> LossFunction:
    """The callable behind a loss given by name, or the callable itself."""
    if callable(loss):
        return loss
    if loss == "cross-entropy":
        return cross_entropy_sum
    raise ModelError(f'unknown loss "{loss}"; {nearest(loss, ["cross-entropy"])}; or give a callable')


def cross_entropy_sum(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The built-in loss: the sum over targets other than −100. Its count is taken from the targets, not from here."""
    wide = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    flat = wide.flatten(0, -2) if wide.dim() > 2 else wide
    return F.cross_entropy(flat, targets.flatten(), ignore_index=IGNORED_TARGET, reduction="sum"), 0


def loss_terms(function: LossFunction, output: Any, targets: Any, count: Count) -> LossTerms:
    """Call a loss and say what it returned, given the count its targets imply."""
    result = function(output, targets)
    if function is cross_entropy_sum:
        assert isinstance(result, tuple)
        return LossTerms(value=result[0], multiplier=1, count=count, own_count=False)
    if isinstance(result, tuple):
        value, own = result
        _refuse_unless_scalar(value)
        return LossTerms(value=value, multiplier=1, count=own, own_count=True)
    _refuse_unless_scalar(result)
    return LossTerms(value=result, multiplier=count, count=count, own_count=False)


def count_targets(targets: Any) -> Count:
    """How many targets a mean is taken over: those other than −100 if they are integers, else samples."""
    tensors = tensors_of(targets)
    if not tensors:
        raise ModelError(
            "the targets hold no tensor, so weft cannot tell how many there are; let the loss return (sum, count)"
        )
    first = tensors[0]
    if first.is_floating_point() or first.is_complex() or first.dtype == torch.bool:
        return first.shape[0]
    counted = (first != IGNORED_TARGET).sum()
    return counted if first.is_cuda else int(counted)


def output_of(result: Any) -> Any:
    """What a model computed: Hugging Face models wrap their logits."""
    return result if isinstance(result, torch.Tensor) else getattr(result, "logits", result)


def _refuse_unless_scalar(value: object) -> None:
    if not isinstance(value, torch.Tensor) or value.dim() != 0:
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise ModelError(f"the loss must return a scalar mean or (sum, count), got {shape}; take its mean or sum")
