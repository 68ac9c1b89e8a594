"""One microbatch's way through one stage: the model's own code, in which the units of other stages do not compute.

A stage calls the whole model with the whole inputs. Its own units compute. A unit of another stage hands out what was
received from there, or stands in with an `Placeholder`. Once the stage's last unit has computed, the rest of the
model's code is skipped. So a model is cut without being rewritten: what it does between its units happens where it is
needed, with the user's own lines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from weft.errors import ModelError
from weft.parallel.pipeline.stages import Stages
from weft.parallel.tracing.dataflow import Flow, Value
from weft.parallel.tracing.placeholder import Placeholder, PlaceholderModule, to_meta
from weft.parallel.wrapping.wrap import wrap_forward

Forward = Callable[..., Any]


class _Done(BaseException):
    """A stage has computed all it had to. Not an Exception: a model's own handlers must not see it."""


class Passage:
    """Which stage is being run, known to all units of a model."""

    def __init__(self) -> None:
        self._run: _Run | None = None

    def __deepcopy__(self, memo: object) -> Passage:
        return self

    def through(
        self,
        stage: int,
        call: Callable[[], Any],
        *,
        flow: Flow,
        stages: Stages,
        received: Mapping[Value, torch.Tensor],
        before_unit: Callable[[str], None] | None = None,
        seed: Callable[[int], object] | None = None,
    ) -> tuple[dict[Value, torch.Tensor], Any]:
        """Run a stage: `call` calls the model. Returns the values its units made, and the model's output on the last.

        `before_unit` is told of every unit that is about to compute; `seed` sets random states before and after every
        call of a unit, by its place.
        """
        run = _Run(stage, flow, stages, received, before_unit, seed)
        self._run = run
        output = None
        try:
            if run.num_left or stage == stages.num_stages - 1:
                output = call()
        except _Done:
            pass
        finally:
            self._run = None
        if run.num_left:
            missing = [c.unit for c in stages.calls[stage] if c.number >= run.counts.get(c.unit, 0)]
            raise ModelError(
                f'the model did not call "{missing[0]}" this time, though it did for a batch of the same shapes; a '
                "pipeline needs every batch to take the same way: decide by shapes, not by values, or train without "
                "one"
            )
        return run.made, output

    def enter(self, unit: str, forward: Forward | None, args: Any, kwargs: Any) -> Any:
        """A unit is called; `forward` computes it, if it is on this rank."""
        if self._run is not None:
            return self._run.enter(unit, forward, args, kwargs)
        if forward is not None:
            return forward(*args, **kwargs)
        raise ModelError(
            f'this rank does not hold "{unit}", which is on another stage of the pipeline, so the model cannot be '
            "called by itself; use trainer.step, trainer.evaluate or trainer.generate on every rank"
        )


class _Run:
    """One stage on its way."""

    def __init__(
        self,
        stage: int,
        flow: Flow,
        stages: Stages,
        received: Mapping[Value, torch.Tensor],
        before_unit: Callable[[str], None] | None,
        seed: Callable[[int], object] | None,
    ) -> None:
        self._stage = stage
        self._flow = flow
        self._stages = stages
        self._received = received
        self._before_unit = before_unit
        self._seed = seed
        self._is_last = stage == stages.num_stages - 1
        self.counts: dict[str, int] = {}
        self.num_left = len(stages.calls[stage])
        self.made: dict[Value, torch.Tensor] = {}

    def enter(self, unit: str, forward: Forward | None, args: Any, kwargs: Any) -> Any:
        number = self.counts.get(unit, 0)
        self.counts[unit] = number + 1
        call = self._flow.by_name.get((unit, number))
        if call is None:
            raise ModelError(
                f'the model called "{unit}" {number + 1} times, {number} were expected from a batch of the same '
                "shapes; a pipeline needs every batch to take the same way"
            )
        if self._stages.stage_of[call.place] != self._stage:
            if self._seed is not None:
                self._seed(2 * call.place + 1)
            return call.output(self._for_writing(self._received))
        assert forward is not None
        if self._before_unit is not None:
            self._before_unit(unit)
        if self._seed is not None:
            self._seed(2 * call.place)
        output = forward(*args, **kwargs)
        if self._seed is not None:
            self._seed(2 * call.place + 1)
        made = {
            Value(call.place, unit, leaf): tensor
            for leaf, tensor in enumerate(tree_leaves(output))
            if isinstance(tensor, torch.Tensor)
        }
        self.made |= made
        if not self._is_last and any(
            value in self._flow.written and value in self._stages.boundaries[self._stage] for value in made
        ):
            output = call.output(self._for_writing(made))
        self.num_left -= 1
        if self.num_left == 0 and not self._is_last:
            raise _Done
        return output

    def _for_writing(self, values: Mapping[Value, torch.Tensor]) -> Mapping[Value, torch.Tensor]:
        """Values as the model's code may have them: what it writes into is a copy, and what travels stays as it is."""
        if self._flow.written.keys().isdisjoint(values):
            return values
        return {value: t.clone() if value in self._flow.written else t for value, t in values.items()}


