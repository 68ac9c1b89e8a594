"""Random numbers that do not depend on the plan: dropout draws the same for any number of stages, and recomputed.

Random states are set before and after every unit from what is the same under every plan: the run's seed, the step, the
sample's microbatch and data rank, and the unit's place in the model. So it does not matter which process runs a unit,
nor what it ran before. States are given back when the pass is over: a user's own random numbers are not touched.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from weft.blueprint import Blueprint
from weft.parallel.tracing.dataflow import find_units
from weft.parallel.wrapping.wrap import add_hook

_MASK = (1 << 63) - 1


class Seeds:
    """Where the random numbers of every pass come from."""

    def __init__(self, device: torch.device) -> None:
        self.base: int | None = None
        """What all random numbers of a run come from; None until the first step draws it."""
        self._generator = (
            torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator
        )
        self._now = 0
        self.draws: ShareDraws | None = None
        """Who draws inside regions that the tensor axis shares out."""

    @contextmanager
    def during(self, *, step: int, microbatch: int, data_rank: int) -> Iterator[None]:
        """Random states inside are this microbatch's, and outside what they were."""
        self._now = mix(mix(mix(self.base or 0, step), microbatch), data_rank)
        before = self._generator.get_state()
        if self.draws is not None:
            self.draws.reset()
        self.enter(-1)
        try:
            yield
        finally:
            self._generator.set_state(before)

    def enter(self, place: int) -> int:
        """The random numbers of one place in the model begin; returns the seed they begin with."""
        seed = mix(self._now, place)
        if self.draws is not None:
            seed = self.draws.begin(seed)
        self._generator.manual_seed(seed)
        return seed

    @property
    def generator(self) -> torch.Generator:
        return self._generator


class ShareDraws:
    """Random numbers under tensor parallelism: the same on all ranks for what all have, others for each rank's share.

    A region begins where a column layer is called and ends where a row layer is. Inside, a rank draws from a stream of
    its own, whose seed comes from the common one; after it the common one goes on where it was, one number further if
    anything was drawn, so that no two regions draw alike. All of it follows from the state of the generator, which a
    recomputed block finds as it was.
    """

    def __init__(self, generator: torch.Generator, place: int) -> None:
        self._generator = generator
        self._place = place
        self._common: torch.Tensor | None = None
        self._own: torch.Tensor | None = None
        self._before_tokens: torch.Tensor | None = None
        self.is_used = False
        """Something was drawn inside a region, or from tokens of this rank."""

    def reset(self) -> None:
        """Nothing is under way: what is computed again in a backward pass may be left in the middle."""
        self._common = self._own = self._before_tokens = None

    def begin(self, seed: int) -> int:
        """Another place in the model begins, with this seed for all; the seed of this rank."""
        self._common = None
        return mix(seed, self._place) if self._before_tokens is not None else seed

    def enter(self) -> None:
        """A region begins in training, if none has, in activations that are whole."""
        if self._common is None:
            self._common = self._set_apart()
            self._own = self._generator.get_state()

    def leave(self) -> None:
        if self._common is not None:
            self._go_back(self._common)
            self._common = None

    def split_tokens(self) -> None:
        """From now on nothing is common: what is not inside regions is split along the tokens."""
        self._before_tokens = self._set_apart()
        self._own = self._generator.get_state()

    def join_tokens(self) -> None:
        if self._before_tokens is not None:
            self._go_back(self._before_tokens)
            self._before_tokens = None

    def _set_apart(self) -> torch.Tensor:
        """Begin a stream of this rank's own; returns where the common one is."""
        common = self._generator.get_state()
        self._generator.manual_seed(mix(zlib.crc32(common.numpy().tobytes()), self._place))
        return common

    def _go_back(self, common: torch.Tensor) -> None:
        assert self._own is not None
        has_drawn = not torch.equal(self._own, self._generator.get_state())
        self._generator.set_state(common)
        if has_drawn:
            self.is_used = True
            torch.rand((), device=self._generator.device, generator=self._generator)

    def __deepcopy__(self, memo: object) -> ShareDraws:
        return self


class PlaceSeeds:
    """The same random numbers for a model that is in one piece, by hooks on its units.

    Only where a layer says that it drops something: a rate that stands in a model's code is not seen.
    """

    def __init__(self, model: nn.Module, blueprint: Blueprint, seeds: Seeds) -> None:
        self._seeds = seeds
        self._is_on = False
        self._place = 0
        self._begun: dict[bytes, int] = {}
        self.is_needed = has_dropout(model)
        if not self.is_needed:
            return
        for unit in find_units(model, blueprint):
            module, why = model.get_submodule(unit), "sets the random state of this place in the model"
            add_hook(module, "forward_pre", self._before, by="random states", why=why)
            add_hook(module, "forward", self._after, by="random states", why="sets that of the place after it")

    @contextmanager
    def during(self, *, step: int, microbatch: int, data_rank: int) -> Iterator[None]:
        self._is_on, self._place, self._begun = True, 0, {}
        try:
            with self._seeds.during(step=step, microbatch=microbatch, data_rank=data_rank):
                yield
        finally:
            self._is_on = False

    def __deepcopy__(self, memo: object) -> PlaceSeeds:
        return self

    def _before(self, *_: object) -> None:
        self._enter(2 * self._place)

    def _after(self, *_: object) -> None:
        self._enter(2 * self._place + 1)
        self._place += self._is_on

    def _enter(self, place: int) -> None:
        """Begin a place. What the model itself computes again in the backward pass is known by the state it begins in,
        which torch's checkpoint brings back, and gets the seed it had."""
        generator = self._seeds.generator
        state = generator.get_state().numpy().tobytes()
        if self._is_on:
            self._begun[state] = self._seeds.enter(place)
        elif state in self._begun:
            if self._seeds.draws is not None:
                self._seeds.draws.reset()
            generator.manual_seed(self._begun[state])


def has_dropout(model: nn.Module) -> bool:
    """Whether some layer says that it drops something, in torch's way or in a number of its own."""
    return any(
        isinstance(value, float) and value > 0
        for module in model.modules()
        for name, value in vars(module).items()
        if "drop" in name or (name == "p" and isinstance(module, _DropoutNd))
    )


def mix(seed: int, number: int) -> int:
    """Another seed for every number, without any pattern (splitmix64)."""
    word = (seed + (number + 2) * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (word ^ (word >> 31)) & _MASK
