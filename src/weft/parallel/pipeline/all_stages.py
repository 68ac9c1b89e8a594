"""All stages of a cut model in one process, one microbatch: what the ranks of a pipeline would compute together.

Every rank's part is a copy of the model, cut as that rank would cut it, with the same parameters in all copies. The
executor, stages and backward passes are those of training; messages are handed over in memory. So whatever a rank would
lack is lacking here too, and no other process is needed to find out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from weft.parallel.pipeline.cut_model import CutModel, Outline, cut
from weft.parallel.pipeline.executor import Pipeline, StepHooks
from weft.parallel.pipeline.recording import Recording
from weft.parallel.pipeline.run_stage import StageRunner, wrap_units
from weft.parallel.pipeline.stage_messages import Arrival, StageMessages
from weft.parallel.pipeline.stages import Stages, assign_stages
from weft.parallel.pipeline.weight_versions import WeightVersions
from weft.parallel.state.rng import Seeds
from weft.parallel.tracing.meta_copy import copy_with_hooks
from weft.parallel.wrapping.replacements import Replacements, reentrant_checkpoints
from weft.plan.pipeline.actions import Action, Kind
from weft.plan.pipeline.communication import FLUSH_FREE

Root = Callable[[Any], torch.Tensor | None]
"""From a model's output, the scalar to differentiate; None if nothing in it learns."""


def run_whole(whole: Outline, call: Callable[[nn.Module], Any], root: Root) -> dict[str, torch.Tensor]:
    """Run a whole model forward and backward; its gradients by name. Random numbers are those of `run_stages`.

    The model's units are wrapped, in place.
    """
    runner, blocks = StageRunner(), dict.fromkeys(whole.blueprint.blocks, 0)
    wrap_units(whole.model, dict.fromkeys(whole.units, True), runner)
    stages = assign_stages(whole.flow, blocks, 1)
    hooks = _OneMicrobatch(stages, Seeds(whole.device), lambda: call(whole.model), root)
    with hooks.forward(Action(kind="forward", stage=0)):
        _, output = runner.run(
            0, lambda: call(whole.model), stages=stages, received={}, seeds=hooks.seeds if hooks.is_random else None
        )
        value = root(output)
    if value is not None and value.requires_grad:
        value.backward()
    return _taken([whole.model])


def cut_copies(whole: Outline, cuts: Sequence[int], num_ranks: int) -> list[CutModel]:
    """Copies of a whole model with its parameters, each cut for one rank."""
    made = []
    for rank in range(num_ranks):
        memo: dict[int, Any] = {id(parameter): parameter for parameter in whole.model.parameters()}
        copied = replace(whole, model=copy_with_hooks(whole.model, memo))
        made.append(cut(copied, cuts, rank=rank, num_ranks=num_ranks))
        made[-1].wrap_units()
    return made


def run_stages(
    parts: Sequence[CutModel], device: torch.device, schedule: str, call: Callable[[nn.Module], Any], root: Root
) -> dict[str, torch.Tensor]:
    """Run all ranks' parts of a model as a schedule would; gradients summed over the ranks, by name."""
    messages, seeds = _InMemory(), Seeds(device)
    pipelines, hooks = [], []
    for rank, part in enumerate(parts):
        trained = {n: p for n, p in part.model.named_parameters() if p.requires_grad}
        pipelines.append(
            Pipeline(
                model=part,
                messages=messages,
                recording=Recording(rank),
                parameters=list(trained.values()),
                device=device,
            )
        )
        versions = WeightVersions(part.model, trained, num_slots=1) if schedule in FLUSH_FREE and trained else None
        hooks.append(_OneMicrobatch(part.example_stages, seeds, _calling(call, part.model), root, versions))
    backward: tuple[Kind, ...] = ("input-grad", "weight-grad") if schedule == "zero-bubble" else ("backward",)
    num_ranks, num_stages = len(parts), parts[0].num_stages
    with Replacements(reentrant_checkpoints()):
        for stage in range(num_stages):
            actions = [*_passing(stage, stage - 1, stage + 1, num_stages, ("forward",))]
            pipelines[stage % num_ranks].run(actions, hooks[stage % num_ranks])
        for stage in reversed(range(num_stages)):
            actions = [*_passing(stage, stage + 1, stage - 1, num_stages, backward)]
            pipelines[stage % num_ranks].run(actions, hooks[stage % num_ranks])
    for one in hooks:
        one.give_gradients()
    return _taken([part.model for part in parts])


