"""A model's profile, without its memory: one training step on fake tensors, recorded storage by storage.

The step is the trainer's: forward, loss, backward, every gradient of a parameter removed as soon as it is computed
(a sync keeps gradients in buffers of its own). It runs twice, with the given microbatch and with one of twice the
samples, to separate what grows with samples from what does not. The model may be on any device, also on meta; neither
it nor the random state is changed.

A model or loss that reads the *values* of tensors cannot be profiled. Kernels' own workspaces are not seen.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)

from weft.blueprint import Blueprint, find_blueprint
from weft.errors import ModelError
from weft.measure.recorder import SIZES, Recorder
from weft.parallel.state.batchnorm import has_batch_norms
from weft.parallel.zero.grouping import cast_between_layers, compute_dtypes, describe_parameters
from weft.plan.plan import Plan, Precision
from weft.profiles.model import ModelProfile, Segment, Size
from weft.training.data.trees import map_tensors, num_samples, tensors_of
from weft.training.loss.loss import Loss, LossFunction, resolve_loss
from weft.training.step.precision import Caller

_VALUE_ERRORS = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)


def profile_model(
    model: nn.Module,
    inputs: Any,
    targets: Any,
    *,
    loss: str | LossFunction = "cross-entropy",
    compute: str = "model",
    device: torch.device | str | None = None,
) -> ModelProfile:
    """Describe a model by one microbatch, of which only shapes and dtypes matter.

    loss     as given to `parallelize`
    compute  the plan's `[precision] compute`
    device   the kind of device to profile for; None: the model's own, or the CPU for a model without memory
    """
    plan = Plan(precision=Precision(compute=compute))
    named_model: nn.Module = getattr(model, "_orig_mod", model)
    if not any(parameter.requires_grad for parameter in named_model.parameters()):
        raise ModelError("the model has no parameter to train, so it has no backward pass; set requires_grad on some")
    blueprint, samples, where = find_blueprint(named_model), num_samples(inputs), _device_of(named_model, device)
    once, twice = (
        _watch_step(named_model, blueprint, _batch(inputs, targets, times), resolve_loss(loss), plan, where)
        for times in (1, 2)
    )

    def line(what: str, at: int = 0) -> Size:
        """The line through the bytes of `samples` and of twice as many."""
        sample_bytes = (twice[what][at] - once[what][at]) // samples
        return Size(fixed_bytes=once[what][at] - sample_bytes * samples, sample_bytes=sample_bytes)

    return ModelProfile(
        parameters=describe_parameters(named_model, blueprint.blocks),
        blocks=blueprint.blocks,
        segments=tuple(
            Segment(name=name, **{what: line(what, at) for what in SIZES})
            for at, name in enumerate(("prelude", *blueprint.blocks, "postlude"))
        ),
        buffer_bytes=sum(buffer.nbytes for buffer in named_model.buffers()),
        batch_norms=has_batch_norms(named_model),
        batch=line("batch"),
        output=line("output"),
        compute=compute,
        device=where.type,
        samples=samples,
    )


def _device_of(model: nn.Module, device: torch.device | str | None) -> torch.device:
    if device is None:
        first = next(model.parameters()).device
        return torch.device("cpu") if first.type == "meta" else first
    asked = torch.device(device)
    if asked.type != "cpu" and not torch.get_device_module(asked).is_available():
        raise ModelError(f'there is no "{asked.type}" device here, whose kernels a profile for it needs; use "cpu"')
    return asked


def _batch(inputs: Any, targets: Any, times: int) -> tuple[Any, Any]:
    """Meta tensors like a batch's, of `times` as many samples."""

    def enlarge(tensor: torch.Tensor) -> torch.Tensor:
        shape = (times * tensor.shape[0], *tensor.shape[1:]) if tensor.dim() else ()
        return torch.empty(shape, dtype=tensor.dtype, device="meta")

    return map_tensors(enlarge, inputs), map_tensors(enlarge, targets)


def _watch_step(
    model: nn.Module, blueprint: Blueprint, batch: tuple[Any, Any], loss: Loss, plan: Plan, device: torch.device
) -> dict[str, list[int]]:
    """One training step of a copy of the model on fake tensors: bytes of each segment, of the batch and the output."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    copied = _copy_without_memory(model, plan, device, fake)
    with fake:
        inputs, targets = (map_tensors(lambda tensor: _like(tensor, tensor.dtype, device), tree) for tree in batch)
        batch_tensors = [*tensors_of(inputs), *tensors_of(targets)]
        recorder = Recorder(
            [copied.get_submodule(name) for name in blueprint.blocks],
            others=[*copied.parameters(), *copied.buffers(), *batch_tensors],
        )
        call = Caller(copied, plan, widens=not loss.counts_targets)
        try:
            with recorder.live, torch.autograd.graph.saved_tensors_hooks(recorder.save, lambda tensor: tensor):
                output = call(inputs)
                recorder.enter_postlude()
                output_bytes = sum(tensor.nbytes for tensor in tensors_of(output))
                result = loss.function(output, targets)
                del output
                recorder.enter_backward()
                (result[0] if isinstance(result, tuple) else result).backward()
        except _VALUE_ERRORS as error:
            raise ModelError(
                f"the model or its loss reads values of tensors, and a profile is made without any: {error}; "
                "compute with tensors instead"
            ) from error
    batch_bytes = sum(tensor.nbytes for tensor in batch_tensors)
    return {**recorder.sizes(), "batch": [batch_bytes], "output": [output_bytes]}


def _copy_without_memory(model: nn.Module, plan: Plan, device: torch.device, fake: FakeTensorMode) -> nn.Module:
    """A copy whose parameters, in the dtype they compute in, and buffers are fake tensors."""
    dtypes = compute_dtypes(model, plan)
    with fake:
        copies: dict[int, Any] = {id(buffer): _like(buffer, buffer.dtype, device) for buffer in model.buffers()}
        for name, parameter in model.named_parameters():
            made = nn.Parameter(_like(parameter, dtypes[name], device), requires_grad=parameter.requires_grad)
            if parameter.requires_grad:
                made.register_post_accumulate_grad_hook(_drop_gradient)
            copies[id(parameter)] = made
    copied = copy.deepcopy(model, copies)
    if plan.precision.compute != "model":
        cast_between_layers(copied)
    return copied


def _drop_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None


def _like(tensor: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=device)
