"""One process that replays an asynchronous run with servers: the same gradients, at the same versions of the weights.

What the servers did is known from what workers were told (`served_record.py`). Here it is done again by the rule alone,
in plain torch. For a gradient g that was computed with the weights v and meets the weights w, a updates later:

    [step] clip_norm      g := g min(1, clip_norm / |g|), by the worker
    [codec]               g := what the worker sends of it (`served_codecs.py`)
    compensation λ        g := g + λ g ⊙ g ⊙ (w - v), where a > 0
    lr_scaling            the rate is divided by max(a, 1)
    update                the optimizer's, with that g and rate, on the elements that this server holds

Every server has an order of updates of its own, so weights may be of several versions at once, as they were for the
worker. Nothing here is shared with `server/`, so a mistake there cannot hide in its own answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from weft.errors import VerifyError
from weft.plan.plan import Plan
from weft.verification.one_process import Key, OneProcess, Recipe, Updates, trained_parameters
from weft.verification.served_batches import OwnBuffers, Tensors, clip
from weft.verification.served_codecs import PushedPart, WorkerCodec, masks_of, update_past_momentum
from weft.verification.served_record import Step, WorkerRecord, orders_of

Owned = list[dict[str, torch.Tensor]]
"""By server: the flat indices of the elements that it holds, of every tensor of which it holds some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a replay must know beside the plan."""

    worker: int
    """The one whose tensors are compared."""
    owned: Owned
    coded: list[PushedPart]
    """What a worker compresses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """What this worker had after a step."""

    loss: float
    """Mean over its own targets."""
    count: float
    gradients: Tensors
    weights: Tensors
    buffers: Tensors


class ReplayedTraining:
    """A run that is replayed as a whole, and then looked at step by step."""

    rule, is_exact, is_streamed = "one process that replays the order of updates", False, False
    instead_of = "synchronous training in one process"

    def __init__(self, model: nn.Module, plan: Plan, recipe: Recipe, asked: Asked) -> None:
        self._model, self._plan, self._worker = model, plan, asked.worker
        self._trained = trained_parameters(model)
        weights = {name: one.detach() for name, one in self._trained.items()}
        # dgc has the momentum of what it sends, which an optimizer must not apply again.
        past = masks_of(asked.coded, weights) if plan.codec.name == "dgc" else {}
        self._shards = [_Shard(weights, owned, plan, recipe, past) for owned in asked.owned]
        num_workers = plan.axes.data_ranks
        self._buffers = OwnBuffers(model, num_workers)
        alone = replace(plan, step=replace(plan.step, clip_norm=0.0))
        self._codecs: list[WorkerCodec] = []
        """Of every worker, if what it sends is compressed."""
        if asked.coded:
            optimizer, names = Updates(self._trained, plan, recipe).optimizer, list(self._trained)
            workers = range(num_workers)
            self._codecs = [WorkerCodec(plan, asked.coded, optimizer, names, worker) for worker in workers]
        self._workers = [OneProcess(model, alone, recipe, data_ranks=[number]) for number in range(num_workers)]
        self._seen: list[_Seen] = []
        self._num_looked = 0
        self._mean_losses: list[float] = []

    def replay(self, records: Sequence[WorkerRecord], batches: Sequence[tuple[Any, Any]]) -> None:
        """Do all that the servers did. `batches` are whole global ones, of which every worker trained on a part."""
        orders = orders_of(records)
        for number, shard in enumerate(self._shards):
            shard.needed = {versions[number] for record in records for versions in record.versions}
        waiting: dict[Step, Tensors] = {}
        next_step = [0] * len(records)
        losses: dict[Step, tuple[float, float]] = {}
        while any(step < len(batches) for step in next_step):
            is_stuck = True
            for worker, record in enumerate(records):
                step = next_step[worker]
                if step == len(batches) or not self._are_there(versions := record.versions[step]):
                    continue
                is_stuck = False
                next_step[worker] += 1
                waiting[worker, step], losses[worker, step] = self._compute(worker, versions, batches[step])
                if self._codecs and record.is_made[step]:
                    waiting[worker, step] = self._sent(worker, step, waiting[worker, step], losses[worker, step][1])
            if is_stuck:
                raise VerifyError("servers sent weights of versions that they had not made yet")
            self._update(orders, records, waiting)
        self._mean_losses = [
            _mean([losses[worker, step] for worker in range(len(records))]) for step in range(len(batches))
        ]
        after = records[self._worker].versions[1:]
        self._seen = [
            replace(seen, weights=self._weights(versions)) for seen, versions in zip(self._seen, after, strict=True)
        ]

    def _are_there(self, versions: Sequence[int]) -> bool:
        return all(version <= shard.version for version, shard in zip(versions, self._shards, strict=True))

    def _weights(self, versions: Sequence[int]) -> Tensors:
        """Whole tensors, of a version for each server."""
        found = {name: one.new_empty(one.shape) for name, one in self._trained.items()}
        for version, shard in zip(versions, self._shards, strict=True):
            shard.put(version, found)
        return found

    def _compute(
        self, worker: int, versions: Sequence[int], batch: tuple[Any, Any]
    ) -> tuple[Tensors, tuple[float, float]]:
        """The mean gradient of a worker's part of a batch, with its loss and number of targets."""
        with torch.no_grad():
            for name, one in self._weights(versions).items():
                self._trained[name].copy_(one)
        self._buffers.use(worker)
        process = self._workers[worker]
        loss = process.step(*batch, updates=[False])
        count = process.num_targets[0]
        gradients = {} if not count else {n: p.grad for n, p in self._trained.items() if p.grad is not None}
        clip(gradients, self._plan.step.clip_norm)
        if self._codecs and count:
            sums = {name: one * count for name, one in gradients.items()}
            self._codecs[worker].clip(sums, count)
            gradients = {name: one / count for name, one in sums.items()}
        if worker == self._worker:
            buffers = {name: one.double().clone() for name, one in self._model.named_buffers()}
            kept = {name: one.clone() for name, one in gradients.items()}
            self._seen.append(_Seen(loss=loss, count=count, gradients=kept, weights={}, buffers=buffers))
        for parameter in self._trained.values():
            parameter.grad = None  # the next one begins with others
        return gradients, (loss, count)

    def _sent(self, worker: int, step: int, gradients: Tensors, count: float) -> Tensors:
        """What servers get of a mean gradient over so many targets."""
        sums = {name: one * count for name, one in gradients.items()}
        sent = self._codecs[worker].send(step, sums, self._trained)
        return {name: one / count for name, one in sent.items()}

    def _update(
        self, orders: Sequence[Sequence[Step]], records: Sequence[WorkerRecord], waiting: Mapping[Step, Tensors]
    ) -> None:
        """All updates of which the gradients are there, and all before them."""
        for number, (shard, order) in enumerate(zip(self._shards, orders, strict=True)):
            while shard.version < len(order) and (one := order[shard.version]) in waiting:
                worker, step = one
                shard.update(waiting[one], step=step, taken=records[worker].versions[step][number])

    # As other oracles are asked.

    def step(self, inputs: Any, targets: Any) -> float:
        """Look at the next step; all of them were done before."""
        del inputs, targets
        self._num_looked += 1
        return self.losses[-1]

    @property
    def _now(self) -> _Seen:
        return self._seen[self._num_looked - 1]

    @property
    def losses(self) -> list[float]:
        """Means over all workers, each with the weights it had."""
        return self._mean_losses[: self._num_looked]

    @property
    def returned(self) -> list[float | None]:
        return [self._now.loss if self._now.count else None]

    @property
    def whole_losses(self) -> list[float | None]:
        return [None]

    @property
    def num_targets(self) -> list[float]:
        return [self._now.count]

    @property
    def backward_order(self) -> list[str]:
        return self._workers[self._worker].backward_order

    @property
    def final_weights(self) -> Tensors:
        named = {name: one.detach() for name, one in self._model.named_parameters()}
        return {**named, **self._weights([shard.version for shard in self._shards])}

    def tensors(self, *, is_drained: bool = True) -> Iterator[tuple[Key, torch.Tensor]]:
        del is_drained
        for what, found in (("gradient", self._now.gradients), ("weight", self._now.weights)):
            for name, one in found.items():
                yield Key(what, name), one
        for name, parameter in self._model.named_parameters():
            if name not in self._trained:
                yield Key("weight", name), parameter.detach()
        for name, one in self._now.buffers.items():
            yield Key("buffer", name), one

    def previous(self, key: Key) -> torch.Tensor | None:
        if self._num_looked < 2:
            return None
        before = self._seen[self._num_looked - 2]
        return {"gradient": before.gradients, "weight": before.weights}.get(key.what, {}).get(key.name)

    def at_exchange(self, key: Key) -> dict[str, torch.Tensor]:
        del key
        return {}


