"""One process computing with delayed weights: what the flush-free pipelines, PipeDream and PipeDream-2BW, must equal.

Weights after v updates are version v. A gradient is taken at weights put together from the versions that each stage
would use (`version_used`), in one call of the whole model; torch's own optimizer then updates the newest ones with it.
There is no pipeline here, so it cannot repeat a pipeline's mistakes.

When a step ends, the stages of a pipeline have done different numbers of updates. So all versions that one of them may
have are kept, and a rank compares its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from weft.plan.plan import Plan
from weft.training.data.trees import forward, num_samples
from weft.training.loss.loss import count_targets, loss_terms, resolve_loss
from weft.verification.one_process import Key, Recipe, Updates, microbatch_rows, take_rows, trained_parameters

Weights = dict[str, Tensor]


def version_used(
    schedule: str, num_stages: int, stage: int, update: int, *, start: int = 0, vertical_sync: bool = False
) -> int:
    """The version of a stage's weights that the gradient of update number `update` is taken at.

    Updates count from 0. With PipeDream, where each microbatch is an update, the pipeline was empty before `start`.
    """
    if schedule == "2bw":
        return max(0, update - 1)
    return max(start, update - (num_stages - 1 - (0 if vertical_sync else stage)))


def gradients_at(
    loss_of: Callable[[Weights, Any], Tensor], weights: Mapping[str, Tensor], microbatch: Any
) -> tuple[float, Weights]:
    """The loss and its gradients; a weight that was not used has none."""
    leaves = {name: weight.detach().requires_grad_() for name, weight in weights.items()}  # on the weights' own memory
    loss = loss_of(leaves, microbatch)
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    named = zip(leaves, gradients, strict=True)
    return float(loss.detach()), {name: gradient for name, gradient in named if gradient is not None}


class DelayedVersions:
    """A model trained by one process under the version rule of its plan's pipeline."""

    rule, is_exact, is_streamed = "one process with delayed weights", False, True
    instead_of = "one process without delays"

    def __init__(self, model: nn.Module, plan: Plan, recipe: Recipe, stage_of: Mapping[str, int]) -> None:
        """`stage_of` maps every parameter to the first of the stages that have it."""
        self.model = model
        self.num_targets = [0.0]
        self.losses: list[float] = []
        self.returned: list[float | None] = [None]
        self.whole_losses: list[float | None] = [None]
        """Not computed: microbatches of one step may have different weights."""
        trained = trained_parameters(model)
        self.backward_order = list(reversed(trained))
        self._plan, self._loss, self._stage_of = plan, resolve_loss(recipe.loss), stage_of
        self._microbatches_per_update = 1 if plan.pipeline.schedule == "pipedream" else plan.step.microbatches
        self._heads = {name: nn.Parameter(weight.detach().clone()) for name, weight in trained.items()}
        self._updates = Updates(self._heads, plan, recipe)
        pipeline, num_stages = plan.pipeline, plan.axes.pipeline
        self._version_used = functools.partial(
            version_used, pipeline.schedule, num_stages, vertical_sync=pipeline.vertical_sync
        )
        self._newest = 0
        self._weights: dict[int, Weights] = {0: self._copies()}
        self._averages: dict[int, Weights] = {}
        self._gradients: dict[int, Weights] = {}
        """By the version they made; a weight that was not used is left out."""
        # A stage may be as many updates behind as there are others, and is compared with the version before its own.
        self._num_kept = plan.axes.pipeline + 2
        self._means: list[float | None] = []
        """Mean loss of each update's microbatches; None without targets."""

    def step(self, inputs: Any, targets: Any) -> float | None:
        """Feed a global batch; returns the latest loss that is through on all stages, None if none is."""
        rows, per_update = microbatch_rows(self._plan, num_samples(inputs)), self._microbatches_per_update
        self.num_targets, loss_sum = [0.0], 0.0
        for first in range(0, len(rows), per_update):
            parts = [inside for inside in rows[first : first + per_update] if inside]
            loss_sum += self._update([take_rows((inputs, targets), inside) for inside in parts])
        self.losses.append(loss_sum / max(self.num_targets[0], 1.0))
        done = (len(self.losses) * len(rows) - (self._plan.axes.pipeline - 1)) // per_update
        known = [mean for mean in self._means[: max(done, 0)] if mean is not None]
        self.returned = [known[-1] if known else None]
        return self.returned[0]

    @property
    def final_weights(self) -> Weights:
        return {name: p.detach() for name, p in {**dict(self.model.named_parameters()), **self._heads}.items()}

    def tensors(self, *, is_drained: bool) -> Iterator[tuple[Key, Tensor]]:
        """Weights of all versions that a stage may have; once nothing is in flight, also gradients and buffers."""
        frozen = {name: p for name, p in self.model.named_parameters() if not p.requires_grad}
        for version, weights in self._weights.items():
            if not is_drained or version == self._newest:
                for name, weight in {**weights, **frozen}.items():
                    yield Key("weight", name, version), weight
                for name, mean in self._averages.get(version, {}).items():
                    yield Key("average", name, version), mean
        if is_drained:
            for name, gradient in self._gradients.get(self._newest, {}).items():
                yield Key("gradient", name, self._newest), gradient
            for name, buffer in self.model.named_buffers():
                yield Key("buffer", name, self._newest), buffer.double()

    def previous(self, key: Key) -> Tensor | None:
        kept = {"gradient": self._gradients, "weight": self._weights}.get(key.what, {})
        return kept.get(key.version - 1, {}).get(key.name)

    def at_exchange(self, key: Key) -> dict[str, Tensor]:
        del key  # there is no exchange of weights
        return {}

    def _update(self, parts: list[tuple[Any, Any]]) -> float:
        """Returns the sum of the loss over the parts."""
        summed, loss_sum, count_sum = Weights(), 0.0, 0.0
        used = {
            name: self._weights[self._version_used(self._stage_of[name], self._newest)][name] for name in self._heads
        }

        def loss_of(weights: Weights, part: tuple[Any, Any]) -> Tensor:
            nonlocal count_sum
            output = forward(lambda *args, **kwargs: functional_call(self.model, weights, args, kwargs), part[0])
            terms = loss_terms(self._loss, output, part[1], count_targets(part[1]))
            count_sum += float(terms.count)
            return terms.value * terms.multiplier

        for part in parts:
            loss, gradients = gradients_at(loss_of, used, part)
            loss_sum += loss
            for name, gradient in gradients.items():
                summed[name] = summed[name] + gradient if name in summed else gradient
        for name, head in self._heads.items():
            head.grad = summed[name] / max(count_sum, 1.0) if name in summed else None
        self._updates.step(len(self.losses))
        self._newest += 1
        self._gradients[self._newest] = {n: head.grad for n, head in self._heads.items() if head.grad is not None}
        self._weights[self._newest] = self._copies()
        self._averages[self._newest] = dict(self._updates.means)
        for kept in (self._gradients, self._weights, self._averages):
            kept.pop(self._newest - self._num_kept, None)
        self._means.append(loss_sum / count_sum if count_sum else None)
        self.num_targets[0] += count_sum
        return loss_sum

    def _copies(self) -> Weights:
        return {name: head.detach().clone() for name, head in self._heads.items()}
