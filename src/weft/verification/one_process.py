"""One process training the same model on the same microbatches: what every lossless plan must equal.

It is as plain as a training loop can be. It shares with the trainer only the way a model is called, the definition of a
loss and the split of a batch, so that a mistake in one does not hide in the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from weft.layout import part_of
from weft.plan.partition.shares import Shares, even_shares, samples_of
from weft.plan.plan import Plan
from weft.training.data.trees import forward, map_output, map_tensors, num_samples, output_tensors
from weft.training.loss.loss import LossFunction, LossTerms, count_targets, loss_terms, resolve_loss
from weft.training.parallelize import ParameterGroups
from weft.training.setup.probe_loss import state_kept
from weft.training.setup.probe_optimizer import OptimizerFactory


class Key(NamedTuple):
    """Identifies a tensor that is compared."""

    what: str
    """gradient, state, weight, average or buffer."""
    name: str
    version: int = 0
    """Number of updates that made it, where ranks may have done different numbers of them."""
    replica: int = 0
    """The replica that has it, where replicas differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Loss, optimizer and learning rates, the same under the plan and in one process; as for `parallelize`."""

    loss: str | LossFunction
    optimizer: OptimizerFactory
    schedule: Callable[[int], float] | None
    groups: ParameterGroups | None


@dataclass(slots=True)
class Passes:
    """What the forward passes of a step gave, in their order."""

    outputs: list[Any] = field(default_factory=list)
    rows: list[list[int]] = field(default_factory=list)
    """The rows of the global batch in each."""
    loss_sums: list[float] = field(default_factory=list)
    counts: list[float] = field(default_factory=list)


class Updates:
    """A torch optimizer with one parameter group per parameter, torch's own clipping, the recipe's schedule, and the
    plan's average of the weights."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], plan: Plan, recipe: Recipe) -> None:
        groups = recipe.groups or (lambda name, shape: {})
        self.optimizer = recipe.optimizer(
            [{"params": [p], **groups(name, tuple(p.shape))} for name, p in parameters.items()]
        )
        self._named = dict(parameters)
        self._average = plan.average
        self.means: dict[str, torch.Tensor] = {}
        """The averages so far; none where the plan keeps none, or before they begin."""
        self._parameters, self._clip_norm = list(parameters.values()), plan.step.clip_norm
        self._rates = [group["lr"] for group in self.optimizer.param_groups]
        self._schedule = recipe.schedule or (lambda step: 1.0)

    def step(self, steps_done: int) -> None:
        if self._clip_norm:
            nn.utils.clip_grad_norm_(self._parameters, self._clip_norm)
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * self._schedule(steps_done)
        decay = self._average.decay
        if decay and not self.means and steps_done >= self._average.start:
            self.means = {name: parameter.detach().clone() for name, parameter in self._named.items()}
        self.optimizer.step()
        for name, mean in self.means.items():
            self.means[name] = decay * mean + (1 - decay) * self._named[name].detach()


