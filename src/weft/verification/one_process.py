"""One process training the same model on the same microbatches: what every lossless plan must equal.

It is written as plainly as a training loop can be, and shares no code with the trainer but how a model is called, the
meaning of a loss and the cutting of a batch, so that a mistake in the one does not hide in the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from weft.layout import part_of
from weft.plan.plan import Plan
from weft.training.data.trees import forward, map_tensors, num_samples
from weft.training.step.loss import Loss, count_targets, loss_terms

MakeOptimizer = Callable[[Iterable[Any]], torch.optim.Optimizer]


class Key(NamedTuple):
    """Something that is compared."""

    what: str
    """gradient, weight or buffer."""
    name: str
    version: int = 0
    """Updates that made it, where ranks may have done different numbers of them."""


class OneProcess:
    """A model trained without any parallelism."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        *,
        loss: Loss,
        optimizer: MakeOptimizer,
        schedule: Callable[[int], float] | None = None,
        groups: Callable[[str, tuple[int, ...]], dict[str, Any]] | None = None,
    ) -> None:
        self.model = model
        self.num_targets = 0.0
        """Of the last step."""
        self.losses: list[float] = []
        """Of each step."""
        self.backward_order: list[str] = []
        """Parameters in the order in which the first backward pass was done with them."""
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
        self._gradients_before: dict[str, torch.Tensor] = {}
        self._weights_before: dict[str, torch.Tensor] = {}
        self._hooks = [p.register_post_accumulate_grad_hook(self._make_note(name)) for name, p in trained.items()]

    def step(self, inputs: Any, targets: Any, *, update: bool = True) -> float:
        """One step on a whole global batch; returns its mean loss. Gradients stay to be looked at."""
        named = dict(self.model.named_parameters())
        self._gradients_before = {name: p.grad for name, p in named.items() if p.grad is not None}
        self._weights_before = {name: p.detach().clone() for name, p in named.items()}
        self._optimizer.zero_grad(set_to_none=True)
        loss_sum, count_sum = 0.0, 0.0
        for rows in microbatch_rows(self._plan, num_samples(inputs)):
            if not rows:
                continue
            part, target_part = take_rows(inputs, rows), take_rows(targets, rows)
            terms = loss_terms(self._loss, forward(self.model, part), target_part, count_targets(target_part))
            loss = terms.value * terms.multiplier
            loss.backward()
            for hook in self._hooks:
                hook.remove()
            loss_sum += float(loss.detach())
            count_sum += float(terms.count)
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad /= count_sum
        self.num_targets = count_sum
        if update:
            self._update()
        self._steps_done += 1
        self.losses.append(loss_sum / count_sum)
        return self.losses[-1]

    def tensors(self, *, is_settled: bool = True) -> Iterator[tuple[Key, torch.Tensor]]:
        """All that can be compared after a step. A gradient that is None is left out."""
        del is_settled  # a step leaves nothing under way here
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                yield Key("gradient", name), parameter.grad
            yield Key("weight", name), parameter.detach()
        for name, buffer in self.model.named_buffers():
            yield Key("buffer", name), buffer.double()

    def before(self, key: Key) -> torch.Tensor | None:
        """The same thing a step earlier, if it is kept."""
        kept = {"gradient": self._gradients_before, "weight": self._weights_before}.get(key.what, {})
        return kept.get(key.name)

    def _update(self) -> None:
        if self._plan.step.clip_norm:
            nn.utils.clip_grad_norm_(self._parameters, self._plan.step.clip_norm)
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * self._schedule(self._steps_done) if self._schedule else rate
        self._optimizer.step()

    def _make_note(self, name: str) -> Callable[[torch.Tensor], None]:
        return lambda _: self.backward_order.append(name)


def microbatch_rows(plan: Plan, total: int) -> list[list[int]]:
    """The rows of each microbatch: the union of what every data rank has in its microbatch of that number."""
    num_ranks, num_microbatches = plan.axes.replicate * plan.axes.data, plan.step.microbatches
    rows: list[list[int]] = [[] for _ in range(num_microbatches)]
    for rank in range(num_ranks):
        start, stop = part_of(total, rank, num_ranks)
        for number in range(num_microbatches):
            first, last = part_of(stop - start, number, num_microbatches)
            rows[number].extend(range(start + first, start + last))
    return rows


def take_rows(tree: Any, rows: list[int]) -> Any:
    return map_tensors(lambda tensor: tensor[rows] if tensor.dim() else tensor, tree)
