"""One microbatch through one stage: the model's own code, in which the units of other stages do not compute.

A stage calls the whole model with the whole inputs. Its own units compute. A unit of another stage returns what was
received from there, or a `Placeholder`. Once the stage's last unit has computed, the rest of the model's code is
skipped. So a model is cut without being rewritten: the user's code between units runs on every stage that needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from weft.errors import ModelError
from weft.parallel.pipeline.stages import Stages
from weft.parallel.state.rng import Seeds
from weft.parallel.tracing.dataflow import Value
from weft.parallel.tracing.placeholder import Placeholder, PlaceholderModule, to_meta
from weft.parallel.wrapping.wrap import wrap_forward

Forward = Callable[..., Any]


class _StageDone(BaseException):
    """Ends a forward pass after the stage's last unit. Not an Exception: a model's own handlers must not catch it."""


class StageRunner:
    """Runs the stages of a model; all units of the model refer to it."""

    def __init__(self) -> None:
        self._running: _StagePass | None = None
        self._seeds: Seeds | None = None
        """Random states of the latest pass."""

    def __deepcopy__(self, memo: object) -> StageRunner:
        return self

    def run(
        self,
        stage: int,
        call: Callable[[], Any],
        *,
        stages: Stages,
        received: Mapping[Value, torch.Tensor],
        before_unit: Callable[[str], None] | None = None,
        seeds: Seeds | None = None,
    ) -> tuple[dict[Value, torch.Tensor], Any]:
        """Run a stage: `call` calls the model. Returns the outputs of its units, and on the last stage the model's.

        `before_unit` is called before each unit computes; `seeds` sets the random states before and after each call of
        a unit, by the call's place.
        """
        running = _StagePass(stage=stage, stages=stages, received=received, before_unit=before_unit, seeds=seeds)
        self._running, self._seeds = running, seeds
        output = None
        try:
            if running.num_left or running.is_last:
                output = call()
        except _StageDone:
            pass
        finally:
            self._running = None
        if running.num_left:
            missing = [c.unit for c in stages.calls[stage] if c.number >= running.counts.get(c.unit, 0)]
            raise ModelError(
                f'the model did not call "{missing[0]}" this time, though it did for a batch of the same shapes; a '
                "pipeline needs every batch to take the same way: decide by shapes, not by values, or train without "
                "one"
            )
        return running.made, output

    def enter(self, unit: str, forward: Forward | None, args: Any, kwargs: Any) -> Any:
        """Handle a call of a unit; `forward` computes it and is None on ranks that do not hold it."""
        if self._running is not None:
            return self._running.enter(unit, forward, args, kwargs)
        if forward is not None:
            if self._seeds is not None:  # a checkpoint of the model's own may be computing the unit again
                self._seeds.repeat_unit()
            return forward(*args, **kwargs)
        raise ModelError(
            f'this rank does not hold "{unit}", which is on another stage of the pipeline, so the model cannot be '
            "called by itself; use trainer.step, trainer.evaluate or trainer.generate on every rank"
        )


@dataclass(slots=True, kw_only=True)
class _StagePass:
    """The state of one forward pass through one stage."""

    stage: int
    stages: Stages
    received: Mapping[Value, torch.Tensor]
    before_unit: Callable[[str], None] | None
    seeds: Seeds | None
    counts: dict[str, int] = field(default_factory=dict)
    made: dict[Value, torch.Tensor] = field(default_factory=dict)
    num_left: int = field(init=False)
    is_last: bool = field(init=False)

    def __post_init__(self) -> None:
        self.num_left = len(self.stages.calls[self.stage])
        self.is_last = self.stage == self.stages.num_stages - 1

    def enter(self, unit: str, forward: Forward | None, args: Any, kwargs: Any) -> Any:
        number = self.counts.get(unit, 0)
        self.counts[unit] = number + 1
        flow = self.stages.flow
        call = flow.by_name.get((unit, number))
        if call is None:
            raise ModelError(
                f'the model called "{unit}" {number + 1} times, {number} were expected from a batch of the same '
                "shapes; a pipeline needs every batch to take the same way"
            )
        if self.stages.stage_of[call.place] != self.stage:
            if self.seeds is not None:
                self.seeds.enter(2 * call.place + 1)
            return call.output(self._for_writing(self.received))
        assert forward is not None
        if self.before_unit is not None:
            self.before_unit(unit)
        if self.seeds is not None:
            self.seeds.enter_unit(2 * call.place)
        output = forward(*args, **kwargs)
        if self.seeds is not None:
            self.seeds.enter(2 * call.place + 1)
        made = {
            Value(call.place, unit, leaf): tensor
            for leaf, tensor in enumerate(tree_leaves(output))
            if isinstance(tensor, torch.Tensor)
        }
        self.made |= made
        if not self.is_last and any(
            value in flow.written and value in self.stages.boundaries[self.stage] for value in made
        ):
            output = call.output(self._for_writing(made))
        self.num_left -= 1
        if self.num_left == 0 and not self.is_last:
            raise _StageDone
        return output

    def _for_writing(self, values: Mapping[Value, torch.Tensor]) -> Mapping[Value, torch.Tensor]:
        """The values with copies of those that the model's code writes into, so that what is sent stays unchanged."""
        written = self.stages.flow.written
        if written.keys().isdisjoint(values):
            return values
        return {value: t.clone() if value in written else t for value, t in values.items()}


