"""Test that a user's loss may be computed on some tokens at a time, with its first targets.

Ranks that share a sequence each compute the loss of their own tokens, and the losses are summed. That equals the loss
of the whole only if no token's part depends on another's: not if the loss shifts targets itself, or divides by a
property of the sequence. So before its first use, the loss of all of a rank's tokens is compared with that of two
halves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from weft.comm.collectives import all_reduce
from weft.comm.group import Group
from weft.errors import ModelError
from weft.parallel.tensor.cross_entropy import IGNORED_TARGET
from weft.plan.model_refusals import LOSS_OVER_TOKENS
from weft.training.data.trees import map_output, map_tensors, output_tensors, tensors_of
from weft.training.step.loss import Loss, LossFunction, are_samples_counted, count_targets, loss_terms

_TOKEN_DIM = 1
_MOST_SAMPLES, _MOST_TOKENS = 2, 64
_ALLOWED = {torch.float64: 1e-5, torch.float32: 1e-4}
"""Allowed relative difference, by the format of the outputs, which losses may narrow; 0.01 for 16 bits."""


def probed(loss: Loss, group: Group, outside: Callable[[], AbstractContextManager[None]]) -> Loss:
    """The same loss, tested before its first use, unless it is the built-in one.

    `group` shares sequences. Losses run `outside` of the pass's replacements: one may call a model of its own.
    """
    return loss if loss.counts_targets else replace(loss, function=_ProbedLoss(loss, group, outside))


class _ProbedLoss:
    """A loss function that is tested before its first use."""

    def __init__(self, loss: Loss, group: Group, outside: Callable[[], AbstractContextManager[None]]) -> None:
        self._loss = loss
        self._group = group
        self._outside = outside
        self._is_probed = False

    def __call__(self, output: Any, targets: Any) -> Any:
        with self._outside():
            if not self._is_probed:
                self._probe(output, targets)
            function: LossFunction = self._loss.function
            return function(output, targets)

    @torch.no_grad()
    def _probe(self, output: Any, targets: Any) -> None:
        found = _excess(self._loss, output, targets)
        told = [0.0, 0.0] if found is None else [1.0, found]
        everywhere = torch.tensor(told, dtype=torch.float64)
        all_reduce(everywhere, self._group, op="max")
        self._is_probed, worst = bool(everywhere[0]), float(everywhere[1])
        if worst > 1:
            raise ModelError(LOSS_OVER_TOKENS.message(excess=worst))


def _excess(loss: Loss, output: Any, targets: Any) -> float | None:
    """Difference between the means of all tokens and of both halves, as a multiple of what rounding allows; None if
    these targets do not show it."""
    own = [tensor.dtype for tensor in output_tensors(output) if tensor.is_floating_point()]
    for dtype in (torch.float64, *own[:1]):
        found = _difference(loss, output, targets, dtype)
        if found is not None:
            return found / _ALLOWED.get(dtype, 1e-2)
    return None


def _difference(loss: Loss, output: Any, targets: Any, dtype: torch.dtype) -> float | None:
    """The relative difference for random outputs of this dtype."""
    lengths = {tensor.shape[_TOKEN_DIM] for tensor in tensors_of(targets) if tensor.dim() > _TOKEN_DIM}
    if len(lengths) != 1 or min(lengths) < 2:
        return None
    first = _first_counted(targets, max(lengths))
    num_tokens = min(max(lengths) - first, _MOST_TOKENS)
    if num_tokens < 4:  # a half of one token may have nothing to count
        return None
    drawn = torch.Generator().manual_seed(0)

    def draw(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        return torch.randn(tensor.shape, generator=drawn).to(tensor.device, dtype)

    few = map_output(draw, _narrowed(output, first, first + num_tokens, max(lengths), map_output))
    goal = _narrowed(targets, first, first + num_tokens, max(lengths), map_tensors)
    middle = num_tokens // 2

    def sum_and_count(start: int, stop: int) -> tuple[float, float]:
        goal_part = _narrowed(goal, start, stop, num_tokens, map_tensors)
        count = count_targets(goal_part) * (stop - start if are_samples_counted(goal_part) else 1)
        terms = loss_terms(loss, _narrowed(few, start, stop, num_tokens, map_output), goal_part, int(count))
        return float(terms.value * terms.multiplier), float(terms.count)

    try:
        whole, first_half, second_half = (
            sum_and_count(*part) for part in ((0, num_tokens), (0, middle), (middle, num_tokens))
        )
    except Exception:  # the loss may still accept real outputs
        return None
    count = first_half[1] + second_half[1]
    if not whole[1] or not count:
        return None
    mean = whole[0] / whole[1]
    found = abs((first_half[0] + second_half[0]) / count - mean) / max(abs(mean), 1e-6)
    return None if math.isnan(found) else found


def _first_counted(targets: Any, num_tokens: int) -> int:
    """The first token that counts in a few samples, at least 4 tokens before the end if there are as many."""
    first = tensors_of(targets)[0][:_MOST_SAMPLES]
    if are_samples_counted(targets) or first.dim() <= _TOKEN_DIM:
        return 0
    counts = (first != IGNORED_TARGET).flatten(2).any(-1) if first.dim() > 2 else first != IGNORED_TARGET
    return min(int(counts.any(0).int().argmax()), max(num_tokens - 4, 0))


def _narrowed(tree: Any, start: int, stop: int, length: int, map_all: Callable[..., Any]) -> Any:
    """The tokens from start to stop of a few samples."""

    def narrow(tensor: torch.Tensor) -> torch.Tensor:
        few = tensor[:_MOST_SAMPLES] if tensor.dim() else tensor
        has_tokens = few.dim() > _TOKEN_DIM and few.shape[_TOKEN_DIM] == length
        return few[:, start:stop].contiguous() if has_tokens else few

    return map_all(narrow, tree)
