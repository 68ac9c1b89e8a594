"""How the microbatches of a step, or of an evaluation, pass through the stages of a pipeline."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from weft.parallel.pipeline.cut_model import CutModel, Route
from weft.parallel.state.rng import Seeds
from weft.parallel.zero.gather_by_stage import StageGathering
from weft.plan.pipeline.actions import Action
from weft.training.data.trees import num_samples
from weft.training.step.loss import Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One microbatch on this rank."""

    inputs: Any
    targets: Any
    count: Count
    num_samples: int
    route: Route | None
    """None if nobody computes it."""
    place: int
    """Among all microbatches."""
    step: int
    number: int
    """Among the microbatches of its step."""


class Passes(ABC):
    """What all passes through a pipeline have in common; `parallel.pipeline.Work` says what each method is for."""

    def __init__(
        self,
        cut: CutModel,
        call: Callable[[Any], Any],
        seeds: Seeds,
        *,
        data_rank: int,
        gathering: StageGathering | None,
        runs_empty: bool,
        enter: Callable[[Any], None],
    ) -> None:
        """`runs_empty`: layers exchange in their forward pass, so a microbatch without samples runs all the same.
        `enter` is told of the inputs of every pass before it, forward or backward."""
        self._enter = enter
        self._cut = cut
        self._call = call
        self._seeds = seeds
        self._data_rank = data_rank
        self._gathering = gathering
        self._runs_empty = runs_empty
        self.parts: dict[int, Part] = {}

    def take(self, microbatches: list[tuple[Any, Any, Count]], *, first: int = 0, step: int = 0) -> None:
        """Microbatches, the same on every rank of the pipeline, that the next actions are about."""
        for number, (inputs, targets, count) in enumerate(microbatches):
            samples = num_samples(inputs)
            self._enter(inputs)  # to follow the model is a pass, too
            self.parts[first + number] = Part(
                inputs=inputs,
                targets=targets,
                count=count,
                num_samples=samples,
                route=self._cut.route(inputs) if samples or self._runs_empty else None,
                place=first + number,
                step=step,
                number=number,
            )

    def route(self, microbatch: int) -> Route:
        route = self.parts[microbatch].route
        assert route is not None
        return route

    def skips(self, microbatch: int) -> bool:
        return self.parts[microbatch].route is None

    def forward(self, action: Action) -> AbstractContextManager[object]:
        if self._gathering is not None:
            self._gathering.wait(None)
        part = self.parts[action.microbatch]
        self._enter(part.inputs)
        assert part.route is not None
        if not part.route.flow.is_random:
            return nullcontext()
        return self._seeds.during(step=part.step, microbatch=part.number, data_rank=self._data_rank)

    def call(self, microbatch: int) -> Any:
        return self._call(self.parts[microbatch].inputs)

    def seed(self) -> Callable[[int], object]:
        return self._seeds.enter

    def before_unit(self, unit: str) -> None:
        if self._gathering is not None:
            self._gathering.wait(unit)

    @abstractmethod
    def root(self, microbatch: int, output: Any) -> tuple[torch.Tensor, torch.Tensor] | None: ...

    @abstractmethod
    def backward(self, action: Action) -> AbstractContextManager[object]: ...

    def exchange(self, action: Action) -> None:
        assert self._gathering is not None
        if action.kind == "gather":
            self._gathering.gather(action.stage)
        else:
            assert action.kind == "release"
            self._gathering.release(action.stage)


class Looking(Passes):
    """Forward passes only: `seen` is told of every output on the last stage."""

    def __init__(self, seen: Callable[[Part, Any], None], *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._seen = seen

    def root(self, microbatch: int, output: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
        self._seen(self.parts[microbatch], output)
        return None

    def backward(self, action: Action) -> AbstractContextManager[object]:
        raise AssertionError(f"an evaluation has no backward passes, and {action} is one")