def _calling(call: Callable[[nn.Module], Any], model: nn.Module) -> Callable[[], Any]:
    return lambda: call(model)


def _passing(stage: int, source: int, target: int, num_stages: int, kinds: tuple[Kind, ...]) -> Iterator[Action]:
    """A stage's passes, after what it receives and before what it sends."""
    if 0 <= source < num_stages:
        yield Action(kind="receive", stage=stage, microbatch=0, peer=source)
    for kind in kinds:
        yield Action(kind=kind, stage=stage, microbatch=0)
    if 0 <= target < num_stages:
        yield Action(kind="send", stage=stage, microbatch=0, peer=target)


def _taken(models: Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    """The gradients of parameters by name, which are then cleared; copies have the same parameters."""
    found: dict[str, torch.Tensor] = {}
    named = {name: parameter for model in models for name, parameter in model.named_parameters()}
    for name, parameter in named.items():
        if parameter.grad is not None:
            found[name] = parameter.grad
    for parameter in named.values():
        parameter.grad = None
    return found


class _InMemory(StageMessages):
    """Messages between stages of one process, in the order in which they were sent."""

    def __init__(self) -> None:
        self._sent: dict[tuple[int, int, int], torch.Tensor] = {}

    def send(
        self, tensor: torch.Tensor, source: int, target: int, *, tag: int = 0, is_first_pass: bool = False
    ) -> None:
        self._sent[source, target, tag] = tensor

    def receive(
        self, tensor: torch.Tensor, source: int, target: int, *, tag: int = 0, is_first_pass: bool = False
    ) -> Arrival:
        tensor.copy_(self._sent.pop((source, target, tag)))
        return _Arrived()

    def settle(self) -> None:
        pass

    def fail(self) -> None:
        pass


class _Arrived:
    def wait(self) -> None:
        pass


class _OneMicrobatch(StepHooks):
    """The hooks of one microbatch, without a loss, exchanges or an update."""

    def __init__(
        self,
        stages: Stages,
        seeds: Seeds,
        call: Callable[[], Any],
        root: Root,
        versions: WeightVersions | None = None,
    ) -> None:
        self._stages, self._seeds, self._call, self._root, self._versions = stages, seeds, call, root, versions
        self.is_random = stages.flow.is_random

    @property
    def seeds(self) -> Seeds:
        return self._seeds

    def stages(self, microbatch: int) -> Stages:
        return self._stages

    def skips(self, microbatch: int) -> bool:
        return False

    @contextmanager
    def forward(self, action: Action) -> Iterator[None]:
        seeding: AbstractContextManager[None] = nullcontext()
        if self.is_random:
            seeding = self._seeds.during(step=0, microbatch=0, data_rank=0)
        with seeding, self.backward(action):
            yield

    def call(self, microbatch: int) -> Any:
        return self._call()

    def before_unit(self, unit: str) -> None:
        pass

    def root(self, microbatch: int, output: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
        value = self._root(output)
        return None if value is None else (value, torch.ones_like(value))

    def backward(self, action: Action) -> AbstractContextManager[object]:
        return nullcontext() if self._versions is None else self._versions.using(0)

    def exchange(self, action: Action) -> None:
        raise AssertionError(f"{action} is no part of a single pass")

    def give_gradients(self) -> None:
        """Add the gradients of the weight versions to the parameters, which other ranks' parts may share."""
        if self._versions is None:
            return
        for head, leaf in zip(self._versions.heads, self._versions.leaves_of_heads(0), strict=True):
            if leaf.grad is not None:
                head.grad = leaf.grad if head.grad is None else head.grad + leaf.grad
