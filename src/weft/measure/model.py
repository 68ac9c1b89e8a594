"""From a model to its profile, without its memory: one training step on fake tensors, watched storage by storage.

The step is the trainer's: forward, loss, backward, every gradient of a parameter taken away as soon as it is there
(a sync keeps gradients in buffers of its own). It is run twice, with the given micro-batch and with one of twice the
samples, so that what grows with samples is told apart from what does not. The model may be anywhere, also on the meta
device; neither it nor the random state is changed.

A model or loss that reads the *values* of tensors (`.item()`, `if x.max() > 0`) cannot be profiled. Kernels' own
workspaces are not seen (`liveness.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch.func import functional_call
from torch.utils._pytree import tree_leaves

from weft.blueprint import Blueprint, find_blueprint
from weft.errors import ModelError
from weft.measure.liveness import LiveBytes
from weft.parallel.units import flat_kinds, make_members
from weft.plan.plan import Data, Plan, Precision
from weft.profiles.model import ModelProfile, ParameterProfile, Segment, Size
from weft.training.loss import Loss, LossFunction, resolve_loss
from weft.training.precision import Caller
from weft.training.trees import map_tensors, num_samples, tensors_of

_KEPT_PRODUCTS = tuple(getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "linear", "convolution"))
"""Whose results selective recomputation keeps (`parallel/recompute.py`)."""

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
    """Describe a model by one micro-batch, of which only shapes and dtypes matter.

    loss     as given to `parallelize`
    compute  the plan's `[precision] compute`
    device   the kind of device to profile for; None: the model's own, or the CPU for a model without memory
    """
    plan = Plan(precision=Precision(compute=compute))
    named_model: nn.Module = getattr(model, "_orig_mod", model)
    blueprint, samples, where = find_blueprint(named_model), num_samples(inputs), _device_of(named_model, device)
    once, twice = (
        _watch_step(named_model, blueprint, _batch(inputs, targets, times), resolve_loss(loss), plan, where)
        for times in (1, 2)
    )
    return ModelProfile(
        parameters=_describe_parameters(named_model, blueprint),
        blocks=blueprint.blocks,
        segments=tuple(
            Segment(name=name, **{what: _line(once.sizes[what][at], twice.sizes[what][at], samples) for what in _SIZES})
            for at, name in enumerate(("prelude", *blueprint.blocks, "postlude"))
        ),
        buffer_bytes=sum(buffer.nbytes for buffer in named_model.buffers()),
        batch=_line(once.batch_bytes, twice.batch_bytes, samples),
        output=_line(once.output_bytes, twice.output_bytes, samples),
        compute=compute,
        device=where.type,
        samples=samples,
    )


def _line(at_once: int, at_twice: int, samples: int) -> Size:
    """The line through the bytes of `samples` and of twice as many."""
    sample_bytes = (at_twice - at_once) // samples
    return Size(fixed_bytes=at_once - sample_bytes * samples, sample_bytes=sample_bytes)


def _describe_parameters(model: nn.Module, blueprint: Blueprint) -> tuple[ParameterProfile, ...]:
    units = make_members(model, blueprint, Plan(data=Data(shard="parameters")))
    unit_of = {name: members.unit for members in units for name, _ in members.named}
    block_of: dict[str, int | None] = {name: number for number, name in enumerate(blueprint.blocks)}
    casts = [flat_kinds(model, Plan(precision=Precision(compute=compute))) for compute in ("bf16", "fp16")]
    return tuple(
        ParameterProfile(
            name=name,
            shape=tuple(parameter.shape),
            item_bytes=parameter.element_size(),
            kind=str(parameter.dtype),
            block=block_of.get(unit_of[name]),
            trainable=parameter.requires_grad,
            keeps_dtype=all(kinds[name].compute == parameter.dtype for kinds in casts),
        )
        for name, parameter in model.named_parameters()
    )


def _device_of(model: nn.Module, device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    first = next(model.parameters(), torch.empty(0)).device
    return torch.device("cpu") if first.type == "meta" else first


def _batch(inputs: Any, targets: Any, times: int) -> tuple[Any, Any]:
    """Meta tensors like a batch's, of `times` as many samples."""

    def enlarge(tensor: torch.Tensor) -> torch.Tensor:
        shape = (times * tensor.shape[0], *tensor.shape[1:]) if tensor.dim() else ()
        return torch.empty(shape, dtype=tensor.dtype, device="meta")

    return map_tensors(enlarge, inputs), map_tensors(enlarge, targets)


_SIZES = ("saved", "selective", "inputs", "forward_peak", "backward_peak")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Watched:
    """What one step showed."""

    sizes: dict[str, list[int]]
    """By the names of `Segment`'s sizes: bytes of each segment."""
    batch_bytes: int
    output_bytes: int


def _watch_step(
    model: nn.Module,
    blueprint: Blueprint,
    batch: tuple[Any, Any],
    loss: Loss,
    plan: Plan,
    device: torch.device,
) -> _Watched:
    """One training step of the model on fake tensors."""
    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        state = _fake_state(model, plan, device)
        inputs, targets = (map_tensors(lambda tensor: _fake(tensor, tensor.dtype, device), tree) for tree in batch)
        batch_tensors = [*tensors_of(inputs), *tensors_of(targets)]
        recorder = _Recorder(len(blueprint.blocks), others=[*state.values(), *batch_tensors])
        for number, name in enumerate(blueprint.blocks):
            recorder.attach(model.get_submodule(name), number, stack)

        def run_model(*args: Any, **kwargs: Any) -> Any:
            return functional_call(model, state, args, kwargs, tie_weights=False)

        call = Caller(run_model, plan, widens=not loss.counts_targets)
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
    return _Watched(sizes=recorder.sizes(), batch_bytes=batch_bytes, output_bytes=output_bytes)


