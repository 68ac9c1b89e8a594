"""weft: one plan, any parallelism. Train one PyTorch model on many devices, verified against one.

Names that need torch are resolved on first use, so that `import weft` and everything about plans stays instant.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from weft.errors import WeftError
from weft.plan.plan import Plan
from weft.plan.text import read_plan, write_plan
from weft.profiles.cluster import Cluster
from weft.profiles.model import ModelProfile

if TYPE_CHECKING:
    from weft import optim as optim
    from weft.training.data.batches import batches
    from weft.training.loss.gather_batch import gather_batch
    from weft.training.parallelize import parallelize
    from weft.training.run.loop import train
    from weft.training.trainer import Trainer
    from weft.verification.verify import verify

__version__ = "0.1.0.dev0"

__all__ = [
    "Cluster",
    "ModelProfile",
    "Plan",
    "Trainer",
    "WeftError",
    "batches",
    "gather_batch",
    "parallelize",
    "read_plan",
    "train",
    "verify",
    "write_plan",
]

_NEED_TORCH = {
    "Trainer": "weft.training.trainer",
    "batches": "weft.training.data.batches",
    "gather_batch": "weft.training.loss.gather_batch",
    "parallelize": "weft.training.parallelize",
    "train": "weft.training.run.loop",
    "verify": "weft.verification.verify",
}


def __getattr__(name: str) -> Any:
    if name == "optim":
        return importlib.import_module("weft.optim")
    if name not in _NEED_TORCH:
        raise AttributeError(f"module 'weft' has no attribute {name!r}")
    value = getattr(importlib.import_module(_NEED_TORCH[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