class _Shard:
    """What one server holds, and how it updates that."""

    def __init__(
        self,
        weights: Tensors,
        owned: Mapping[str, torch.Tensor],
        plan: Plan,
        recipe: Recipe,
        past_momentum: Mapping[str, torch.Tensor],
    ) -> None:
        self._owned, self._server = owned, plan.server
        self._held = {name: nn.Parameter(self._cut(name, weights[name]).clone()) for name in owned}
        groups = recipe.groups or (lambda name, shape: {})
        listed = [{"params": [one], **groups(name, tuple(weights[name].shape))} for name, one in self._held.items()]
        self._optimizer = recipe.optimizer(listed or [{"params": []}])
        self._rates = [group["lr"] for group in self._optimizer.param_groups]
        self._schedule = recipe.schedule or (lambda step: 1.0)
        self._past_momentum = {name: self._cut(name, past_momentum[name]) for name in owned if name in past_momentum}
        self.version = 0
        self.needed: set[int] = set()
        """Versions that some worker had."""
        self._kept = {0: self._copy()}

    def update(self, gradients: Tensors, *, step: int, taken: int) -> None:
        """One update with a whole gradient, computed in this step of its worker with the weights `taken`."""
        age, then = self.version - taken, self._kept[taken]
        for name, parameter in self._held.items():
            gradient = None if name not in gradients else self._cut(name, gradients[name]).clone()
            if gradient is not None and age:
                moved = parameter.detach() - then[name]
                gradient += self._server.compensation * gradient * gradient * moved
            parameter.grad = gradient
        factor = self._schedule(step) / (max(age, 1) if self._server.lr_scaling == "staleness" else 1)
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor
        update_past_momentum(self._optimizer.step, self._optimizer, self._held, self._past_momentum)
        self.version += 1
        if self.version in self.needed:
            self._kept[self.version] = self._copy()

    @torch.no_grad()
    def put(self, version: int, into: Tensors) -> None:
        """Write what was held in some version to its places in whole tensors."""
        for name, one in (self._kept[version] if version in self._kept else self._copy()).items():
            into[name].view(-1)[self._owned[name]] = one.view(-1)

    def _cut(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        indices = self._owned[name]
        # A whole tensor keeps its shape, which an optimizer may look at.
        return whole if indices.numel() == whole.numel() else whole.flatten()[indices]

    def _copy(self) -> Tensors:
        return {name: one.detach().clone() for name, one in self._held.items()}


def _mean(losses: Sequence[tuple[float, float]]) -> float:
    """The mean over targets of some means over their own."""
    count = sum(number for _, number in losses)
    return sum(loss * number for loss, number in losses if number) / count if count else math.nan
