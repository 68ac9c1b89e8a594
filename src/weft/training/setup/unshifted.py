"""A warning where the targets of a language model are its own inputs: labels that nobody shifted.

Hugging Face's models shift labels in their own loss; weft's built-in loss compares every output with the target at its
own place. Given labels as those models take them, a model would learn to copy its input, with a loss that looks fine.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from weft.parallel.tensor.cross_entropy import IGNORED_TARGET
from weft.training.data.trees import tensors_of

log = logging.getLogger("weft")


def warn_of_unshifted(inputs: Any, targets: Any) -> bool:
    """Warn if some input of tokens equals the targets, wherever these are not −100; returns whether it does."""
    goals = tensors_of(targets)
    if not goals or goals[0].dim() != 2 or goals[0].is_floating_point() or goals[0].dtype == torch.bool:
        return False
    goal = goals[0]
    counts = goal != IGNORED_TARGET
    if int(counts.sum()) < 2 or goal[counts].unique().numel() < 2:  # too few to tell
        return False
    for tokens in tensors_of(inputs):
        if tokens.shape == goal.shape and not tokens.is_floating_point() and tokens.dtype != torch.bool:
            if torch.equal(tokens.to(goal)[counts], goal[counts]):
                log.warning(
                    "the targets are the inputs: the model is trained to copy its input, if it sees the token it has "
                    "to predict. The built-in loss does not shift: give each token's successor as its target "
                    "(inputs[:, :-1], targets[:, 1:])"
                )
                return True
    return False
