"""Text from a language model: sample a token, append it, go on. Plain and exact; no cache of keys and values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from weft.errors import DataError, ModelError
from weft.training.loss import forward
from weft.training.modes import evaluating


def generate_tokens(
    model: nn.Module,
    tokens: Sequence[int],
    *,
    num_tokens: int,
    context: int,
    temperature: float,
    seed: int,
    device: torch.device,
) -> list[int]:
    """The given tokens and `num_tokens` more. Temperature 0 takes the likeliest token every time."""
    if not tokens:
        raise DataError("generation needs at least one token to continue, got none")
    generator = torch.Generator().manual_seed(seed)
    sequence = list(tokens)
    with evaluating(model):
        for _ in range(num_tokens):
            window = torch.tensor([sequence[-context:]], dtype=torch.int64, device=device)
            logits = forward(model, window)[0, -1].float().cpu()
            if logits.isnan().any():
                raise ModelError("the model's output is not a number, so it has no next token; its training diverged")
            sequence.append(_pick(logits, temperature, generator))
    return sequence


def _pick(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1, generator=generator))
