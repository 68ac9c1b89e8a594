"""Text generation: sample a token, append it, repeat. Exact and without a cache of keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from weft.errors import DataError, ModelError

NextToken = Callable[[Sequence[int], float, torch.Generator], int]
"""Returns the token after a window of tokens, given a temperature and a generator; negative if there is none."""


def generate_tokens(
    next_token: NextToken, tokens: Sequence[int], *, num_tokens: int, context: int, temperature: float, seed: int
) -> list[int]:
    """The given tokens and `num_tokens` more. Temperature 0 always takes the likeliest token."""
    if not tokens:
        raise DataError("generation needs at least one token to continue, got none")
    generator = torch.Generator().manual_seed(seed)
    sequence = list(tokens)
    for _ in range(num_tokens):
        token = next_token(sequence[-context:], temperature, generator)
        if token < 0:
            raise ModelError("the model's output is not a number, so it has no next token; its training diverged")
        sequence.append(token)
    return sequence


def pick_token(output: Any, *, temperature: float, generator: torch.Generator) -> int:
    """The next token from a model's output for one sequence; -1 if the output is not a number."""
    logits = output[0, -1].float().cpu()
    if logits.isnan().any():
        return -1
    if temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1, generator=generator))
