"""Executes a pipeline's schedule: any list of actions, one after the other.

A send never blocks, a receive is posted long before its message is needed, and every kind of message has a group of
its own (`stage_messages.py`), so no two ranks wait for each other's sends. On GPUs, messages of batches of a new shape
go through host memory: their first passes load kernels, compile and allocate, for which a host may have to wait until
its GPU is idle, and a GPU on which a receive waits for its message is never idle. Receive buffers are reused. Between
its forward and its backward pass a microbatch keeps what it received and the roots of its graph, not the activations it
sent.

The loss, the gradient exchange between data ranks and the update are the caller's, through `StepHooks`.
"""

from __future__ import annotations

import functools
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from weft.errors import ModelError
from weft.parallel.pipeline.cut_model import CutModel
from weft.parallel.pipeline.recording import Recording
from weft.parallel.pipeline.split_backward import SplitBackward, run_backward
from weft.parallel.pipeline.stage_messages import Arrival, StageMessages
from weft.parallel.pipeline.stages import Stages
from weft.parallel.state.rng import Seeds
from weft.parallel.tracing.dataflow import Form, Value
from weft.parallel.tracing.placeholder import Placeholder
from weft.plan.model_refusals import LOSS_OF_OTHER_STAGES
from weft.plan.pipeline.actions import Action

_MOST_SHAPES = 4096
"""Shapes of batches that are remembered at most."""
_TAGS_PER_BOUNDARY = 256
"""Tensors that may cross one boundary. Tag 0 is that of the totals of a step."""
_MICROBATCHES_WITH_OWN_TAGS = 4096
"""Most microbatches that may be in flight at once without sharing message tags."""


