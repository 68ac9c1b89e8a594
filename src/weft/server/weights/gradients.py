"""From buckets as they were received to one gradient per part: decoded, scaled and added up in a fixed order.

Workers send sums over their targets divided by a number of their own, and that number with it (`scale`); an update
divides by the targets of all whose gradients it is made of. So uneven and empty batches are exact. Sums begin with the
first worker and go on in the order of workers, whatever the order of arrival: the same gradients give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.server.protocol.frames import tensor_of
from weft.server.protocol.layout import ServerLayout
from weft.server.protocol.pushes import read_push
from weft.server.weights.decoder import Decoder, to_majority
from weft.server.workers.arrivals import Arrival

Gradients = list[torch.Tensor | None]
"""By part of the server; None: the part stays as it is."""


@torch.no_grad()
def add_up(
    layout: ServerLayout,
    arrivals: Sequence[Arrival],
    decoder: Decoder,
    *,
    num_targets: float,
    memory: dict[int, torch.Tensor] | None = None,
) -> Gradients:
    """The mean gradient over the targets of some workers, by part; None for parts of which none of them has one. Where
    signs were sent it is the sign that most of them have.

    `memory`: of earlier sums by part, which are over, for the next ones: the first touch of new memory takes longer
    than an update."""
    memory = {} if memory is None else memory
    found: Gradients = [None] * len(layout.parts)
    voted: set[int] = set()
    for bucket, parts in enumerate(layout.buckets):
        for arrival in arrivals:
            if bucket not in arrival.buckets:
                continue
            push = read_push(layout.pushes[bucket], arrival.buckets[bucket])
            scale = arrival.said.scale / num_targets
            for place, frame in zip(layout.pushes[bucket].plain, push.plain, strict=True):
                if len(frame):
                    _add(found, parts[place], tensor_of(frame, layout.dtype(parts[place])), scale, memory)
            if not arrival.said.count:  # what its codecs kept stays theirs
                continue
            for place, values in decoder.decode(bucket, push, scale=scale):
                _add_own(found, parts[place], values)
                if decoder.votes(push.step):
                    voted.add(parts[place])
    for part in voted:
        votes = found[part]
        assert votes is not None
        to_majority(votes)
    return found


def _add(found: Gradients, part: int, values: torch.Tensor, scale: float, memory: dict[int, torch.Tensor]) -> None:
    total = found[part]
    if total is None:
        if part not in memory:
            memory[part] = torch.empty_like(values)
        found[part] = torch.mul(values, scale, out=memory[part])
    else:
        total.add_(values, alpha=scale)


def _add_own(found: Gradients, part: int, values: torch.Tensor) -> None:
    """Values that nobody else reads."""
    total = found[part]
    if total is None:
        found[part] = values
    else:
        total.add_(values)


def norm_of(gradients: Sequence[torch.Tensor | None]) -> float:
    """The 2-norm of all parts together."""
    there = [one for one in gradients if one is not None and one.numel()]
    if not there:
        return 0.0
    return float(torch.linalg.vector_norm(torch.stack([one.double() for one in torch._foreach_norm(there)])))
