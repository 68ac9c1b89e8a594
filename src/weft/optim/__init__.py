"""Optimizers for large batches, and learning-rate schedules (docs/methods/large-batch.md).

    weft.optim.LAMB, weft.optim.LARS     torch optimizers that are also right on parts of tensors
    weft.optim.exclude_one_dim           for parallelize(groups=...): biases and norms without decay and adaptation
    weft.optim.batch_scaling, scaled     a rate that was found with another batch size
    weft.optim.schedule                  learning-rate schedules

The optimizers are imported at first use: they need torch, and schedules do not.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from weft.optim.exclude_one_dim import exclude_one_dim
from weft.optim.schedule import batch_scaling, scaled

if TYPE_CHECKING:
    from weft.optim.lamb import LAMB
    from weft.optim.lars import LARS

__all__ = ["LAMB", "LARS", "batch_scaling", "exclude_one_dim", "scaled"]

_NEED_TORCH = {"LAMB": "weft.optim.lamb", "LARS": "weft.optim.lars"}


def __getattr__(name: str) -> Any:
    if name not in _NEED_TORCH:
        raise AttributeError(f"module 'weft.optim' has no attribute {name!r}")
    return getattr(importlib.import_module(_NEED_TORCH[name]), name)
