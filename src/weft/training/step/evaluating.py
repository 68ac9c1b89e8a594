"""Evaluation mode for a while, after which each module has the mode it had.

`model.train()` would also change modules that the user set to evaluation, such as a frozen BatchNorm.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Context with the model in evaluation mode and without gradients."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
