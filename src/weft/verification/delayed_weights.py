"""One process computing with late weights: what the flush-free pipelines, PipeDream and PipeDream-2BW, must equal.

Weights after v updates are version v. A gradient is taken at weights put together from the versions that each stage
would have met (`version_used`), in one call of the whole model; torch's own optimizer then updates the newest ones with
it. There is no pipeline here, so nothing of a pipeline's can be wrong in the same way.

Stages of a pipeline have done different numbers of updates when a step ends. So all versions that one of them may have
then are kept, and a rank compares its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from weft.plan.plan import Plan
from weft.training.data.trees import forward, num_samples
from weft.training.step.loss import Loss, count_targets, loss_terms
from weft.verification.one_process import Key, MakeOptimizer, microbatch_rows, take_rows

Weights = dict[str, Tensor]


def version_used(
    schedule: str, num_stages: int, stage: int, update: int, *, start: int = 0, vertical_sync: bool = False
) -> int:
    """The version of a stage's weights that the gradient of update number `update` is taken at.

    Updates count from 0. With PipeDream, where each is a microbatch, the pipeline was empty before `start`.
    """
    if schedule == "2bw":
        return max(0, update - 1)
    return max(start, update - (num_stages - 1 - (0 if vertical_sync else stage)))


class History:
    """The newest weights under a torch optimizer, and versions before them."""

    def __init__(self, weights: Mapping[str, Tensor], optimizer: MakeOptimizer, *, num_kept: int = 2**62) -> None:
        """`optimizer` is given one parameter group a weight."""
        self.heads = {name: nn.Parameter(weight.detach().clone()) for name, weight in weights.items()}
        self.optimizer = optimizer([{"params": [head]} for head in self.heads.values()])
        self.weights: dict[int, Weights] = {0: self._copies()}
        self.gradients: dict[int, Weights] = {}
        """By the version they made; a weight that was not used is left out."""
        self.newest = 0
        self._num_kept = num_kept

    def update(self, gradients: Weights) -> None:
        for name, head in self.heads.items():
            head.grad = gradients.get(name)
        self.optimizer.step()
        self.newest += 1
        self.gradients[self.newest] = {n: head.grad for n, head in self.heads.items() if head.grad is not None}
        self.weights[self.newest] = self._copies()
        for kept in (self.gradients, self.weights):
            kept.pop(self.newest - self._num_kept, None)

    def _copies(self) -> Weights:
        return {name: head.detach().clone() for name, head in self.heads.items()}


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

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        *,
        loss: Loss,
        optimizer: MakeOptimizer,
        stage_of: Mapping[str, int],
        schedule: Callable[[int], float] | None = None,
        groups: Callable[[str, tuple[int, ...]], dict[str, Any]] | None = None,
    ) -> None:
        """`stage_of` every parameter: the first of the stages that have it."""
        self.model = model
        self.num_targets = 0.0
        self.losses: list[float] = []
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.backward_order = list(reversed(trained))
        self._plan, self._loss, self._schedule, self._stage_of = plan, loss, schedule, stage_of
        self._at_once = 1 if plan.pipeline.schedule == "pipedream" else plan.step.microbatches

        def make(parameters: Iterable[Any]) -> torch.optim.Optimizer:
            settings = [groups(name, tuple(p.shape)) if groups else {} for name, p in trained.items()]
            return optimizer([{**one, **more} for one, more in zip(parameters, settings, strict=True)])

        # A stage may be as many updates behind as there are others, and is held against the version before its own.
        self._history = History(trained, make, num_kept=plan.axes.pipeline + 2)
        self._rates = [group["lr"] for group in self._history.optimizer.param_groups]
        self._history.optimizer.register_step_pre_hook(self._prepare)
        self._means: list[float | None] = []
        """Of each update's microbatches; None without targets."""
        self._steps_done = 0

    def step(self, inputs: Any, targets: Any) -> float | None:
        """Feed a global batch; returns the latest loss that is through on all stages, None if none is."""
        rows = microbatch_rows(self._plan, num_samples(inputs))
        self.num_targets, loss_sum = 0.0, 0.0
        for first in range(0, len(rows), self._at_once):
            parts = [
                (take_rows(inputs, inside), take_rows(targets, inside))
                for inside in rows[first : first + self._at_once]
                if inside
            ]
            loss_sum += self._update(parts)
        self.losses.append(loss_sum / max(self.num_targets, 1.0))
        self._steps_done += 1
        done = (self._steps_done * len(rows) - (self._plan.axes.pipeline - 1)) // self._at_once
        known = [mean for mean in self._means[: max(done, 0)] if mean is not None]
        return known[-1] if known else None

    def tensors(self, *, is_settled: bool) -> Iterator[tuple[Key, Tensor]]:
        """Weights of all versions that a stage may have; once nothing is under way, also gradients and buffers."""
        newest = self._history.newest
        frozen = {name: p for name, p in self.model.named_parameters() if not p.requires_grad}
        for version, weights in self._history.weights.items():
            if not is_settled or version == newest:
                for name, weight in {**weights, **frozen}.items():
                    yield Key("weight", name, version), weight
        if is_settled:
            for name, gradient in self._history.gradients.get(newest, {}).items():
                yield Key("gradient", name, newest), gradient
            for name, buffer in self.model.named_buffers():
                yield Key("buffer", name, newest), buffer.double()

    def before(self, key: Key) -> Tensor | None:
        kept = {"gradient": self._history.gradients, "weight": self._history.weights}.get(key.what, {})
        return kept.get(key.version - 1, {}).get(key.name)

    def _update(self, parts: list[tuple[Any, Any]]) -> float:
        """Returns the sum of the loss over the parts."""
        history, summed, loss_sum, count_sum = self._history, Weights(), 0.0, 0.0
        used = {name: history.weights[self._version(name)][name] for name in history.heads}

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
        history.update({name: gradient / max(count_sum, 1.0) for name, gradient in summed.items()})
        self._means.append(loss_sum / count_sum if count_sum else None)
        self.num_targets += count_sum
        return loss_sum

    def _version(self, name: str) -> int:
        return version_used(
            self._plan.pipeline.schedule,
            self._plan.axes.pipeline,
            self._stage_of[name],
            self._history.newest,
            vertical_sync=self._plan.pipeline.vertical_sync,
        )

    def _prepare(self, *_: object) -> None:
        """Before an update: torch's own clipping, and the rate of the step that the gradient is of."""
        if self._plan.step.clip_norm:
            nn.utils.clip_grad_norm_(list(self._history.heads.values()), self._plan.step.clip_norm)
        for group, rate in zip(self._history.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * self._schedule(self._steps_done) if self._schedule else rate
