"""The actions of a rank in a pipeline, of which every schedule is made.

A schedule (`schedules.py`) is one list of actions per rank. The same list is executed
(`parallel/pipeline/executor.py`), timed (`planning/simulate.py`) and drawn (`report/timeline.py`).

Stages are numbered along the model. With one chunk per rank, stage s is on rank s; with more (interleaved), rank r of p
holds the stages r, r + p, r + 2p, ...
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "forward", "backward", "input-grad", "weight-grad", "send", "receive", "gather", "reduce", "release", "update"
]

COMPUTE: tuple[Kind, ...] = ("forward", "backward", "input-grad", "weight-grad", "update")
"""Kinds that occupy a rank; the others are exchanges, which overlap them."""

EVERY = -1
"""The microbatch of an action that belongs to a stage, not to a microbatch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One action of a rank.

    forward, backward         of a microbatch through a stage
    input-grad, weight-grad   the two halves of a backward pass: the gradient that the stage before waits for, the rest
    send, receive             a microbatch's activations (to a later stage) or their gradients (to an earlier one);
                              a receive begins here, and the action that needs it waits for it
    gather, release           the stage's parameters are gathered (ZeRO-3), and freed again
    reduce                    the stage's gradients are complete and are reduced over the data ranks
    update                    the optimizer's step
    """

    kind: Kind
    stage: int
    microbatch: int = EVERY
    peer: int = -1
    """send, receive: the stage at the other end."""
    version: int = 0
    """forward, backward: the weight version used; update: the version made. Counted in updates from the start."""

    @property
    def is_compute(self) -> bool:
        return self.kind in COMPUTE


Schedule = tuple[tuple[Action, ...], ...]
"""The actions of every rank along the pipeline axis, in order."""
