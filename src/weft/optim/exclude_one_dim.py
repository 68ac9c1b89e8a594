"""Which parameters LARS and LAMB leave alone: those that are not matrices."""

from __future__ import annotations

from typing import Any


def exclude_one_dim(name: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """Settings for parameters of at most one dim (biases, and the weights of norms): no decay, and no ratio of norms.

    For `parallelize(..., groups=weft.optim.exclude_one_dim)`. It looks at the global shape: under ZeRO the part that a
    rank has of any tensor is flat.
    """
    del name
    return {"weight_decay": 0.0, "adapt": False} if len(shape) <= 1 else {}