class StepHooks(Protocol):
    """The callbacks of a training or evaluation step."""

    def stages(self, microbatch: int) -> Stages:
        """The stages that a microbatch passes through; the same on every rank of the pipeline."""

    def skips(self, microbatch: int) -> bool:
        """True if a microbatch has no samples, so that nothing is computed or sent for it."""

    def forward(self, action: Action) -> AbstractContextManager[object]:
        """The context of a forward pass: its random states, its weights."""

    def call(self, microbatch: int) -> Any:
        """Call the model with a microbatch."""

    @property
    def seeds(self) -> Seeds:
        """Random states of places in the model; used only for models that draw random numbers."""

    def before_unit(self, unit: str) -> None:
        """Make a unit's parameters available; called before it computes."""

    def root(self, microbatch: int, output: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
        """From the last stage's output: the tensor to differentiate, if any, and its gradient."""

    def backward(self, action: Action) -> AbstractContextManager[object]:
        """The context of everything that computes gradients of parameters."""

    def exchange(self, action: Action) -> None:
        """Perform a gather, release, reduce or update."""


@dataclass(slots=True, kw_only=True)
class _InFlight:
    """A microbatch between its forward and its backward pass through a stage."""

    received: dict[Value, torch.Tensor]
    roots: list[GradientEdge]
    root_values: list[Value]
    """The value of each root, whose gradient comes from the next stage; empty on the last stage."""
    buffers: list[torch.Tensor]
    root_gradients: list[torch.Tensor]
    """The gradient of each root on the last stage."""
    split: SplitBackward | None = None


@dataclass(slots=True, kw_only=True)
class _Arriving:
    """Messages being received."""

    action: Action
    values: list[Value]
    tensors: list[torch.Tensor]
    pending: list[Arrival]


@dataclass(slots=True, kw_only=True)
class Pipeline:
    """This rank's part of a pipeline."""

    model: CutModel
    messages: StageMessages
    recording: Recording
    parameters: Sequence[torch.nn.Parameter]
    device: torch.device
    _free: dict[tuple[torch.Size, torch.dtype], list[torch.Tensor]] = field(default_factory=lambda: defaultdict(list))
    """Receive buffers for reuse."""
    _in_flight: dict[tuple[int, int], _InFlight] = field(default_factory=dict)
    _arriving: dict[tuple[int, int, int], _Arriving] = field(default_factory=dict)
    _seen_stages: dict[tuple[int, bool], Stages] = field(default_factory=dict)
    """The stages of batches that have run before, by identity and whether with gradients: kept, so that no other object
    gets the same identity."""
    _first_passes_end: float = 0
    """On GPUs, messages of microbatches below this number go through host memory."""
    _outgoing: dict[tuple[int, int, int], list[torch.Tensor]] = field(default_factory=dict)
    most_in_flight: int = 0
    """Largest number of microbatches in flight so far."""
    _started_s: float = 0.0
    """Start time of the present action."""
    _failure: str | None = None
    """The error that ended a schedule in the middle."""

    @property
    def has_failed(self) -> bool:
        """True if a schedule ended in the middle: its messages may be in flight, and later steps would receive them."""
        return self._failure is not None

    def run(self, actions: Sequence[Action], hooks: StepHooks, *, first_passes_end: int | None = None) -> None:
        """Perform the actions in order; after an error, never again.

        `first_passes_end`: microbatches below this number are first passes; for schedules that leave messages in flight
        from one call to the next. None: first passes are those of a new shape, the same on every rank of the pipeline.
        """
        self.refuse_failed()
        passing = {a.microbatch for a in actions if a.kind == "forward" and not hooks.skips(a.microbatch)}
        found = {(id(stages), torch.is_grad_enabled()): stages for stages in map(hooks.stages, passing)}
        new = found.keys() - self._seen_stages.keys()
        self._first_passes_end = (math.inf if new else 0) if first_passes_end is None else first_passes_end
        with self._fail_on_error():
            self._run(actions, hooks)
        if len(self._seen_stages) > _MOST_SHAPES:  # at the same time on all ranks
            self._seen_stages.clear()
        self._seen_stages |= found

    def settle(self) -> None:
        """Wait until all messages were received."""
        with self._fail_on_error():
            self.messages.settle()

    def refuse_failed(self) -> None:
        """Raise if a schedule has failed."""
        if self._failure is not None:
            raise RuntimeError(
                f"an earlier step of this pipeline failed ({self._failure}), and its ranks may be at different points; "
                "make a new trainer, and load the last checkpoint"
            )

    @contextmanager
    def _fail_on_error(self) -> Iterator[None]:
        """Context in which an error marks this pipeline as failed."""
        try:
            yield
        except BaseException as error:
            self._failure = f"{type(error).__name__}: {error}".partition("\n")[0]
            self.messages.fail()
            for kept in (self._in_flight, self._outgoing, self._free):  # not what is arriving: it may yet be written
                kept.clear()
            raise

    def _run(self, actions: Sequence[Action], hooks: StepHooks) -> None:
        perform = {
            "forward": self._forward,
            "backward": self._backward,
            "input-grad": self._input_grad,
            "weight-grad": self._weight_grad,
            "send": self._send,
            "receive": self._receive,
        }
        for action in actions:
            self._started_s = time.perf_counter()
            if action.kind not in perform:
                hooks.exchange(action)
            elif hooks.skips(action.microbatch):
                continue
            else:
                perform[action.kind](action, hooks)
            if action.kind != "receive":  # which is recorded when its message is waited for
                self.recording.add(action, self._started_s)

    def _forward(self, action: Action, hooks: StepHooks) -> None:
        stage, microbatch = action.stage, action.microbatch
        stages, is_last = hooks.stages(microbatch), stage == self.model.num_stages - 1
        boundary = () if is_last else stages.boundaries[stage]
        received, buffers = self._arrived(action, stage - 1) if stage else ({}, [])
        # A buffer whose value is sent on may still be in transit when it would be reused.
        buffers = [buffer for value, buffer in zip(received, buffers, strict=True) if value not in boundary]
        if torch.is_grad_enabled():
            for value, tensor in received.items():
                tensor.requires_grad_(stages.flow.forms[value].requires_grad)
        with hooks.forward(action):
            made, output = self.model.runner.run(
                stage,
                functools.partial(hooks.call, microbatch),
                stages=stages,
                received=received,
                before_unit=hooks.before_unit,
                seeds=hooks.seeds if stages.flow.is_random else None,
            )
            root = hooks.root(microbatch, output) if is_last else None
        if root is not None and isinstance(root[0], Placeholder):
            raise ModelError(LOSS_OF_OTHER_STAGES.message())
        in_flight = _InFlight(received=received, roots=[], root_values=[], buffers=buffers, root_gradients=[])
        if root is not None and root[0].requires_grad:
            in_flight.roots, in_flight.root_gradients = [get_gradient_edge(root[0])], [root[1]]
        elif not is_last:
            leaving = []
            for value in boundary:
                tensor = made[value] if value in made else received[value]
                _check_form(tensor, stages.flow.forms[value], value)
                leaving.append(tensor.detach())
                if tensor.requires_grad:
                    in_flight.root_values.append(value)
                    in_flight.roots.append(get_gradient_edge(tensor))
            self._outgoing[stage, stage + 1, microbatch] = leaving
        # Without gradients nothing tells when a message was received, so its buffer is not reused.
        if torch.is_grad_enabled():
            self._in_flight[stage, microbatch] = in_flight
            self.most_in_flight = max(self.most_in_flight, len(self._in_flight))

    def _backward(self, action: Action, hooks: StepHooks) -> None:
        in_flight = self._in_flight.pop((action.stage, action.microbatch))
        gradients = self._incoming_gradients(action, in_flight)
        with hooks.backward(action):
            if in_flight.roots:
                run_backward(in_flight.roots, gradients)
        self._queue_gradients(action, in_flight, hooks)
        if in_flight.roots:
            self._give_back(in_flight.buffers)

    def _input_grad(self, action: Action, hooks: StepHooks) -> None:
        in_flight = self._in_flight[action.stage, action.microbatch]
        gradients = self._incoming_gradients(action, in_flight)
        inputs = [tensor for tensor in in_flight.received.values() if tensor.requires_grad]
        with hooks.backward(action):
            if in_flight.roots:
                in_flight.split = SplitBackward.input_grads(in_flight.roots, gradients, inputs, self.parameters)
        in_flight.roots = []
        self._queue_gradients(action, in_flight, hooks)

    def _weight_grad(self, action: Action, hooks: StepHooks) -> None:
        in_flight = self._in_flight.pop((action.stage, action.microbatch))
        with hooks.backward(action):
            if in_flight.split is not None:
                in_flight.split.weight_grads()
                self._give_back(in_flight.buffers)

    def _incoming_gradients(self, action: Action, in_flight: _InFlight) -> list[torch.Tensor]:
        """The gradient of each root."""
        if action.stage == self.model.num_stages - 1:
            return in_flight.root_gradients
        arrived, _ = self._arrived(action, action.stage + 1)
        return [arrived[value] for value in in_flight.root_values]

    def _queue_gradients(self, action: Action, in_flight: _InFlight, hooks: StepHooks) -> None:
        """Make the gradients of what was received ready to be sent back."""
        if action.stage == 0:
            return
        leaving = []
        for value in hooks.stages(action.microbatch).differentiable(action.stage - 1):
            tensor = in_flight.received[value]
            gradient, tensor.grad = tensor.grad, None
            leaving.append(torch.zeros_like(tensor) if gradient is None else gradient)
        self._outgoing[action.stage, action.stage - 1, action.microbatch] = leaving

    def _send(self, action: Action, hooks: StepHooks) -> None:
        tensors = self._outgoing.pop((action.stage, action.peer, action.microbatch))
        for number, tensor in enumerate(tensors):
            tag, is_first_pass = self._tag(action, number), action.microbatch < self._first_passes_end
            self.messages.send(tensor, action.stage, action.peer, tag=tag, is_first_pass=is_first_pass)

    def _receive(self, action: Action, hooks: StepHooks) -> None:
        stages = hooks.stages(action.microbatch)
        if action.peer < action.stage:
            values = list(stages.boundaries[action.peer])
        else:
            values = stages.differentiable(action.stage)
        # Gradients are not pooled: autograd may keep one as a parameter's gradient, or part of one.
        is_pooled = action.peer < action.stage
        tensors = [self._buffer(stages.flow.forms[value], is_pooled=is_pooled) for value in values]
        is_first_pass = action.microbatch < self._first_passes_end
        pending = [
            self.messages.receive(
                tensor, action.peer, action.stage, tag=self._tag(action, number), is_first_pass=is_first_pass
            )
            for number, tensor in enumerate(tensors)
        ]
        self._arriving[action.stage, action.peer, action.microbatch] = _Arriving(
            action=action, values=values, tensors=tensors, pending=pending
        )

    def _buffer(self, form: Form, *, is_pooled: bool) -> torch.Tensor:
        free = self._free[torch.Size(form.shape), form.dtype] if is_pooled else None
        return free.pop() if free else torch.empty(form.shape, dtype=form.dtype, device=self.device)

    def _give_back(self, buffers: Sequence[torch.Tensor]) -> None:
        for buffer in buffers:
            self._free[buffer.shape, buffer.dtype].append(buffer)

    def _arrived(self, action: Action, peer: int) -> tuple[dict[Value, torch.Tensor], list[torch.Tensor]]:
        """Wait for the messages that an action needs: a new tensor for each value, and their buffers."""
        started = time.perf_counter()
        arriving = self._arriving.pop((action.stage, peer, action.microbatch))
        for pending in arriving.pending:
            pending.wait()
        self.recording.add(arriving.action, started)
        self._started_s = time.perf_counter()  # waiting is not part of the action
        return dict(zip(arriving.values, (t.detach() for t in arriving.tensors), strict=True)), arriving.tensors

    def _tag(self, action: Action, number: int) -> int:
        boundary = min(action.stage, action.peer)
        place = action.microbatch % _MICROBATCHES_WITH_OWN_TAGS * self.model.num_stages + boundary
        return 1 + place * _TAGS_PER_BOUNDARY + number


def _check_form(tensor: torch.Tensor, form: Form, value: Value) -> None:
    """Refuse to send what does not fit the next stage's receive buffer."""
    if (tensor.shape, tensor.dtype) != (form.shape, form.dtype):
        raise ModelError(
            f'"{value.unit}" returned {tuple(tensor.shape)} of {tensor.dtype}, and {form.shape} of {form.dtype} was '
            "expected from the shapes it was given; decide by shapes, not by values, and leave mixed precision "
            "(torch.autocast) to [precision] compute"
        )
