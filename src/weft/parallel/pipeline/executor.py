"""Carries out a pipeline's schedule: any list of actions, one after the other.

A send never waits, and a receive begins long before its message is needed; whatever the order of actions, no two ranks
wait for each other's sends. Memory for activations is used again. What a microbatch leaves between its forward and its
backward pass is what it received and the roots of its graph, not the activations it sent.

What a loss is, how gradients leave for other data ranks and how weights are updated is not known here: `Work` is.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge

from weft.comm.collectives import Pending
from weft.comm.group import Group
from weft.comm.p2p import receive, send
from weft.comm.shared_memory.mailbox import Mailbox
from weft.errors import ModelError
from weft.parallel.pipeline.cut_model import CutModel, Route
from weft.parallel.pipeline.recording import Recording
from weft.parallel.pipeline.split_backward import SplitBackward
from weft.parallel.tracing.dataflow import Form, Value
from weft.plan.pipeline.actions import Action

_TAGS_A_BOUNDARY = 256
_TAGS_OF_MICROBATCHES = 4096
"""Microbatches that may be under way at once without their messages being mistaken for each other's."""


Channel = tuple[bool, bool]
"""Whether messages are activations, and whether they go from a rank to the next (gradients: to the one before); with
several chunks a rank some go round, from the last rank to the first."""


def make_channels(make_group: Callable[[str], Group], *, is_ring: bool) -> dict[Channel, Group]:
    """The groups of a pipeline, by purpose; `is_ring`: messages go round. Collective."""
    channels = {(True, True): make_group("activations"), (False, True): make_group("gradients")}
    if is_ring:
        channels |= {(True, False): make_group("activations round"), (False, False): make_group("gradients round")}
    return channels


def open_pairs(group: Group, device: torch.device) -> None:
    """One message between any two ranks, in an order that all ranks keep; collective.

    NCCL connects two ranks at their first message, and both wait there: better now than in the middle of a schedule.
    """
    word = torch.zeros(1, device=device)
    for one, other in itertools.combinations(range(group.size), 2):
        if group.index == one:
            send(word, group, to=other).wait()
        elif group.index == other:
            receive(word, group, source=one).wait()


