"""One process that plays all workers of parameter servers that compress what they send, where every update is made of
one whole batch.

Every worker's own gradients go through its own rules (`served_codecs.py`), and the update is made of their sum. What is
compared is what is compared without a codec: the mean of a worker's own gradients as they were before they were
compressed, and the optimizer's state and the weights, which show what servers made of all that was sent.
"""

from __future__ import annotations

import torch
from torch import nn

from weft.plan.plan import Plan
from weft.verification.one_process import Recipe
from weft.verification.served_batches import ServedBatches
from weft.verification.served_codecs import Tensors, WorkerCodec, is_vote, masks_of, update_past_momentum
from weft.verification.served_replay import Asked


class CompressedBatches(ServedBatches):
    """A model trained on whole batches with what workers send of their gradients, seen by one of them."""

    rule, is_exact = "one process that compresses for all workers", False
    instead_of = "training without the codec in one process"

    def __init__(self, model: nn.Module, plan: Plan, recipe: Recipe, asked: Asked) -> None:
        super().__init__(model, plan, recipe, asked.worker)
        names, workers = list(self._trained), range(plan.axes.data_ranks)
        self._codecs = [WorkerCodec(plan, asked.coded, self._updates.optimizer, names, worker) for worker in workers]
        self._masks = masks_of(asked.coded, self._trained)
        self._given: list[tuple[float, Tensors]] = []
        """Every worker's targets and gradients in this step."""

    def _note(self, worker: int, found: Tensors, count: float) -> None:
        if count:  # a worker without targets keeps what it has
            self._codecs[worker].clip(found, count)
        kept = {name: one.clone() for name, one in found.items()}  # the mean of all is made in place
        self._given = [*(self._given if worker else []), (count, kept)]

    @torch.no_grad()
    def _update(self) -> None:
        total: Tensors = {}
        step, (count,) = len(self.losses), self.num_targets
        for codec, (own_count, given) in zip(self._codecs, self._given, strict=True):
            for name, one in codec.send(step, given, self._trained).items() if own_count else ():
                total[name] = total[name] + one if name in total else one
        for name, parameter in self._trained.items():
            parameter.grad = None if name not in total else total[name] / count
            if parameter.grad is not None and name in self._masks and is_vote(self._plan.codec, step):
                majority = torch.where(total[name] >= 0, 1.0, -1.0).to(parameter)
                parameter.grad = torch.where(self._masks[name], majority, parameter.grad)
        if self._plan.codec.name == "dgc":
            optimizer = self._updates.optimizer
            update_past_momentum(lambda: self._updates.step(step), optimizer, self._trained, self._masks)
        else:
            self._updates.step(step)