class Gate:
    """Stands in a unit's `forward`: lets it compute when its stage is run. Not a closure, so that models copy."""

    def __init__(self, unit: str, forward: Forward, passage: Passage) -> None:
        self.unit = unit
        self.inner = forward
        self.passage = passage

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.passage.enter(self.unit, self.inner, args, kwargs)


class PlaceholderUnit(PlaceholderModule):
    """Stands in for a unit of another rank: no parameters, no computation, the same attributes."""

    def __init__(self, unit: str, original: nn.Module, passage: Passage, device: torch.device) -> None:
        """`original` has no memory: it belongs to the model's twin. `device` is the one it would be on."""
        super().__init__()
        self.__dict__.update(_unit=unit, _original=original, _passage=passage, _device=device)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            found = getattr(self.__dict__["_original"], name)
            if isinstance(found, torch.Tensor):
                return Placeholder(to_meta(found.detach()), self.__dict__["_device"])
            return found

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["_passage"].enter(self.__dict__["_unit"], None, args, kwargs)


def keep_only(
    model: nn.Module,
    meta_copy: nn.Module,
    units: Mapping[str, bool],
    parameters: frozenset[str],
    passage: Passage,
    device: torch.device,
) -> None:
    """Take out of a model, in place, what other ranks hold.

    `units` says of each whether it is on this rank; `parameters` are those, of foreign units or of the model itself,
    that this rank uses without calling their unit.
    """
    own = dict(model.named_parameters(remove_duplicate=False))
    kept_ids = {id(own[name]) for name in parameters}
    for unit, is_here in units.items():
        if is_here:
            continue
        holder, _, child = unit.rpartition(".")
        foreign = PlaceholderUnit(unit, meta_copy.get_submodule(unit), passage, device)
        for name, parameter in model.get_submodule(unit).named_parameters(remove_duplicate=False):
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
    """Register a parameter under its own name below a stand-in."""
    path, _, child = name.rpartition(".")
    for step in path.split(".") if path else ():
        if step not in foreign._modules:
            above = foreign.__dict__
            foreign._modules[step] = PlaceholderUnit(
                f"{above['_unit']}.{step}", getattr(above["_original"], step), above["_passage"], above["_device"]
            )
        inside = foreign._modules[step]
        assert inside is not None
        foreign = inside
    foreign._parameters[child] = parameter  # its stand-in has an attribute of that name already


def install_gates(model: nn.Module, units: Mapping[str, bool], passage: Passage) -> None:
    """Let the units of this rank compute only when their stage is run; last, so that nothing wraps the gates."""
    for unit, is_here in units.items():
        if is_here:
            module = model.get_submodule(unit)
            gate = Gate(unit, module.forward, passage)
            wrap_forward(module, gate, by="pipeline", why="computes only when its stage is run, else passes on values")
