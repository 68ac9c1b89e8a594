"""One server's parts of the weights, and the optimizer that updates them.

What was sent of a version must stay as it was until it has left, and a compensated update needs the weights that its
worker computed with. So weights are *lent*: an update of lent weights is made on a copy, and the old memory lives for
as long as somebody reads it. Where nobody does, as in a synchronous run whose workers have all taken theirs, updates
are made in place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import nn

from weft.plan.partition.server_shards import ServedPart, ServedTensor
from weft.server.protocol.message import Buffer
from weft.server.protocol.optimizer_spec import Spec, make_optimizer
from weft.server.protocol.optimizer_state import PartState
from weft.server.protocol.shared_places import WeightPlaces
from weft.server.weights.part_norms import give_norms
from weft.server.weights.shared_weights import SharedWeights, WeightMemory

Gradients = Sequence[torch.Tensor | None]


class PartStore:
    """Weights, optimizer, and how often they were updated."""

    def __init__(
        self,
        tensors: Sequence[ServedTensor],
        parts: Sequence[ServedPart],
        values: Sequence[torch.Tensor],
        optimizer: Spec,
        *,
        compensation: float = 0.0,
        scales_by_staleness: bool = False,
        pull: torch.dtype | None = None,
        past_momentum: Collection[int] = (),
        fixed: Sequence[tuple[Buffer, ...]] = (),
    ) -> None:
        """`values`: the parts' first ones, flat, which become the store's own. `compensation`: λ of DC-ASGD.
        `scales_by_staleness`: rates are divided by the age of a gradient's weights. `pull`: the format in which
        workers take weights; None: that of the weights. `past_momentum`: parts whose gradients have momentum.
        `fixed`: the frames of what is not trained, by bucket."""
        self.parts, self.fixed = tuple(parts), tuple(fixed)
        self.parameters = tuple(nn.Parameter(value, requires_grad=True) for value in values)
        held: dict[str, list[torch.Tensor]] = {}
        for part, parameter in zip(self.parts, self.parameters, strict=True):
            held.setdefault(tensors[part.tensor].name, []).append(parameter)
        self.optimizer = make_optimizer(optimizer, held)
        give_norms(self.optimizer, held)
        self._past_momentum = [
            (group, parameter, number)
            for number, parameter in enumerate(self.parameters)
            if number in past_momentum
            for group in self.optimizer.param_groups
            if any(parameter is one for one in group["params"])
        ]
        self._base_lrs = [group["lr"] for group in self.optimizer.param_groups]
        self.version = 0
        """Updates so far."""
        self.staleness: Counter[int] = Counter()
        """Updates by the number of others that were made since the gradient's weights were sent."""
        self._compensation, self._scales, self._pull = compensation, scales_by_staleness, pull
        self._rounded: tuple[int, tuple[torch.Tensor, ...]] | None = None
        """A version of the weights in the format of `pull`."""
        self._taken: dict[int, tuple[int, tuple[torch.Tensor, ...] | None]] = {}
        """By worker: the version of the weights it has, and these themselves where updates are compensated."""
        self._shared: SharedWeights | None = None
        """Memory in which ranks of this host find the weights, or what they take of them; None: nobody does."""
        self._is_read: list[Callable[[], bool]] = []
        """Say whether what was sent of the current memory has left."""

    def take(self, worker: int) -> tuple[torch.Tensor, ...]:
        """The weights of this version, for a worker that computes its next gradient with them. They do not change."""
        weights = tuple(one.detach() for one in self.parameters)
        if self._pull is not None:
            if self._rounded is None or self._rounded[0] != self.version:
                self._rounded = self.version, self._round(weights, self._pull)
            weights = self._rounded[1]
        self._taken[worker] = (self.version, weights if self._compensation else None)
        return weights

    def share(self, places: WeightPlaces) -> WeightMemory | None:
        """From now on, weights are taken from memory that ranks of this host can open; returns that of this version,
        None if there is none."""
        if self._shared is None:
            self._shared = SharedWeights(places)
            if self._pull is None:
                self._move()  # who reads the old memory keeps it
            elif self._rounded is not None:
                self._rounded = self.version, self._round(self._rounded[1], self._pull)
        return None if self._shared is None else self._shared.current

    def lend_shared(self, is_read: Callable[[], bool]) -> None:
        """A rank of this host reads what `share` returned, until `is_read` says that it does not any more."""
        assert self._shared is not None and self._shared.current is not None
        if self._pull is None:
            self._is_read.append(is_read)
        else:
            self._shared.current.is_read.append(is_read)

    def load_states(self, states: Mapping[int, PartState]) -> None:
        """Give the optimizer the state of some parts, before the first update."""
        for part, state in states.items():
            if state:
                self.optimizer.state[self.parameters[part]] = dict(state)

    def copy_of_state(self, part: int) -> PartState:
        """What the optimizer keeps of a part."""
        state = self.optimizer.state.get(self.parameters[part], {})
        return {name: one.clone() if isinstance(one, torch.Tensor) else one for name, one in state.items()}

    def lend(self, is_read: Callable[[], bool]) -> None:
        """The current weights are read by somebody until `is_read` says that they are not any more."""
        self._is_read.append(is_read)

    def forget(self, worker: int) -> None:
        """A worker has left."""
        self._taken.pop(worker, None)

    def age_of(self, worker: int) -> int:
        """Updates that were made since a worker took its weights."""
        return self.version - self._taken[worker][0] if worker in self._taken else 0

    def count_ages(self, num_ages: int) -> tuple[int, ...]:
        """Updates so far by their gradient's age; the last number is of all older ones, too."""
        found = [0] * num_ages
        for age, number in self.staleness.items():
            found[min(age, num_ages - 1)] += number
        return tuple(found)

    @torch.no_grad()
    def update(self, gradients: Gradients, *, lr_factor: float, worker: int | None = None) -> None:
        """One update, with gradients that the store may overwrite; None leaves a part as it is.

        `worker`: the one that computed the gradient, where it is one worker's."""
        if worker is not None:
            age = self.age_of(worker)
            self.staleness[age] += 1
            lr_factor = lr_factor / max(age, 1) if self._scales else lr_factor
            if self._compensation and age:
                self._compensate(gradients, worker)
        self._own()
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        for group, base in zip(self.optimizer.param_groups, self._base_lrs, strict=True):
            group["lr"] = base * lr_factor
        self._hide_momentum()
        self.optimizer.step()
        for parameter in self.parameters:
            parameter.grad = None
        for group, parameter, number in self._past_momentum:
            if (gradient := gradients[number]) is not None:
                parameter.sub_(gradient, alpha=group["lr"])
        self.version += 1

    def skip(self) -> None:
        """A version without an update, because a gradient of it is not finite."""
        self.version += 1

    def _hide_momentum(self) -> None:
        """Let the optimizer see a gradient of zero, or none without weight decay, where workers have applied its
        momentum before they compressed: it would do so again (as `optim/momentum_correction.py` does on ranks)."""
        for group, parameter, _ in self._past_momentum:
            if parameter.grad is not None:
                parameter.grad = torch.zeros_like(parameter) if group["weight_decay"] else None

    def _compensate(self, gradients: Gradients, worker: int) -> None:
        """g + λ g ⊙ g ⊙ (w − w of the worker): what the gradient would be at today's weights, to first order, with
        g ⊙ g in the place of the Hessian."""
        _, taken = self._taken[worker]
        assert taken is not None
        for gradient, now, then in zip(gradients, self.parameters, taken, strict=True):
            if gradient is not None:
                gradient.addcmul_(gradient.square(), now.detach() - then, value=self._compensation)

    def _own(self) -> None:
        """Make sure that nobody reads the memory that an update writes."""
        is_taken = any(version == self.version for version, _ in self._taken.values())
        is_kept = is_taken and self._compensation > 0 and self._pull is None
        self._is_read = [is_read for is_read in self._is_read if not is_read()]
        if is_kept or self._is_read:
            self._move()
        elif self._shared is not None and self._shared.current is not None and self._pull is None:
            self._shared.current.change()

    @torch.no_grad()
    def _move(self) -> None:
        """Go on with a copy of the weights; the old memory is of those who read it."""
        old = None if self._shared is None else self._shared.current
        if old is not None:
            old.is_read = self._is_read
        self._is_read, copies = [], self._shared_memory()
        for number, parameter in enumerate(self.parameters):
            parameter.data = parameter.detach().clone() if copies is None else copies[number].copy_(parameter.detach())

    def _round(self, weights: Sequence[torch.Tensor], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Copies in the format in which workers take them."""
        if (places := self._shared_memory()) is None:
            return tuple(one.to(dtype) for one in weights)
        return tuple(place.copy_(one) for place, one in zip(places, weights, strict=True))

    def _shared_memory(self) -> tuple[torch.Tensor, ...] | None:
        """For a version that nobody reads yet; None if nobody shares memory, or if there is no more."""
        if self._shared is not None:
            try:
                return self._shared.move()
            except OSError:
                self._shared = None
        return None
