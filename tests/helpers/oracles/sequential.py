"""Flush-free pipelines in one process: the version rules of PipeDream and PipeDream-2BW, in a loop.

Weights after v updates are `history[v]`. A microbatch's gradient is taken at weights assembled from the history,
stage by stage, in one call of the whole model; torch's own optimizer then updates the newest weights with it. There is
no pipeline here. The rule itself, which version a gradient is taken at, is that of `verification/delayed_weights.py`,
which `weft verify` uses too. Losses are scaled by the caller's `loss_of`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from weft.verification.delayed_weights import Weights, gradients_at, version_used

LossOf = Callable[[Weights, Any], Tensor]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(slots=True, kw_only=True)
class Run:
    """History of a training run."""

    history: list[Weights]
    """The weights after 0, 1, 2, ... updates."""
    losses: list[float] = field(default_factory=list)
    """Loss of each microbatch."""
    gradients: list[Weights] = field(default_factory=list)
    """Gradients of each update, without unused parameters."""


class Training:
    """The newest weights under a torch optimizer, and all earlier versions."""

    def __init__(self, weights: Mapping[str, Tensor], optimizer: MakeOptimizer) -> None:
        self.heads = {name: nn.Parameter(weight.detach().clone()) for name, weight in weights.items()}
        self.optimizer = optimizer(self.heads.values())
        self.run = Run(history=[{name: head.detach().clone() for name, head in self.heads.items()}])

    def update(self, gradients: Weights) -> None:
        for name, head in self.heads.items():
            head.grad = gradients.get(name)
        self.optimizer.step()
        self.run.gradients.append(gradients)
        self.run.history.append({name: head.detach().clone() for name, head in self.heads.items()})


def pipedream(
    loss_of: LossOf,
    weights: Mapping[str, Tensor],
    microbatches: Sequence[Any],
    *,
    stage_of: Callable[[str], int],
    num_stages: int,
    optimizer: MakeOptimizer,
    flushes: Collection[int] = (),
    vertical_sync: bool = False,
) -> Run:
    """One update per microbatch. Before the microbatches in `flushes` the pipeline was empty."""
    trained, start = Training(weights, optimizer), 0
    for k, microbatch in enumerate(microbatches):
        start = k if k in flushes else start
        version = functools.partial(
            version_used, "pipedream", num_stages, update=k, start=start, vertical_sync=vertical_sync
        )
        used = {name: trained.run.history[version(stage_of(name))][name] for name in weights}
        loss, gradients = gradients_at(loss_of, used, microbatch)
        trained.run.losses.append(loss)
        trained.update(gradients)
    return trained.run


def two_bw(
    loss_of: LossOf, weights: Mapping[str, Tensor], batches: Sequence[Sequence[Any]], *, optimizer: MakeOptimizer
) -> Run:
    """One update per batch, W(t+1) = W(t) - step(gradient at W(t-1)), summed over the batch's microbatches in order."""
    trained = Training(weights, optimizer)
    for t, batch in enumerate(batches):
        summed: Weights = {}
        used = trained.run.history[version_used("2bw", 1, 0, t)]
        for microbatch in batch:
            loss, gradients = gradients_at(loss_of, used, microbatch)
            trained.run.losses.append(loss)
            for name, gradient in gradients.items():
                summed[name] = summed[name] + gradient if name in summed else gradient
        trained.update(summed)
    return trained.run


def without_stashing(
    loss_of: LossOf,
    weights: Mapping[str, Tensor],
    microbatches: Sequence[Any],
    *,
    stage_of: Callable[[str], int],
    num_stages: int,
    optimizer: MakeOptimizer,
) -> list[float]:
    """Relative error per microbatch of a pipeline's gradients if backward passes use the newest weights.

    The forward pass uses the same weights as `pipedream`. Wherever autograd saved a weight, the backward pass gets the
    newest one instead, as if updates overwrote the only copy.
    """
    trained, errors = Training(weights, optimizer), []
    for k, microbatch in enumerate(microbatches):
        history = trained.run.history
        used = {name: history[max(0, k - (num_stages - 1 - stage_of(name)))][name] for name in weights}
        _, true = gradients_at(loss_of, used, microbatch)
        with replaced_in_backward(used, history[-1]):
            _, found = gradients_at(loss_of, used, microbatch)
        errors.append(relative_error(found, true))
        trained.update(found)
    return errors


def replaced_in_backward(used: Mapping[str, Tensor], newest: Mapping[str, Tensor]) -> Any:
    """Context in which autograd saves the newest weight in place of a used weight, or of a view of it."""
    name_at = {weight.untyped_storage().data_ptr(): name for name, weight in used.items()}

    def pack(kept: Tensor) -> Tensor:
        name = name_at.get(kept.untyped_storage().data_ptr())
        return kept if name is None else newest[name].as_strided(kept.size(), kept.stride(), kept.storage_offset())

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept)


def relative_error(found: Weights, true: Weights) -> float:
    """Relative error of all gradients together, in the Euclidean norm."""
    off = sum(float((found[name] - gradient).square().sum()) for name, gradient in true.items())
    return float((off / sum(float(gradient.square().sum()) for gradient in true.values())) ** 0.5)
