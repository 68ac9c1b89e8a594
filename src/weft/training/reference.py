"""One process training the same model on the same micro-batches: what every lossless plan must equal.

It is written as plainly as a training loop can be, and shares no code with the trainer but how a model is called, the
meaning of a loss and the cutting of a batch, so that a mistake in the one does not hide in the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from weft.layout import part_of
from weft.plan.plan import Plan
from weft.training.loss import Loss, count_targets, forward, loss_terms
from weft.training.trees import map_tensors, num_samples


class OneProcess:
    """A model trained without any parallelism."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        *,
        loss: Loss,
        optimizer: Callable[[Iterable[Any]], torch.optim.Optimizer],
        schedule: Callable[[int], float] | None = None,
        groups: Callable[[str, tuple[int, ...]], dict[str, Any]] | None = None,
    ) -> None:
        self.model = model
        self._plan = plan
        self._loss = loss
        self._schedule = schedule
        self._steps_done = 0
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._parameters = list(trained.values())
        self._optimizer = optimizer(
            [{"params": [p], **(groups(name, tuple(p.shape)) if groups else {})} for name, p in trained.items()]
        )
        self._rates = [group["lr"] for group in self._optimizer.param_groups]

    def step(self, inputs: Any, targets: Any) -> float:
        """One step on a whole global batch; returns its mean loss. Gradients stay to be looked at."""
        self._optimizer.zero_grad(set_to_none=True)
        loss_sum, count_sum = 0.0, 0.0
        for rows in self._microbatches(num_samples(inputs)):
            if not rows:
                continue
            part, target_part = _rows(inputs, rows), _rows(targets, rows)
            terms = loss_terms(self._loss, forward(self.model, part), target_part, count_targets(target_part))
            loss = terms.value * terms.multiplier
            loss.backward()
            loss_sum += float(loss.detach())
            count_sum += float(terms.count)
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad /= count_sum
        if self._plan.step.clip_norm:
            nn.utils.clip_grad_norm_(self._parameters, self._plan.step.clip_norm)
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * self._schedule(self._steps_done) if self._schedule else rate
        self._optimizer.step()
        self._steps_done += 1
        return loss_sum / count_sum

    def _microbatches(self, total: int) -> list[list[int]]:
        """The rows of each micro-batch: the union of what every data rank has in its micro-batch of that number."""
        num_ranks, num_microbatches = self._plan.axes.replicate * self._plan.axes.data, self._plan.step.microbatches
        rows: list[list[int]] = [[] for _ in range(num_microbatches)]
        for rank in range(num_ranks):
            start, stop = part_of(total, rank, num_ranks)
            for number in range(num_microbatches):
                first, last = part_of(stop - start, number, num_microbatches)
                rows[number].extend(range(start + first, start + last))
        return rows


def _rows(tree: Any, rows: list[int]) -> Any:
    return map_tensors(lambda tensor: tensor[rows] if tensor.dim() else tensor, tree)
