"""Updates of one server's weights, by all workers of a round together or by one worker alone, and what is told of them.

An update that would not be finite is left out: its workers say so of their losses and gradients, and a norm that is
clipped shows it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from weft.server.protocol.layout import ServerLayout
from weft.server.protocol.settings import Settings
from weft.server.weights.decoder import Decoder
from weft.server.weights.gradients import Gradients, add_up
from weft.server.weights.store import PartStore
from weft.server.workers.arrivals import Arrival


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What workers are told of an update."""

    loss_sum: float = 0.0
    count: float = 0.0
    age: int = 0
    """Updates that were made between the weights of the gradient and the gradient."""
    is_skipped: bool = False
    """The update was left out, because a gradient was not finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What all workers of an update said of it, added up."""

    loss_sum: float
    count: float
    step: int
    position: int
    is_finite: bool
    """All their gradients are: otherwise no server makes the update."""


class Updates:
    """Makes updates, and remembers what they were made of."""

    def __init__(self, store: PartStore, layout: ServerLayout, settings: Settings) -> None:
        self._store, self._layout, self._settings = store, layout, settings
        self._decoder = Decoder(layout)
        self.num_skipped = 0
        """Updates that were left out because a gradient was not finite."""
        self.last = Told()
        """Of the last round."""
        self.step = self.position = 0
        """How far workers are, by what they said."""
        self.told_each: dict[int, Told] = {}
        """Of the last gradient of each worker, where each is an update by itself."""
        self._lr_factor = 1.0
        self._sums: dict[int, torch.Tensor] = {}
        """The memory of the last sum of gradients, by part."""

    def last_of(self, worker: int) -> Told:
        """Of a worker's last gradient."""
        return self.told_each.get(worker, Told())

    def prepare(self, made_of: Sequence[Arrival], said: Said | None = None) -> Gradients | None:
        """The mean gradient of several workers; None if there is no update: nobody has targets, or not all is finite.
        `said`: what all workers of the update have said, of whom some may be lost here. `make` comes next."""
        said = said_of(made_of) if said is None else said
        self._note_progress(said.step, said.position)
        self.last = Told(loss_sum=said.loss_sum, count=said.count)
        if not said.is_finite:
            self._skip_last()
            return None
        count = sum(one.said.count for one in made_of)
        if not count:
            return None
        self._lr_factor = made_of[0].said.lr_factor
        return self._add_up(made_of, count)

    def make(self, gradients: Gradients | None, *, norm: float | None = None) -> None:
        """The update that was prepared. `norm`: that of the whole gradient, where it is clipped; the 1e-6 is that of
        `torch.nn.utils.clip_grad_norm_`."""
        if norm is not None and not math.isfinite(norm):
            self._skip_last()
            gradients = None
        if gradients is None:
            self._store.skip()
            return
        factor = 1.0 if norm is None else self._settings.clip_norm / (norm + 1e-6)
        if factor < 1:
            torch._foreach_mul_([one for one in gradients if one is not None], factor)
        self._store.update(gradients, lr_factor=self._lr_factor)

    def by_one(self, worker: int, arrival: Arrival) -> bool:
        """An update of one worker's gradient; False, and none is made, if it has no targets or is not finite."""
        said = arrival.said
        self._note_progress(said.step, said.position)
        self.told_each[worker] = Told(loss_sum=said.loss_sum, count=said.count, age=self._store.age_of(worker))
        if not said.count:
            return False
        if not arrival.is_finite:
            self.num_skipped += 1
            self.told_each[worker] = replace(self.told_each[worker], is_skipped=True)
            return False
        gradients = self._add_up([arrival], said.count)
        self._store.update(gradients, lr_factor=said.lr_factor, worker=worker)
        return True

    def _add_up(self, made_of: Sequence[Arrival], count: float) -> Gradients:
        return add_up(self._layout, made_of, self._decoder, num_targets=count, memory=self._sums)

    def _skip_last(self) -> None:
        self.num_skipped += 1
        self.last = replace(self.last, is_skipped=True)

    def _note_progress(self, step: int, position: int) -> None:
        self.step, self.position = max(self.step, step), max(self.position, position)


def said_of(made_of: Sequence[Arrival]) -> Said:
    """What the workers of an update have said of it, in their order."""
    return Said(
        loss_sum=float(sum(one.said.loss_sum for one in made_of)),
        count=float(sum(one.said.count for one in made_of)),
        step=max(one.said.step for one in made_of),
        position=max(one.said.position for one in made_of),
        is_finite=all(one.is_finite for one in made_of),
    )
