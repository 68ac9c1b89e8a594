"""What a rank does in a pipeline, one thing at a time: the words in which every schedule is written.

A schedule (`schedules.py`) is one list of actions a rank. The same list is executed (`parallel/pipeline/executor.py`),
timed (`planning/simulate.py`) and drawn (`report/timeline.py`), so that what is planned, measured and seen cannot
differ.

Stages are numbered along the model. With one chunk a rank, stage s is on rank s; with more (interleaved), rank r of p
holds the stages r, r + p, r + 2p, ...
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "forward",
    "backward",
    "input-grad",
    "weight-grad",
    "send",
    "receive",
    "gather",
    "reduce",
    "release",
    "update",
]

COMPUTE: tuple[Kind, ...] = ("forward", "backward", "input-grad", "weight-grad", "update")
"""What keeps a rank busy; the rest is exchange, and happens beside it."""

EVERY = -1
"""The microbatch of an action that concerns a stage and no microbatch in particular."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One thing a rank does.

    forward, backward         of a microbatch through a stage
    input-grad, weight-grad   the two halves of a backward pass: what the stage before waits for, and the rest
    send, receive             a microbatch's activations (to a later stage) or their gradients (to an earlier one);
                              a receive begins here and is waited for by the action that needs it
    gather, release           the stage's parameters become whole (ZeRO-3), and are given back
    reduce                    the stage's gradients are complete and go to the other data ranks
    update                    the optimizer's step
    """

    kind: Kind
    stage: int
    microbatch: int = EVERY
    peer: int = -1
    """send, receive: the stage at the other end."""
    version: int = 0
    """forward, backward: the weights that are used; update: those that it makes. Counted in updates from the start."""

    @property
    def is_compute(self) -> bool:
        return self.kind in COMPUTE


Schedule = tuple[tuple[Action, ...], ...]
"""Of every rank along the pipeline axis: what it does, in order."""
