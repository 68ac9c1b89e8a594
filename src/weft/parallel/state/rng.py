"""Random numbers that do not depend on the plan: dropout draws the same for any number of stages, and recomputed.

The random state is set before and after every unit, from values that are the same under every plan: the run's seed, the
step, the microbatch, the data rank and the unit's place in the model. So it does not matter which process runs a unit,
nor what it ran before. After the pass the user's own random state is restored. The same is done to the global states of
numpy and the standard library, if the first pass draws from them.
"""

from __future__ import annotations

import hashlib
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from weft.blueprint import Blueprint
from weft.parallel.tracing.dataflow import find_units
from weft.parallel.wrapping.host_random import HostRandom
from weft.parallel.wrapping.wrap import add_hook

_MASK = (1 << 63) - 1
_MOST_BEGUN = 1 << 16
"""Units, of all microbatches in flight, whose seeds are remembered for their recomputation."""


class Seeds:
    """Seeds of the random numbers of every pass."""

    def __init__(self, device: torch.device) -> None:
        self.base: int | None = None
        """The seed of the whole run; None until the first step draws it."""
        self.generator = (
            torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator
        )
        self._now = 0
        self._begun: OrderedDict[bytes, int] = OrderedDict()
        """Seeds of units of a pipeline, by a digest of the state in which they were called."""
        self.draws: ShareDraws | None = None
        """Random states inside regions that the tensor axis splits."""
        self._host: HostRandom | None = HostRandom()
        """None: the first pass drew nothing from the states of numpy and the standard library."""

    @property
    def draws_on_host(self) -> bool:
        """True if passes draw from the states of numpy or the standard library."""
        return self._host is not None and self._host.is_used

    @contextmanager
    def during(self, *, step: int, microbatch: int, data_rank: int) -> Iterator[None]:
        """Context of one microbatch's random state; the state from before is restored after it."""
        self._now = mix(mix(mix(self.base or 0, step), microbatch), data_rank)
        before = self.generator.get_state()
        if self.draws is not None:
            self.draws.reset()
        try:
            with self._host.kept() if self._host is not None else nullcontext():
                self.enter(-1)
                yield
            if self._host is not None and not self._host.is_used:
                self._host = None
        finally:
            self.generator.set_state(before)

    def enter(self, place: int) -> int:
        """Set the random state of one place in the model; returns its seed."""
        seed = mix(self._now, place)
        if self.draws is not None:
            seed = self.draws.begin(seed)
        self.generator.manual_seed(seed)
        if self.draws is not None:
            self.draws.begun()
        if self._host is not None:
            self._host.seed(seed)
        return seed

    def enter_unit(self, place: int) -> None:
        """`enter`, remembered for `repeat_unit`."""
        state = self._digest()
        self._begun[state] = self.enter(place)
        if len(self._begun) > _MOST_BEGUN:
            self._begun.popitem(last=False)

    def repeat_unit(self) -> None:
        """Set the state that a unit began with, when the model's own checkpoint calls it again in a backward pass.

        It is recognised by the state before, which torch restores.
        """
        seed = self._begun.get(self._digest())
        if seed is not None:
            if self.draws is not None:
                self.draws.reset()
            self.generator.manual_seed(seed)

    def _digest(self) -> bytes:
        return hashlib.blake2b(self.generator.get_state().numpy().tobytes(), digest_size=16).digest()


class ShareDraws:
    """Random numbers under tensor parallelism: common to all ranks in whole activations, different in their shares.

    A region begins where a column layer is called and ends where a row layer is. Inside, a rank draws from a stream of
    its own, seeded from the common one; after it the common stream continues where it was, one number further if
    anything was drawn, so that no two regions draw alike. All of it follows from the state of the generator, which
    torch's checkpoint restores before it recomputes a block.
    """

    def __init__(self, generator: torch.Generator, place: int) -> None:
        self._generator = generator
        self._place = place
        self._common: torch.Tensor | None = None
        self._own: torch.Tensor | None = None
        self._seeded: torch.Tensor | None = None
        """The state that was set last: to set one is no draw."""
        self._before_tokens: torch.Tensor | None = None
        self.is_used = False
        """True if anything was drawn inside a region, or while tokens were split."""
        self.has_drawn = False
        """True if anything was drawn anywhere."""

    def reset(self) -> None:
        """Forget open regions: a recomputation in the backward pass may have stopped inside one."""
        self._common = self._own = self._seeded = self._before_tokens = None

    def begin(self, seed: int) -> int:
        """Begin a place in the model with a seed that all ranks have; returns the seed of this rank."""
        self.look()
        self._common = None
        return mix(seed, self._place) if self._before_tokens is not None else seed

    def begun(self) -> None:
        """The seed of a place has been set."""
        self._seeded = self._generator.get_state()

    def enter(self) -> None:
        """Begin a region in whole activations, unless one is open."""
        if self._common is None:
            self._common = self._set_apart()

    def leave(self) -> None:
        if self._common is not None:
            self._go_back(self._common)
            self._common = None

    def split_tokens(self) -> None:
        """Begin activations that are split along the tokens, where ranks share no random numbers."""
        self._before_tokens = self._set_apart()

    def join_tokens(self) -> None:
        if self._before_tokens is not None:
            self._go_back(self._before_tokens)
            self._before_tokens = None

    def _set_apart(self) -> torch.Tensor:
        """Begin a stream of this rank's own; returns the state of the common one."""
        self.look()
        common = self._generator.get_state()
        self._generator.manual_seed(mix(zlib.crc32(common.numpy().tobytes()), self._place))
        self._own = self._seeded = self._generator.get_state()
        return common

    def look(self) -> None:
        """Note whether anything was drawn since a state was set."""
        if self._seeded is not None and not _is_same(self._seeded, self._generator.get_state()):
            self.has_drawn = True
            self.is_used = self.is_used or self._common is not None or self._before_tokens is not None

    def _go_back(self, common: torch.Tensor) -> None:
        assert self._own is not None
        self.look()
        goes_on = not _is_same(self._own, self._generator.get_state())
        self._generator.set_state(common)
        if goes_on:
            torch.rand((), device=self._generator.device, generator=self._generator)
        self.begun()

    def __deepcopy__(self, memo: object) -> ShareDraws:
        return self


