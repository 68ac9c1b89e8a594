"""Whole tensors of all replicas through the rules of a codec, part by part as the plan cuts them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from weft.plan.plan import Codec
from weft.verification.compression.parts import CodedPart
from weft.verification.compression.rules import Part, make_rule


class CodedExchanges:
    """The rules of all parts, with what they keep from exchange to exchange."""

    def __init__(
        self,
        coded: Sequence[CodedPart],
        codec: Codec,
        num_replicas: int,
        momenta: Mapping[str, tuple[float, bool]] | None = None,
        num_turns: int = 1,
    ) -> None:
        """`momenta`: by name, the momentum that dgc takes over, and whether it is Nesterov's. `num_turns`: exchanges
        that are under way at once; PowerSGD, which learns from what comes back, keeps something for each of them."""
        self._parts = []
        for one in coded:
            momentum, is_nesterov = (momenta or {}).get(one.name, (0.0, False))
            part = Part(name=one.name, num_columns=one.num_columns, momentum=momentum, is_nesterov=is_nesterov)
            turns = range(num_turns if codec.name == "powersgd" else 1)
            self._parts.append((one, [make_rule(codec, part, len(one.by_host) or num_replicas) for _ in turns]))
        self.names = {one.name for one in coded}

    def replace_(
        self, name: str, total: Tensor, given: Sequence[Tensor], step: int, *, divisor: float, turn: int = 0
    ) -> Tensor:
        """Replace the compressed parts of a tensor by the sum of what replicas send of `given` in a step, counted from
        0, over a divisor; returns the tensor. `turn`: the number of this exchange, from 0."""
        for one, rules in self._parts:
            if one.name == name:
                places = one.places.to(total.device)
                values = [each.flatten()[places] for each in given]
                if one.by_host:
                    values = [torch.stack([values[k] for k in replicas]).sum(dim=0) for replicas in one.by_host]
                total.view(-1)[places] = rules[turn % len(rules)].exchange(step, values) / divisor
        return total

    def mask(self, name: str, like: Tensor) -> Tensor:
        """1 where a tensor is compressed, 0 elsewhere."""
        found = torch.zeros_like(like)
        for one, _ in self._parts:
            if one.name == name:
                found.view(-1)[one.places.to(like.device)] = 1.0
        return found
