"""BatchNorm with statistics of the whole microbatch over the data axis, so that it equals one process.

torch's SyncBatchNorm does the same, on GPUs only. Every rank contributes its count, mean and sum of squared deviations,
which are merged without cancellation (Chan et al.), so that unequal and empty parts are exact. Each layer takes one
all-gather of 2C + 1 numbers in the forward pass and one all-reduce of 2C in the backward pass. On a GPU the count stays
there: only a rank with fewer than 2 values per channel of its own has to wait for it, to know whether there are enough.

This does not cover layers that keep other running statistics (InstanceNorm's, a user's own moving averages): the
divergence check names those if ranks drift apart.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from weft.comm.collectives import all_gather, all_reduce
from weft.comm.group import Group
from weft.errors import ModelError
from weft.parallel.wrapping.wrap import Change, record_change
from weft.plan.model_refusals import STATISTICS_OF_ITS_OWN

log = logging.getLogger("weft")


class SynchronisedBatchNorm(_BatchNorm):
    """A BatchNorm that normalises by the statistics of all data ranks; a mixin of the module's own class."""

    weft_group: Group

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        if not self.training and self.track_running_stats:
            return super().forward(input)
        mean, variance, total = _merged_statistics(input.detach(), self.weft_group)
        if not input.is_cuda or input.numel() < 2 * input.shape[1]:
            known = int(total)
            if known == 0:  # no rank has a sample
                return input
            if known == 1:
                raise ModelError("BatchNorm needs more than 1 value per channel over all ranks; use a larger batch")
        # On a GPU a tensor also where it is known: ranks that round in another way would drift apart.
        count: int | torch.Tensor = total if input.is_cuda else known
        if self.training and self.track_running_stats:
            self._update_running(mean, variance, count)
        output: torch.Tensor = _Normalise.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, mean, variance, count, self.eps, self.weft_group
        )
        return output

    @torch.no_grad()
    def _update_running(self, mean: torch.Tensor, variance: torch.Tensor, count: int | torch.Tensor) -> None:
        assert self.running_mean is not None and self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        unbiased = variance * (count / (count - 1))
        for running, new in ((self.running_mean, mean), (self.running_var, unbiased)):
            momentum: float | torch.Tensor | None = self.momentum
            if momentum is None:  # the mean of all batches, whose number is on the device
                momentum = self.num_batches_tracked.to(running.dtype).reciprocal()
            running.lerp_(new.to(running.dtype), momentum)


def synchronise_batch_norms(model: nn.Module, group: Group) -> None:
    """Make every BatchNorm of a model synchronised, in place.

    The class is swapped instead of the module: parameters, hooks and every reference to the module stay as they are,
    and it is still an instance of the class it had. A class with a forward of its own, which would be lost, is refused.
    """
    found = {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}
    others = {name: module for name, module in found.items() if not isinstance(module, SynchronisedBatchNorm)}
    problems = [
        STATISTICS_OF_ITS_OWN.message(name=name, kind=type(module).__name__)
        for name, module in others.items()
        if type(module).forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward)
    ]
    if problems:
        raise ModelError(problems)
    kinds = {type(module) for module in others.values()}
    classes = {kind: type(f"Synchronised{kind.__name__}", (SynchronisedBatchNorm, kind), {}) for kind in kinds}
    for module in others.values():
        module.__class__ = classes[type(module)]
        record_change(
            module, Change(kind="class", by="data", why="takes its statistics over the microbatch of all data ranks")
        )
    for module in found.values():
        module.weft_group = group  # type: ignore[assignment]


def has_batch_norms(model: nn.Module) -> bool:
    return any(isinstance(module, _BatchNorm) for module in model.modules())


def running_statistics(model: nn.Module) -> list[torch.Tensor]:
    """The running means and variances of all BatchNorms, which may be other tensors after every step."""
    layers = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    found = [one for layer in layers for one in (layer.running_mean, layer.running_var)]
    return [one for one in found if one is not None]


def warn_of_microbatches(model: nn.Module, num_microbatches: int) -> None:
    """Warn that a BatchNorm in training normalises each microbatch, which another number of them would change.

    Statistics of the whole step would need all its activations at once: each layer's depend on the layers before it.
    """
    found = [name for name, module in model.named_modules() if isinstance(module, _BatchNorm) and module.training]
    if found and num_microbatches > 1:
        log.warning(
            "[step] microbatches = %d: %d BatchNorm layers (%s first) normalise each microbatch by its own samples, as "
            "any accumulation of gradients does, so this run is not that of one whole batch. For the statistics of the "
            'whole step set microbatches = 1, and for memory use more data ranks or [recompute] policy = "full"',
            num_microbatches,
            len(found),
            found[0],
        )


def _merged_statistics(input: torch.Tensor, group: Group) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean and biased variance of each channel over all ranks, and the number of values per channel."""
    dims, channels = (0, *range(2, input.dim())), input.shape[1]
    wide = input if input.dtype == torch.float64 else input.float()
    local_count = input.numel() // channels
    local = wide.new_zeros(2 * channels + 1)
    if local_count:
        variance, mean = torch.var_mean(wide, dims, correction=0)
        local[:channels], local[channels:-1] = mean, variance * local_count
    local[-1:].fill_(local_count)  # a number that is assigned to one entry is copied from the host
    gathered = local.new_empty(group.size, local.numel())
    all_gather(gathered.view(-1), local, group)
    counts = gathered[:, -1:]
    total = counts.sum()
    means, deviations = gathered[:, :channels], gathered[:, channels:-1]
    mean = (means * counts).sum(0) / total
    variance = (deviations + counts * (means - mean) ** 2).sum(0) / total
    return mean, variance, total


def _per_channel(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return values.view(1, -1, *[1] * (like.dim() - 2))


class _Normalise(torch.autograd.Function):
    """y = (x − mean) / sqrt(variance + eps) · weight + bias, with mean and variance functions of every rank's x."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        variance: torch.Tensor,
        count: int | torch.Tensor,
        eps: float,
        group: Group,
    ) -> torch.Tensor:
        inverse = torch.rsqrt(variance + eps)
        normalised = (input - _per_channel(mean, input)) * _per_channel(inverse, input)
        ctx.save_for_backward(normalised, inverse, weight)
        ctx.count, ctx.group, ctx.bias_dtype = count, group, None if bias is None else bias.dtype
        output = normalised
        if weight is not None:
            output = output * _per_channel(weight, input)
        if bias is not None:
            output = output + _per_channel(bias, input)
        return output.to(input.dtype)

    @staticmethod
    @once_differentiable  # a second derivative would silently miss the other ranks' part
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        normalised, inverse, weight = ctx.saved_tensors
        grad = grads[0].to(normalised.dtype)
        dims, channels = (0, *range(2, grad.dim())), grad.shape[1]
        local = torch.cat([grad.sum(dims), (grad * normalised).sum(dims)])
        grad_bias, grad_weight = local[:channels].clone(), local[channels:].clone()
        all_reduce(local, ctx.group)
        local /= ctx.count
        scale = inverse if weight is None else inverse * weight
        centred = grad - _per_channel(local[:channels], grad) - normalised * _per_channel(local[channels:], grad)
        grad_input = (centred * _per_channel(scale, grad)).to(grads[0].dtype)
        weight_part = None if weight is None else grad_weight.to(weight.dtype)
        bias_part = None if ctx.bias_dtype is None else grad_bias.to(ctx.bias_dtype)
        return grad_input, weight_part, bias_part, *[None] * 5
