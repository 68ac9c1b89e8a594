"""A model on images split by rows, compared with one process: outputs, gradients and running statistics."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from meshes import mesh_with
from torch import Tensor, nn

from weft.comm.collectives import all_reduce
from weft.comm.group import Group
from weft.parallel.spatial.spatial_parallel import SpatialParallel
from weft.parallel.state.batchnorm import synchronise_batch_norms
from weft.plan.plan import Axes, Comm, Plan


def rows_group(num_ranks: int, **comm: str) -> Group:
    key = ("ring", "neighbours")
    return mesh_with(Plan(axes=Axes(ring=num_ranks), comm=Comm(**comm)), key).group(*key)


def images(height: int, *, channels: int = 3, samples: int = 2, width: int = 11) -> Tensor:
    generator = torch.Generator().manual_seed(height)
    return torch.randn(samples, channels, height, width, generator=generator, dtype=torch.float64)


def graded(call: Callable[[Tensor], Tensor], model: nn.Module, inputs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The output, and gradients of a loss that weights its entries differently; those of the inputs under "inputs"."""
    inputs = inputs.clone().requires_grad_()
    output = call(inputs)
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape)
    ((output * weights).sum() + (output**2).sum()).backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert inputs.grad is not None
    return output.detach(), {"inputs": inputs.grad, **found}


def check(model: nn.Module, inputs: Tensor, num_ranks: int) -> None:
    """Compare the split model with the whole one; every rank has the whole loss, so summed gradients are divided."""
    torch.manual_seed(1)
    model = model.double()
    alone, group = copy.deepcopy(model), rows_group(num_ranks)
    synchronise_batch_norms(model, group)
    rows = SpatialParallel(group)
    rows.prepare(model)
    expected, true = graded(alone, alone, inputs)
    output, found = graded(lambda whole: rows.call(model, whole), model, inputs)
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-12)
    assert found.keys() == true.keys()
    largest = max(float(gradient.abs().max()) for gradient in true.values())
    for name, gradient in found.items():
        summed = gradient.clone()
        all_reduce(summed, group)
        scale = max(float(true[name].abs().max()), 1e-3 * largest, 1e-9)  # a bias before a norm has only rounding
        off = float((summed / num_ranks - true[name]).abs().max()) / scale
        assert off < 1e-10, f"gradient of {name} is off by {off:.1e}"
    for (name, ours), theirs in zip(model.named_buffers(), alone.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12, msg=name)