class Work(Protocol):
    """What a step does with a pipeline."""

    def route(self, microbatch: int) -> Route:
        """The way of a microbatch through the stages; the same on every rank of the pipeline."""

    def skips(self, microbatch: int) -> bool:
        """Whether a microbatch has no samples, so that nobody computes or sends anything for it."""

    def forward(self, action: Action) -> AbstractContextManager[object]:
        """Around a forward pass: its random states, its weights."""

    def call(self, microbatch: int) -> Any:
        """Call the model with a microbatch."""

    def seed(self) -> Callable[[int], object] | None:
        """What sets random states by place, if the model draws any."""

    def before_unit(self, unit: str) -> None:
        """A unit is about to compute: its parameters must be there."""

    def root(self, microbatch: int, output: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The last stage's output: what to differentiate, if anything, and the gradient it is given."""

    def backward(self, action: Action) -> AbstractContextManager[object]:
        """Around everything that makes gradients of parameters."""

    def exchange(self, action: Action) -> None:
        """gather, release, reduce and update."""


@dataclass(slots=True, kw_only=True)
class _Flight:
    """What a microbatch leaves between its passes through a stage."""

    received: dict[Value, torch.Tensor]
    roots: list[GradientEdge]
    root_values: list[Value]
    """Of each root, the value whose gradient comes from the next stage; none on the last stage."""
    buffers: list[torch.Tensor]
    given: list[torch.Tensor]
    """On the last stage: the gradient of each root."""
    split: SplitBackward | None = None


@dataclass(slots=True, kw_only=True)
class _Arriving:
    """Messages under way to this rank."""

    action: Action
    values: list[Value]
    tensors: list[torch.Tensor]
    pending: list[Pending]


class _Buffers:
    """Memory for messages, used again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: dict[tuple[tuple[int, ...], torch.dtype], list[torch.Tensor]] = {}

    def take(self, form: Form) -> torch.Tensor:
        free = self._free.get((form.shape, form.dtype))
        return free.pop() if free else torch.empty(form.shape, dtype=form.dtype, device=self._device)

    def give_back(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            self._free.setdefault((tuple(tensor.shape), tensor.dtype), []).append(tensor)


@dataclass(slots=True, kw_only=True)
class Pipeline:
    """This rank's part of a pipeline."""

    model: CutModel
    channels: Mapping[Channel, Group]
    """All ranks of the pipeline, once for each kind of message: two ranks that wait for each other's messages in a
    different order must not share a group."""
    recording: Recording
    parameters: Sequence[torch.nn.Parameter]
    device: torch.device
    num_ranks: int = field(init=False)
    _buffers: _Buffers = field(init=False)
    _flights: dict[tuple[int, int], _Flight] = field(default_factory=dict)
    _arriving: dict[tuple[int, int, int], _Arriving] = field(default_factory=dict)
    _outgoing: dict[tuple[int, int, int], list[torch.Tensor]] = field(default_factory=dict)
    _sends: deque[tuple[Pending, torch.Tensor]] = field(default_factory=deque)
    _mailboxes: set[Mailbox] = field(default_factory=set)
    """Where messages were left that others may not have taken yet."""
    most_in_flight: int = 0
    """Microbatches between their passes at once, at most, so far."""

    def __post_init__(self) -> None:
        self._buffers = _Buffers(self.device)
        self.num_ranks = self.channels[True, True].size

    def _channel(self, source: int, target: int) -> Group:
        """The group in which a message goes from stage to stage."""
        is_forward = target > source
        goes_down = target % self.num_ranks > source % self.num_ranks
        return self.channels[is_forward, goes_down == is_forward]

    def run(self, actions: Sequence[Action], work: Work) -> None:
        """Do everything on the list, in its order."""
        perform = {
            "forward": self._forward,
            "backward": self._backward,
            "input-grad": self._input_grad,
            "weight-grad": self._weight_grad,
            "send": self._send,
            "receive": self._receive,
        }
        for action in actions:
            if action.microbatch >= 0 and work.skips(action.microbatch) and action.kind in perform:
                continue
            if action.kind in perform:
                perform[action.kind](action, work)
            else:
                started = time.perf_counter()
                work.exchange(action)
                self.recording.add(action, started)

    def settle(self) -> None:
        """Wait until all that was sent has been taken: what is still under way would be lost with this object."""
        while self._sends:
            self._sends.popleft()[0].wait()
        while self._mailboxes:
            self._mailboxes.pop().settle()

    def drop(self) -> None:
        """Forget what is under way, after an error that all ranks saw."""
        self._flights.clear()
        self._arriving.clear()
        self._outgoing.clear()
        self._sends.clear()
        self._mailboxes.clear()

    def _forward(self, action: Action, work: Work) -> None:
        stage, microbatch = action.stage, action.microbatch
        route = work.route(microbatch)
        received, buffers = self._arrived(action, stage - 1) if stage else ({}, [])
        passed_on = set(route.stages.boundaries[stage]) if stage < self.model.num_stages - 1 else set()
        # What goes on to the next stage may still be under way when its memory would be used again.
        buffers = [buffer for value, buffer in zip(received, buffers, strict=True) if value not in passed_on]
        learns = torch.is_grad_enabled()
        if learns:
            for value, tensor in received.items():
                tensor.requires_grad_(route.flow.forms[value].requires_grad)
        started = time.perf_counter()
        with work.forward(action):
            made, output = self.model.passage.through(
                stage,
                functools.partial(work.call, microbatch),
                flow=route.flow,
                stages=route.stages,
                received=received,
                before_unit=work.before_unit,
                seed=work.seed() if route.flow.is_random else None,
            )
            root = work.root(microbatch, output) if stage == self.model.num_stages - 1 else None
        values: list[Value] = []
        roots: list[GradientEdge] = []
        given: list[torch.Tensor] = []
        if root is not None and root[0].requires_grad:
            roots, given = [get_gradient_edge(root[0])], [root[1]]
        elif stage < self.model.num_stages - 1:
            leaving = []
            for value in route.stages.boundaries[stage]:
                tensor = made[value] if value in made else received[value]
                _check_form(tensor, route.flow.forms[value], value)
                leaving.append(tensor.detach())
                if tensor.requires_grad:
                    values.append(value)
                    roots.append(get_gradient_edge(tensor))
            self._outgoing[stage, stage + 1, microbatch] = leaving
        self.recording.add(action, started)
        if not learns:  # without a gradient nobody says when what was sent has been taken: the memory is not used again
            return
        self._flights[stage, microbatch] = _Flight(
            received=received, roots=roots, root_values=values, buffers=buffers, given=given
        )
        self.most_in_flight = max(self.most_in_flight, len(self._flights))

    def _backward(self, action: Action, work: Work) -> None:
        flight = self._flights.pop((action.stage, action.microbatch))
        gradients = self._incoming_gradients(action, flight)
        started = time.perf_counter()
        with work.backward(action):
            if flight.roots:
                _run_backward(flight.roots, gradients)
        self._leave_behind(action, flight, work)
        if flight.roots:
            self._buffers.give_back(flight.buffers)
        self.recording.add(action, started)

    def _input_grad(self, action: Action, work: Work) -> None:
        flight = self._flights[action.stage, action.microbatch]
        gradients = self._incoming_gradients(action, flight)
        started = time.perf_counter()
        inputs = [tensor for tensor in flight.received.values() if tensor.requires_grad]
        with work.backward(action):
            if flight.roots:
                flight.split = SplitBackward.input_grads(flight.roots, gradients, inputs, self.parameters)
        flight.roots = []
        self._leave_behind(action, flight, work)
        self.recording.add(action, started)

    def _weight_grad(self, action: Action, work: Work) -> None:
        flight = self._flights.pop((action.stage, action.microbatch))
        started = time.perf_counter()
        with work.backward(action):
            if flight.split is not None:
                flight.split.weight_grads()
                self._buffers.give_back(flight.buffers)
        self.recording.add(action, started)

    def _incoming_gradients(self, action: Action, flight: _Flight) -> list[torch.Tensor]:
        """The gradient of each root."""
        if action.stage == self.model.num_stages - 1:
            return flight.given
        arrived, _ = self._arrived(action, action.stage + 1)
        return [arrived[value] for value in flight.root_values]

    def _leave_behind(self, action: Action, flight: _Flight, work: Work) -> None:
        """Gradients of what was received are ready for the stage it came from."""
        if action.stage == 0:
            return
        route = work.route(action.microbatch)
        leaving = []
        for value in _differentiable(route, action.stage - 1):
            tensor = flight.received[value]
            gradient, tensor.grad = tensor.grad, None
            leaving.append(torch.zeros_like(tensor) if gradient is None else gradient)
        self._outgoing[action.stage, action.stage - 1, action.microbatch] = leaving

    def _send(self, action: Action, work: Work) -> None:
        del work
        started = time.perf_counter()
        group = self._channel(action.stage, action.peer)
        tensors = self._outgoing.pop((action.stage, action.peer, action.microbatch))
        for number, tensor in enumerate(tensors):
            self.post(tensor, group, to=action.peer % self.num_ranks, tag=self._tag(action, number))
        self.recording.add(action, started)

    def post(self, tensor: torch.Tensor, group: Group, *, to: int, tag: int = 0) -> None:
        """Send without ever waiting: a send may end only when it is received, which may be in a later step."""
        tensor = tensor.contiguous()
        pending = send(tensor, group, to=to, tag=tag)
        if (wire := group.wire(tensor)) is not None:
            self._mailboxes.add(wire.mailbox)
            return
        self._sends.append((pending, tensor))
        while self._sends and self._sends[0][0].is_over:
            self._sends.popleft()

    def _receive(self, action: Action, work: Work) -> None:
        route = work.route(action.microbatch)
        group = self._channel(action.peer, action.stage)
        if action.peer < action.stage:
            values = list(route.stages.boundaries[action.peer])
            tensors = [self._buffers.take(route.flow.forms[value]) for value in values]
        else:  # in memory of its own: autograd may make it a parameter's gradient, or part of one, and keep it
            values = _differentiable(route, action.stage)
            forms = [route.flow.forms[value] for value in values]
            tensors = [torch.empty(form.shape, dtype=form.dtype, device=self.device) for form in forms]
        source = action.peer % self.num_ranks
        pending = [
            receive(tensor, group, source=source, tag=self._tag(action, number))
            for number, tensor in enumerate(tensors)
        ]
        self._arriving[action.stage, action.peer, action.microbatch] = _Arriving(
            action=action, values=values, tensors=tensors, pending=pending
        )

    def _arrived(self, action: Action, peer: int) -> tuple[dict[Value, torch.Tensor], list[torch.Tensor]]:
        """Messages that an action needs, each as a tensor of its own, and their memory."""
        started = time.perf_counter()
        arriving = self._arriving.pop((action.stage, peer, action.microbatch))
        for pending in arriving.pending:
            pending.wait()
        self.recording.add(arriving.action, started)
        return dict(zip(arriving.values, (t.detach() for t in arriving.tensors), strict=True)), arriving.tensors

    def _tag(self, action: Action, number: int) -> int:
        boundary = min(action.stage, action.peer)
        place = action.microbatch % _TAGS_OF_MICROBATCHES * self.model.num_stages + boundary
        return place * _TAGS_A_BOUNDARY + number


def _check_form(tensor: torch.Tensor, form: Form, value: Value) -> None:
    """What leaves must be what the next stage has made room for."""
    if (tensor.shape, tensor.dtype) != (form.shape, form.dtype):
        raise ModelError(
            f'"{value.unit}" returned {tuple(tensor.shape)} of {tensor.dtype}, and {form.shape} of {form.dtype} was '
            "expected from the shapes it was given; decide by shapes, not by values, and leave mixed precision "
            "(torch.autocast) to [precision] compute"
        )


def _run_backward(roots: list[GradientEdge], gradients: list[torch.Tensor]) -> None:
    """`torch.autograd.backward` without its checks, which take longer than a small stage's backward pass."""
    _engine_run_backward(tuple(roots), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True)


def _differentiable(route: Route, boundary: int) -> list[Value]:
    return [value for value in route.stages.boundaries[boundary] if route.flow.forms[value].requires_grad]
