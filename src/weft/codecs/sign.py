"""signSGD with majority vote: of every entry its sign, and the update is the sign that most replicas sent.

An entry of 0 counts as positive, and so does a tie. The size of the gradient is lost: every entry becomes +1 or -1, and
the learning rate alone says how far a step goes. Nothing is kept of what was not sent.
"""

from __future__ import annotations

import torch

from weft.codecs.formats.packed_bits import unpack
from weft.codecs.quantised import Quantised
from weft.plan.exchange.quantised import QuantisedTensor


class Sign(Quantised):
    """Signs, and their majority."""

    def quantise(
        self, part: QuantisedTensor, x: torch.Tensor, scales: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return (x < 0).view(torch.uint8), torch.stack(torch.aminmax(x))

    def values_of(self, part: QuantisedTensor, scales: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        return 1 - 2 * codes.to(self._bucket.dtype)

    def restore(
        self, part: QuantisedTensor, rows: list[tuple[torch.Tensor, torch.Tensor]], target: torch.Tensor, scale: float
    ) -> None:
        """A vote has no size, so `scale` does not count."""
        against = torch.zeros(part.num_coded, dtype=torch.int32, device=target.device)
        for _, codes in rows:
            against += unpack(codes, 1, part.num_coded)
        target.copy_(against * 2 <= len(rows)).mul_(2).sub_(1)
