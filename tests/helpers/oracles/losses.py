"""Losses as people write them, each with what weft must say: right under every plan, or refused with the way out.

docs/losses.md has the same table. Each takes the outputs of `MLP` (samples, 3) and targets of the kind that it needs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WEIGHT = torch.tensor([0.2, 1.0, 3.0])
"""float32, as people write it, also where the model computes in float64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenLoss:
    """A loss, the kind of its targets, and whether it is right."""

    function: Callable[[Any, Any], Any]
    targets: str = "classes"
    is_right: bool


def masked(output: Tensor, targets: dict[str, Tensor]) -> Tensor:
    each = F.cross_entropy(output, targets["labels"], reduction="none")
    return (each * targets["mask"]).sum() / targets["mask"].sum()


def masked_sum(output: Tensor, targets: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    each = F.cross_entropy(output, targets["labels"], reduction="none")
    return (each * targets["mask"]).sum(), targets["mask"].sum()


def weighted_sum(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    weight = WEIGHT.to(output)
    return F.cross_entropy(output, targets, weight, reduction="sum"), weight[targets].sum()


def focal(output: Tensor, targets: Tensor) -> Tensor:
    log_p = -F.cross_entropy(output, targets, reduction="none")
    return (-((1 - log_p.exp()) ** 2) * log_p).mean()


def distilled(output: Tensor, targets: Tensor) -> Tensor:
    return F.kl_div(output.log_softmax(-1), targets.softmax(-1), reduction="batchmean")


def contrastive(output: Tensor, targets: Tensor) -> Tensor:
    features = F.normalize(output, dim=-1)
    return F.cross_entropy(features @ features.T, torch.arange(len(features), device=features.device))


def by_place(output: Tensor, targets: Tensor) -> Tensor:
    """CLIP's: targets are places in the batch."""
    features = F.normalize(output, dim=-1)
    return F.cross_entropy(features @ features.T, targets)


def positives(output: Tensor, targets: Tensor) -> Tensor:
    """Divides by the number of positives, as detectors do."""
    return F.binary_cross_entropy_with_logits(output, targets, reduction="sum") / targets.sum()


LOSSES = {
    "cross-entropy": WrittenLoss(function=F.cross_entropy, is_right=True),
    "(sum, count)": WrittenLoss(function=weighted_sum, is_right=True),
    "label smoothing": WrittenLoss(function=nn.CrossEntropyLoss(label_smoothing=0.1), is_right=True),
    "ignore_index=-1": WrittenLoss(function=functools.partial(F.cross_entropy, ignore_index=-1), is_right=False),
    "class weights": WrittenLoss(function=nn.CrossEntropyLoss(weight=WEIGHT), is_right=False),
    'reduction="sum"': WrittenLoss(function=nn.CrossEntropyLoss(reduction="sum"), is_right=False),
    "focal": WrittenLoss(function=focal, is_right=True),
    "mean squared error": WrittenLoss(function=F.mse_loss, targets="values", is_right=True),
    "binary cross-entropy, pos_weight": WrittenLoss(
        function=nn.BCEWithLogitsLoss(pos_weight=WEIGHT), targets="shares", is_right=True
    ),
    "divided by its positives": WrittenLoss(function=positives, targets="shares", is_right=False),
    "distillation": WrittenLoss(function=distilled, targets="values", is_right=True),
    "mask divided by its sum": WrittenLoss(function=masked, targets="masked", is_right=False),
    "mask, (sum, count)": WrittenLoss(function=masked_sum, targets="masked", is_right=True),
    "contrastive": WrittenLoss(function=contrastive, targets="values", is_right=False),
    "contrastive by place": WrittenLoss(function=by_place, targets="places", is_right=False),
}


def targets_of(kind: str, num_samples: int, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(3, (num_samples,), generator=generator)
    values = torch.randn(num_samples, 3, generator=generator, dtype=torch.float64)
    return {
        "classes": classes,
        "values": values,
        "shares": (values > 0).double(),
        "masked": {"labels": classes, "mask": torch.ones(num_samples, dtype=torch.float64)},
        "places": torch.arange(num_samples),
    }[kind]
