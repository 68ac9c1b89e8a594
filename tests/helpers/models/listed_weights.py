"""A model whose weights lie in a list and are used by a function of its own, which torch hands them to as they are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Product(torch.autograd.Function):
    """A product of matrices."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(values, weight)
        return values @ weight.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        values, weight = ctx.saved_tensors
        return gradients[0] @ weight.t(), values.t() @ gradients[0]


class ListedWeights(nn.Module):
    """Three layers, for batches of `oracle.batch_of`."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        sizes = ((4, 6), (6, 5), (5, 3))
        self.weights = nn.ParameterList(torch.randn(one, dtype=torch.float64, generator=generator) / 3 for one in sizes)

    def forward(self, inputs: Tensor) -> Tensor:
        for weight in self.weights:
            inputs = torch.tanh(Product.apply(inputs, weight))
        return inputs
