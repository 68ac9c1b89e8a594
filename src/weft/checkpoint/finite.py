"""A checkpoint that is not finite is not written: it would take the place of a good one, and a resumed run would go on
from it.

Looked at before anything is copied or written, on every rank's own part, so that all ranks refuse together.
"""

from __future__ import annotations

from pathlib import Path

import torch

from weft.checkpoint.local_parts import held_parameters
from weft.checkpoint.state import TrainerState
from weft.comm.objects import gather_values
from weft.errors import NotFiniteError
from weft.parallel.state.finite import not_finite, shown, spoilt_buffers
from weft.units import name_ranks


def refuse_not_finite(trainer: TrainerState, directory: Path) -> None:
    """Raise on every rank if any rank's weights, optimizer state, running statistics or what its codecs keep are not
    finite; collective."""
    everyone = trainer.mesh.everyone("control")
    findings = gather_values(_find(trainer), everyone)
    found = list(dict.fromkeys(name for names in findings for name in names))
    if found:
        ranks = [rank for rank, names in zip(everyone.ranks, findings, strict=True) if names]
        raise NotFiniteError(
            f"{directory} is not saved, because training is not finite on {name_ranks(ranks)}: "
            f"{shown(found)}; older checkpoints are untouched: load the newest"
        )


def _find(trainer: TrainerState) -> list[str]:
    """Names of this rank's parts that are not finite. A frozen parameter may be infinite, if it was made so."""
    held = held_parameters(trainer.named_model, trainer.sync, trainer.layouts)
    trained = [(name, one) for name, one in held.items() if one.piece is not None]
    named = [(name, one.tensor) for name, one in trained]
    for name, one in trained:
        assert one.piece is not None
        state = trainer.optimizer.state.get(one.piece, {})
        named += [(f"{name}/{key}", value) for key, value in state.items() if isinstance(value, torch.Tensor)]
    if trainer.average is not None and trainer.average.has_begun:
        named += [(f"average of {name}", mean) for name, mean in trainer.average.means.items()]
    if trainer.sync.compressed is not None:
        named += [(f"codec's {name}", kept) for name, kept in trainer.sync.compressed.tensors().items()]
    spoilt = [name for name in spoilt_buffers(trainer.named_model) if name not in trainer.nan_from_start]
    return not_finite(named) + spoilt