def _fake_state(model: nn.Module, plan: Plan, device: torch.device) -> dict[str, torch.Tensor]:
    """A fake tensor for every name of a parameter or buffer, in the dtype it computes in; tied names have the same."""
    kinds = flat_kinds(model, plan)
    fakes = {id(buffer): _fake(buffer, buffer.dtype, device) for buffer in model.buffers()}
    for name, parameter in model.named_parameters():
        fake = _fake(parameter, kinds[name].compute, device).requires_grad_(parameter.requires_grad)
        if parameter.requires_grad:
            fake.register_post_accumulate_grad_hook(_drop_gradient)
        fakes[id(parameter)] = fake
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: fakes[id(tensor)] for name, tensor in named}


def _drop_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None


def _fake(tensor: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=device)


@dataclass(frozen=True, slots=True)
class _Event:
    """A segment came to hold a storage, as something saved, as a block's input, or as a matrix product."""

    kind: str
    segment: int
    storage: int
    num_bytes: int


class _Recorder:
    """Which segment the step is in, and what each one came to hold. Segment 0 is the prelude, the last the postlude.

    What the model does between two blocks counts as the first one's.
    """

    def __init__(self, num_blocks: int, *, others: Sequence[torch.Tensor]) -> None:
        self.live = LiveBytes(others=others, made=self._made)
        self._num_blocks = num_blocks
        self._segment, self._phase = 0, "forward"
        self._events: list[_Event] = []
        self._peaks = {"forward": [0] * (num_blocks + 2), "backward": [0] * (num_blocks + 2)}

    def attach(self, block: nn.Module, number: int, stack: ExitStack) -> None:
        """Follow the step through a block until the stack is closed."""

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._enter("forward", number + 1)
            for tensor in _tensors((args, kwargs)):
                self._note("input", tensor)
                if number == 0:
                    self._on_gradient(tensor, 0)

        def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            for tensor in _tensors(output):
                self._on_gradient(tensor, number + 1)
            if number == self._num_blocks - 1:
                self.enter_postlude()

        stack.callback(block.register_forward_pre_hook(before, with_kwargs=True).remove)
        stack.callback(block.register_forward_hook(after).remove)

    def enter_postlude(self) -> None:
        self._enter("forward", self._num_blocks + 1)

    def enter_backward(self) -> None:
        self.live.accumulating = True
        self._enter("backward", self._num_blocks + 1)

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        self._note("save", tensor)
        return tensor

    def sizes(self) -> dict[str, list[int]]:
        """Bytes of each segment, by the names of `Segment`'s sizes."""
        self._enter(self._phase, self._segment)
        ends = (0, self._num_blocks + 1)
        saved = self._held(lambda event: event.kind == "save")
        inputs = self._held(lambda event: event.kind == "input" or event.kind == "save" and event.segment in ends)
        selective = self._held(lambda event: event.kind != "save" or event.segment in ends)
        before = [sum(saved[:number]) for number in range(len(saved) + 1)]
        forward_peaks, backward_peaks = self._peaks["forward"], self._peaks["backward"]
        return {
            "saved": saved,
            "selective": selective,
            "inputs": inputs,
            "forward_peak": [max(peak - before[at], 0) for at, peak in enumerate(forward_peaks)],
            "backward_peak": [max(peak - before[at + 1], 0) for at, peak in enumerate(backward_peaks)],
        }

    def _held(self, counts: Callable[[_Event], bool]) -> list[int]:
        """Bytes of each segment, every storage counted for the first event that counts."""
        held, seen = [0] * (self._num_blocks + 2), set()
        for event in self._events:
            if counts(event) and event.storage not in seen:
                seen.add(event.storage)
                held[event.segment] += event.num_bytes
        return held

    def _enter(self, phase: str, segment: int) -> None:
        peaks = self._peaks[self._phase]
        peaks[self._segment] = max(peaks[self._segment], self.live.peak_bytes)
        self.live.restart_peak()
        self._phase, self._segment = phase, segment

    def _on_gradient(self, tensor: torch.Tensor, segment: int) -> None:
        """When this tensor's gradient is there, the backward pass enters the segment that made it."""
        if tensor.requires_grad:
            tensor.register_hook(lambda _: self._enter("backward", segment))

    def _made(self, operator: Any, tensor: torch.Tensor) -> None:
        if self._phase == "forward" and operator in _KEPT_PRODUCTS and 0 < self._segment <= self._num_blocks:
            self._note("product", tensor)

    def _note(self, kind: str, tensor: torch.Tensor) -> None:
        if (storage := self.live.number_of(tensor)) is not None:
            self._events.append(_Event(kind, self._segment, storage, tensor.untyped_storage().nbytes()))


def _tensors(tree: Any) -> list[torch.Tensor]:
    """Tensors of anything a module takes or returns, Hugging Face's outputs included."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