class PlaceSeeds:
    """Sets the random states of places in a model that is in one piece, by hooks on its units.

    A model without a dropout rate as an attribute may still draw in its code. So places are seeded in the first pass
    of any model, and no longer if it drew nothing.
    """

    def __init__(self, model: nn.Module, blueprint: Blueprint, seeds: Seeds) -> None:
        self._seeds = seeds
        self._is_on = False
        self._place = 0
        self._begun: dict[bytes, int] = {}
        self._is_known = has_dropout(model)
        """The model draws: nothing needs to be looked at."""
        self._seeds_places = True
        self._has_drawn = False
        self._set = b""
        """The state that was set last."""
        for unit in find_units(model, blueprint):
            module, why = model.get_submodule(unit), "sets the random state of this place in the model"
            add_hook(module, "forward_pre", self._before, by="random states", why=why)
            add_hook(module, "forward", self._after, by="random states", why="sets that of the place after it")

    @contextmanager
    def during(self, *, step: int, microbatch: int, data_rank: int) -> Iterator[None]:
        self._is_on, self._place, self._begun, self._has_drawn = True, 0, {}, False
        try:
            with self._seeds.during(step=step, microbatch=microbatch, data_rank=data_rank):
                self._set = self._state() if self._looks else b""
                yield
                self._look()
            if self._looks:
                self._is_known = self._seeds_places = self._has_drawn or self._seeds.draws_on_host
        finally:
            self._is_on = False

    def __deepcopy__(self, memo: object) -> PlaceSeeds:
        return self

    def _before(self, *_: object) -> None:
        if self._is_followed():
            self._enter(2 * self._place)

    def _after(self, *_: object) -> None:
        if self._is_followed():
            self._enter(2 * self._place + 1)
            self._place += self._is_on

    def _is_followed(self) -> bool:
        # A compiler cannot follow random states: the graph would break, for a model that drew nothing so far.
        return self._is_known or (not torch.compiler.is_compiling() and self._seeds_places)

    def _enter(self, place: int) -> None:
        """Begin a place. A unit that the model's own checkpoints recompute in the backward pass is recognised by the
        state it begins in, which torch restores, and gets the seed of its forward pass."""
        state = self._state()
        if self._is_on:
            self._look()
            self._begun[state] = self._seeds.enter(place)
            self._set = self._state() if self._looks else b""
        elif state in self._begun:
            if self._seeds.draws is not None:
                self._seeds.draws.reset()
            self._seeds.generator.manual_seed(self._begun[state])

    @property
    def _looks(self) -> bool:
        """True in the first pass, if it has to show whether the model draws."""
        return self._seeds_places and not self._is_known

    def _look(self) -> None:
        if not self._looks or self._has_drawn:
            return
        if self._seeds.draws is not None:  # which sets states of its own
            self._seeds.draws.look()
            self._has_drawn = self._seeds.draws.has_drawn
        else:
            self._has_drawn = self._set != self._state()

    def _state(self) -> bytes:
        return self._seeds.generator.get_state().numpy().tobytes()


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    # Not by an operator of torch: those are counted where blocks are recomputed selectively.
    return one.numpy().tobytes() == other.numpy().tobytes()


def has_dropout(model: nn.Module) -> bool:
    """True if some layer has a dropout rate: torch's `p`, or a positive attribute with "drop" in its name."""
    return any(
        isinstance(value, float) and value > 0
        for module in model.modules()
        for name, value in vars(module).items()
        if "drop" in name or (name == "p" and isinstance(module, _DropoutNd))
    )


def mix(seed: int, number: int) -> int:
    """A seed from a seed and a number (splitmix64)."""
    word = (seed + (number + 2) * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (word ^ (word >> 31)) & _MASK
