"""The loss by which Hugging Face's mixtures of experts balance their experts, and where it cannot be counted.

With `output_router_logits` in their configuration these models return it as `aux_loss`: for each expert the share of
tokens it got times its mean probability. That product of two means over the batch is no sum over samples.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from weft.models.hugging_face_inputs import hugging_face_class
from weft.plan.model_refusals import BALANCE_LOSS_LEFT_OUT, BALANCE_LOSS_OF_PARTS
from weft.plan.partition.replicas import one_replica
from weft.plan.plan import Plan

_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef", "router_z_loss_coef")


def balance_problems(model: nn.Module, plan: Plan, *, own_loss: bool) -> Iterator[str]:
    """Reasons why the loss of a model's routers cannot be trained with; `own_loss`: the user's loss may add it."""
    kind = hugging_face_class()
    config = getattr(model, "config", None)
    if kind is None or not isinstance(model, kind) or not getattr(config, "output_router_logits", False):
        return
    if not any(getattr(config, name, 0.0) for name in _COEFFICIENTS):
        return
    parts = one_replica(plan).data_ranks * plan.axes.sequence * plan.step.microbatches
    if not own_loss:
        yield BALANCE_LOSS_LEFT_OUT.message(model=type(model).__name__)
    elif parts > 1:
        yield BALANCE_LOSS_OF_PARTS.message(model=type(model).__name__, parts=parts)
