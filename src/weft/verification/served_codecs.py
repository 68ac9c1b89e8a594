"""What one worker of servers sends through a codec, by the codec's rule, and what it keeps.

A server decodes what one worker sends without the others, as the part of a tensor that it holds: so every worker has a
rule of one replica for every part that is compressed (`compression/rules.py`), and all else is sent as it is:

    sent     C(sum of the worker's gradients over its targets), part by part; what is not sent stays in that unit
    clip     dgc: the worker's gradient is first scaled to at most clip sqrt(W) of W workers that update together, as a
             mean over its targets of the step before
    update   sum of what workers sent / sum of their targets; for sign the vote, as it is. With dgc
             w := w - lr update, past the optimizer's momentum, which it keeps of weight decay alone

A part of which a worker has no gradient is not sent, unless something of it may be kept. Nothing here is shared with
`sync/` and `server/`, so a mistake there cannot hide in its own answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from weft.plan.exchange.warm_up import is_dense
from weft.plan.plan import Codec, Plan
from weft.verification.compression.rules import Part, make_rule

Tensors = dict[str, torch.Tensor]
_WITHOUT_MEMORY = ("sign", "qsgd", "terngrad")


@dataclass(frozen=True, slots=True, kw_only=True)
class PushedPart:
    """A part of a tensor that a worker compresses by itself, and one server holds."""

    name: str
    """Of the tensor."""
    drawn_as: str
    """The name from which random numbers are drawn."""
    num_columns: int
    places: torch.Tensor
    """The place of each element in the flattened whole tensor."""


class WorkerCodec:
    """The rules of all parts for one worker."""

    def __init__(
        self,
        plan: Plan,
        parts: Sequence[PushedPart],
        optimizer: torch.optim.Optimizer,
        names: Sequence[str],
        worker: int,
    ) -> None:
        """`names`: of the optimizer's groups, which have a parameter each."""
        self._codec = plan.codec
        num_together = plan.axes.data_ranks if plan.server.updates_together else 1
        self._clip_norm = plan.codec.clip * num_together**0.5
        groups = dict(zip(names, optimizer.param_groups, strict=True))
        self._rules = []
        for one in parts:
            group = groups[one.name]
            part = Part(
                name=one.drawn_as,
                num_columns=one.num_columns,
                momentum=group.get("momentum", 0.0),
                is_nesterov=group.get("nesterov", False),
                first_replica=worker,
            )
            self._rules.append((one, make_rule(plan.codec, part, 1)))
        self._lasting: set[str] = set()
        """What this worker has sent something of, so that something may be kept."""
        self._last_count = 0.0

    @torch.no_grad()
    def clip(self, gradients: Tensors, count: float) -> None:
        """Scale a worker's gradients of the sum over so many targets, in place; the 1e-6 is torch's."""
        unit, self._last_count = self._last_count or count, count
        if self._clip_norm and gradients:
            norm = torch.stack([one.norm() for one in gradients.values()]).norm() / unit
            for one in gradients.values():
                one.mul_((self._clip_norm / (norm + 1e-6)).clamp(max=1.0))

    @torch.no_grad()
    def send(self, step: int, gradients: Mapping[str, torch.Tensor], like: Mapping[str, torch.Tensor]) -> Tensors:
        """What servers get in a step, counted from 0, of gradients of the sum over targets. `like`: all parameters."""
        given = {name: one.flatten() for name, one in gradients.items()}
        sent = {name: one.clone() for name, one in given.items()}
        for one, rule in self._rules:
            if one.name not in given and one.name not in self._lasting:
                continue
            places = one.places.to(like[one.name].device)
            mine = given[one.name][places] if one.name in given else torch.zeros_like(like[one.name].view(-1)[places])
            whole = sent.setdefault(one.name, torch.zeros_like(like[one.name]).view(-1))
            whole[places] = rule.exchange(step, [mine])
        if self._codec.name not in _WITHOUT_MEMORY:
            self._lasting |= given.keys()
        return {name: one.view(like[name].shape) for name, one in sent.items()}


def is_vote(codec: Codec, step: int) -> bool:
    """What is sent of parts that are compressed are signs."""
    return codec.name == "sign" and not is_dense(codec, step)


def masks_of(parts: Sequence[PushedPart], like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """By name: where a tensor is compressed. Tensors of which nothing is are left out."""
    masks: Tensors = {}
    for one in parts:
        mask = masks.setdefault(one.name, torch.zeros_like(like[one.name], dtype=torch.bool))
        mask.view(-1)[one.places.to(mask.device)] = True
    return masks


@torch.no_grad()
def update_past_momentum(
    update: Callable[[], object],
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    masks: Mapping[str, torch.Tensor],
) -> None:
    """Let an optimizer, which has a group for every parameter, update with gradients of which the masked part has
    momentum already: it sees nothing of that part, and weights move by it afterwards."""
    past: Tensors = {}
    groups = dict(zip(parameters, optimizer.param_groups, strict=True))
    for name, mask in masks.items():
        gradient = parameters[name].grad
        if gradient is None:
            continue
        past[name] = gradient * mask
        is_seen = groups[name]["weight_decay"] or not mask.all()
        parameters[name].grad = gradient - past[name] if is_seen else None
    update()
    for name, one in past.items():
        parameters[name].sub_(groups[name]["lr"] * one)