class OneProcess:
    """A model trained without any parallelism."""

    rule, is_exact, is_streamed = "one process", True, False
    instead_of = "one process"

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        recipe: Recipe,
        asked: object = None,
        *,
        data_ranks: Sequence[int] | None = None,
    ) -> None:
        """`data_ranks`: those whose parts of every global batch it trains on; all unless given."""
        del asked  # the plan is all that it needs to know of the ranks
        self.model = model
        self.num_targets = [0.0]
        self.losses: list[float] = []
        self.whole_losses: list[float | None] = [None]
        self._data_ranks = data_ranks
        self.backward_order: list[str] = []
        self.shares: Shares | None = None
        """Microbatches of each data rank in the next step; None: as many for all."""
        self._plan, self._loss = plan, resolve_loss(recipe.loss)
        self._trained = trained_parameters(model)
        self._updates = Updates(self._trained, plan, recipe)
        self._previous: dict[str, dict[str, torch.Tensor]] = {}
        self._hooks = [
            p.register_post_accumulate_grad_hook(lambda _, name=name: self.backward_order.append(name))
            for name, p in self._trained.items()
        ]

    def step(self, inputs: Any, targets: Any, *, updates: Sequence[bool] = (True,)) -> float:
        """One step on a whole global batch; returns its mean loss. Gradients are kept for the comparison.

        Without targets, or where `updates` says so, there is no update. Without targets the loss is not a number.
        """
        named = dict(self.model.named_parameters())
        self._previous = {
            "gradient": {name: p.grad for name, p in named.items() if p.grad is not None},
            "weight": {name: p.detach().clone() for name, p in named.items()},
        }
        self._updates.optimizer.zero_grad(set_to_none=True)
        passes = Passes()
        self._run(inputs, targets, passes)
        count_sum = float(sum(passes.counts))
        for parameter in self._trained.values():
            if parameter.grad is not None:
                parameter.grad /= max(count_sum, 1.0)
        self.num_targets = [count_sum]
        self.whole_losses = [self._loss_of_all(passes, targets)] if count_sum else [None]
        if updates[0] and count_sum:
            self._update()
        self.losses.append(sum(passes.loss_sums) / count_sum if count_sum else math.nan)
        return self.losses[-1]

    def _run(self, inputs: Any, targets: Any, passes: Passes) -> None:
        """Add up the gradients of the losses' sums, microbatch by microbatch."""
        rows_of_all = microbatch_rows(self._plan, num_samples(inputs), self._data_ranks, shares=self.shares)
        self._run_rows(inputs, targets, rows_of_all, passes)

    def _run_rows(self, inputs: Any, targets: Any, rows_of_all: list[list[int]], passes: Passes) -> None:
        for rows in rows_of_all:
            if not rows:
                continue
            output, terms = self._forward(self.model, inputs, targets, rows)
            self._backward([(rows, output, terms)], passes)

    def _forward(self, model: nn.Module, inputs: Any, targets: Any, rows: list[int]) -> tuple[Any, LossTerms]:
        part, target_part = take_rows((inputs, targets), rows)
        output = forward(model, part)
        return output, loss_terms(self._loss, output, target_part, count_targets(target_part))

    def _backward(self, ran: Sequence[tuple[list[int], Any, LossTerms]], passes: Passes) -> None:
        """The backward pass of forward passes together, given with their rows."""
        losses = [terms.value * terms.multiplier for _, _, terms in ran]
        torch.stack(losses).sum().backward()
        for hook in self._hooks:
            hook.remove()
        passes.outputs += [map_output(torch.Tensor.detach, output) for _, output, _ in ran]
        passes.rows += [rows for rows, _, _ in ran]
        passes.loss_sums += [float(loss.detach()) for loss in losses]
        passes.counts += [float(terms.count) for _, _, terms in ran]

    def _update(self) -> None:
        self._updates.step(len(self.losses))

    @property
    def returned(self) -> list[float | None]:
        return [self.losses[-1] if self.num_targets[0] else None]

    @property
    def final_weights(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    @torch.no_grad()
    def _loss_of_all(self, passes: Passes, targets: Any) -> float | None:
        """The loss of all microbatches at once, where it is a user's own; None where there is one microbatch."""
        if len(passes.outputs) < 2 or self._loss.counts_targets:
            return None
        target_all = take_rows(targets, [row for rows in passes.rows for row in rows])
        try:
            with state_kept(self._loss.function):
                joined = _join_samples(passes.outputs, list(map(len, passes.rows)))
                terms = loss_terms(self._loss, joined, target_all, count_targets(target_all))
        except Exception:  # it takes batches of one size only, or outputs that have no samples to join
            return None
        return float(terms.value * terms.multiplier) / float(terms.count)

    def tensors(self, *, is_drained: bool = True) -> Iterator[tuple[Key, torch.Tensor]]:
        """All that can be compared after a step. A gradient that is None is left out."""
        del is_drained  # a step leaves nothing in flight here
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                yield Key("gradient", name), parameter.grad
            yield Key("weight", name), parameter.detach()
        for name, mean in self._updates.means.items():
            yield Key("average", name), mean
        for name, buffer in self.model.named_buffers():
            yield Key("buffer", name), buffer.double()

    def previous(self, key: Key) -> torch.Tensor | None:
        return self._previous.get(key.what, {}).get(key.name)

    def at_exchange(self, key: Key) -> dict[str, torch.Tensor]:
        del key  # there is no exchange of weights
        return {}


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def microbatch_rows(
    plan: Plan, total: int, data_ranks: Sequence[int] | None = None, *, shares: Shares | None = None
) -> list[list[int]]:
    """The rows of each microbatch: the union of what the data ranks, all unless given, have in their microbatches of
    that number. `shares`: microbatches of each data rank, unless all have as many."""
    shares = shares or even_shares(plan.axes.data_ranks, plan.step.microbatches)
    rows: list[list[int]] = [[] for _ in range(max(shares))]
    for rank in range(len(shares)) if data_ranks is None else data_ranks:
        num_microbatches = shares[rank]
        start, stop = samples_of(total, rank, shares)
        for number in range(num_microbatches):
            first, last = part_of(stop - start, number, num_microbatches)
            rows[number].extend(range(start + first, start + last))
    return rows


def take_rows(tree: Any, rows: list[int]) -> Any:
    return map_tensors(lambda tensor: tensor[rows] if tensor.dim() else tensor, tree)


def _join_samples(outputs: list[Any], sizes: list[int]) -> Any:
    """One output of several: tensors of samples are joined, others (a term of the loss) averaged by samples."""
    parts = [output_tensors(output) for output in outputs]
    joined = iter(
        torch.cat(alike)
        if all(one.dim() and one.shape[0] == size for one, size in zip(alike, sizes, strict=True))
        else sum(one * size for one, size in zip(alike, sizes, strict=True)) / sum(sizes)
        for alike in zip(*parts, strict=True)
    )
    return map_output(lambda _: next(joined), outputs[0])