@dataclass(eq=False)
class UnitForward:
    """A unit's `forward` that computes only when the unit's stage runs. Not a closure, so that models can be copied."""

    unit: str
    inner: Forward
    runner: StageRunner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.runner.enter(self.unit, self.inner, args, kwargs)


_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
"""Attributes of a module that hold what is called before and after its forward."""


class PlaceholderUnit(PlaceholderModule):
    """A unit of another rank: no parameters, no computation, the same attributes.

    Hooks of the user's, and those that a library adds to all modules of a class, are called with what was received or
    with placeholders: so a model that collects values by hooks collects as many on every stage.
    """

    def __init__(self, unit: str, original: nn.Module, runner: StageRunner, device: torch.device) -> None:
        """`original` belongs to the model's meta copy; `device` is the one the unit would be on."""
        super().__init__()
        self.__dict__.update(_unit=unit, _original=original, _runner=runner, _device=device)

    @property
    def __class__(self) -> type:
        """For `isinstance`: the class of the original; not torch's own layers, whose parameters are looked for."""
        kind = type(self.__dict__.get("_original", self))
        return type(self) if kind.__module__.startswith("torch.") else kind

    @__class__.setter
    def __class__(self, _: type) -> None:
        raise AttributeError("a placeholder stays one")

    def take_hooks(self, original: nn.Module) -> None:
        """Call the hooks of this rank's own module from now on, but for those that weft gave it."""
        own = {number for name in _HOOKS for number, hook in getattr(original, name).items() if _is_of_weft(hook)}
        for name in _HOOKS:
            getattr(self, name).update((n, hook) for n, hook in getattr(original, name).items() if n not in own)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            found = getattr(self.__dict__["_original"], name)
            if isinstance(found, torch.Tensor):
                return Placeholder(to_meta(found.detach()), self.__dict__["_device"])
            return found

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["_runner"].enter(self.__dict__["_unit"], None, args, kwargs)


def _is_of_weft(hook: object) -> bool:
    """True if a hook is a function, method or object of this library."""
    return str(getattr(hook, "__module__", "")).startswith("weft.")


def keep_only(
    model: nn.Module,
    meta_copy: nn.Module,
    units: Mapping[str, bool],
    parameters: frozenset[str],
    runner: StageRunner,
    device: torch.device,
) -> None:
    """Replace what other ranks hold by placeholders, in place.

    `units` tells for each unit whether it is on this rank; `parameters` names those that this rank uses, also of units
    that it does not call.
    """
    own = dict(model.named_parameters(remove_duplicate=False))
    kept_ids = {id(own[name]) for name in parameters}
    for unit, is_here in units.items():
        if is_here:
            continue
        holder, _, child = unit.rpartition(".")
        foreign = PlaceholderUnit(unit, meta_copy.get_submodule(unit), runner, device)
        original = model.get_submodule(unit)
        foreign.take_hooks(original)
        for name, parameter in original.named_parameters(remove_duplicate=False):
            if id(parameter) in kept_ids:
                _put(foreign, name, parameter)
        model.get_submodule(holder)._modules[child] = foreign
    for name, parameter in own.items():
        holder, _, child = name.rpartition(".")
        outside = not any(name.startswith(f"{unit}.") for unit in units)
        if outside and id(parameter) not in kept_ids:
            module = model.get_submodule(holder)
            del module._parameters[child]
            module.__dict__[child] = Placeholder(to_meta(parameter.detach()), device)


def _put(foreign: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Register a parameter under its own name below a placeholder."""
    path, _, child = name.rpartition(".")
    for step in path.split(".") if path else ():
        if step not in foreign._modules:
            above = foreign.__dict__
            foreign._modules[step] = PlaceholderUnit(
                f"{above['_unit']}.{step}", getattr(above["_original"], step), above["_runner"], above["_device"]
            )
        inside = foreign._modules[step]
        assert inside is not None
        foreign = inside
    foreign._parameters[child] = parameter  # register_parameter refuses names of attributes, and the original has it


def wrap_units(model: nn.Module, units: Mapping[str, bool], runner: StageRunner) -> None:
    """Let the units of this rank compute only when their stage runs; called last, as the outermost wrapper."""
    for unit, is_here in units.items():
        if is_here:
            module = model.get_submodule(unit)
            wrapped = UnitForward(unit, module.forward, runner)
            why = "runs only with its own stage, else returns received values or placeholders"
            wrap_forward(module, wrapped, by="pipeline", why=why)
