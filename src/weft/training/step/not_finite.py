"""What follows from a loss or a gradient that is not finite: a warning that names its tensors, and in time an error.

    update     skipped on all ranks of a replica (`update.py`)
    at once    its first rank warns: which step, and which weights, gradients, inputs and losses of which ranks
    at last    after more such steps in a row than are allowed, or at once where weights or running statistics are not
               finite themselves, every rank raises the same error, in the same call of `trainer.step`

After the error the trainer can be used: a loop may load a checkpoint and go on, as `weft train` does
(`training/run/roll_back.py`). An overflow for which a dynamic loss scale falls is the scale's ordinary work: it is
logged, and neither counted nor examined, as long as the loss is finite and the scale can fall.

Replicas that differ between exchanges ([data] sync = "local") each skip, count and warn for themselves. Ranks of others
cannot know of it, and would wait for ever for one that raised alone: the error waits for the next exchange, where all
agree on it.

No step waits for this. On a GPU an update is looked at after the next step was launched, on all ranks alike; by then
its gradients are gone, and cannot be named.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

from torch import nn

from weft.comm.objects import gather_values
from weft.errors import NotFiniteError
from weft.mesh import Mesh
from weft.parallel.state.finite import not_finite, shown, spoilt_buffers
from weft.sync.base import Sync
from weft.training.data.trees import named_tensors
from weft.training.step.async_scalars import AsyncScalars
from weft.training.step.update import Outcome, Update
from weft.units import name_ranks

log = logging.getLogger("weft")

SKIP_AT_MOST = 5
"""Steps in a row that are skipped by default."""

_WORDS = {
    "loss": "the loss of its samples",
    "inputs": "the batch's",
    "gradients": "gradients of",
    "weights": "weights",
    "buffers": "buffers",
}
_KINDS = tuple(_WORDS)


class NotFiniteWatch:
    """Looks at the outcomes of updates, after every step."""

    def __init__(
        self, model: nn.Module, update: Update, sync: Sync, mesh: Mesh, *, skip_at_most: int | None = SKIP_AT_MOST
    ) -> None:
        self._model, self._update, self._sync, self._mesh = model, update, sync, mesh
        self._skip_at_most = skip_at_most
        self._batches: dict[int, Any] = {}
        """Batches in host memory of steps that have not been looked at, by step."""
        self.in_a_row = 0
        """Steps with a loss or gradients that are not finite, since the last good one."""
        self._first_found = ""
        """What was not finite in the first of these."""
        self._is_lost = False
        """Weights or running statistics were not finite, then."""
        self._replica = mesh.whole_replica("control")
        self._of = f" of replica {mesh.replica}" if mesh.num_replicas > 1 else ""
        self._due: str | None = None
        """The error to raise when the other replicas have been told, in the next exchange."""
        self._heard: AsyncScalars | None = None
        """1 if some replica reported in the last exchange that it must stop; on a GPU it is read a step later."""
        self.nan_from_start = frozenset(spoilt_buffers(model))
        """Buffers that the user made so, which says nothing of the training."""

    def warm_up(self) -> None:
        """Load the kernels that look for tensors. A host that loads one may wait until its GPU is idle, which it never
        is while messages of a pipeline are under way between steps."""
        not_finite((piece.name, piece.tensor) for piece in self._sync.pieces)
        spoilt_buffers(self._model)

    def keep(self, step: int, inputs: Any, targets: Any) -> None:
        """Remember what a step was given, in case its loss is not finite."""
        named = [*named_tensors(inputs, "inputs"), *named_tensors(targets, "targets")]
        self._batches[step] = [(name, tensor) for name, tensor in named if not tensor.is_cuda]

    def look(self) -> None:
        """Look at the updates that are over; raises on every rank if too many of them were not finite."""
        closed = self._update.closed
        while closed and (closed[0].is_known or len(closed) > 1):  # else the device is still busy with that step
            self._look_at(closed.popleft(), may_raise=True)
        if self._mesh.num_replicas > 1:
            self._hear_replicas()

    def look_at_all(self) -> None:
        """Look at all updates that all ranks have made, and warn of what is found; waits for the device."""
        while self._update.closed:
            self._look_at(self._update.closed.popleft(), may_raise=False)

    def restart(self) -> None:
        """Forget what was seen: a checkpoint was loaded."""
        self._batches.clear()
        self.in_a_row = 0
        self._due = self._heard = None

    def _hear_replicas(self) -> None:
        """Raise on every rank if some replica has told in an exchange that it cannot go on."""
        heard, self._heard = self._heard, None
        if self._sync.replica_must_stop is not None:
            told, self._sync.replica_must_stop = self._sync.replica_must_stop, None
            self._heard = AsyncScalars(told.amax())
            if not told.is_cuda:
                heard, self._heard = self._heard, None
        if heard is None or not heard.read()[0]:
            return
        problem = f"replica {self._mesh.replica}: {self._due}" if self._due is not None else None
        found = dict.fromkeys(gather_values(problem, self._mesh.everyone("control")))
        self._due, self._sync.must_stop = None, False
        raise NotFiniteError([problem for problem in found if problem is not None])

    def _look_at(self, outcome: Outcome, *, may_raise: bool) -> None:
        for step in [step for step in self._batches if step < outcome.step]:
            del self._batches[step]
        if not outcome.is_bad():
            self.in_a_row = 0
            return
        loss, before, after = float(outcome.loss), float(outcome.scale_before), float(outcome.scale_after)
        what = "a gradient is" if math.isfinite(loss) else "the loss is"
        warning = f"step {outcome.step + 1}{self._of} is skipped: {what} not finite"
        if not outcome.is_left_out:
            warning = f"step {outcome.step + 1}{self._of}: {what} not finite, and the weights were updated all the same"
        if after != before:
            warning += f"; the loss scale goes from {before:g} to {after:g}"
        if outcome.is_left_out:
            warning += f" ({int(outcome.num_skipped)} skipped so far)"
        if math.isfinite(loss) and after < before:
            self._warn(warning)
            return
        self.in_a_row += 1
        if self.in_a_row == 1:
            findings = gather_values(self._find(outcome), self._replica)
            self._first_found = _describe(findings, self._replica.ranks)
            self._is_lost = any(found["weights"] or found["buffers"] for found in findings)
        self._warn(f"{warning}; not finite: {self._first_found}" if self.in_a_row == 1 else warning)
        if may_raise and self._skip_at_most is not None and (self._is_lost or self.in_a_row > self._skip_at_most):
            if self._mesh.num_replicas == 1:
                raise NotFiniteError(self._error(outcome))
            self._due, self._sync.must_stop = self._due or self._error(outcome), True

    def _find(self, outcome: Outcome) -> dict[str, list[str]]:
        """This rank's tensors that are not finite, by kind."""
        self._sync.settle()
        pieces = self._sync.pieces
        gradients = [(one.name, one.tensor.grad) for one in pieces if one.tensor.grad is not None]
        own = outcome.own_loss
        found = {
            "loss": [""] if own is not None and not math.isfinite(float(own)) else [],
            "inputs": not_finite(self._batches.get(outcome.step, ())),
            "gradients": not_finite(gradients) if outcome.is_known else [],
            "weights": not_finite((piece.name, piece.tensor) for piece in pieces),
            "buffers": [name for name in spoilt_buffers(self._model) if name not in self.nan_from_start],
        }
        assert tuple(found) == _KINDS
        return found

    def _error(self, outcome: Outcome) -> str:
        if not self._is_lost:
            return (
                f"{self.in_a_row} steps in a row, up to step {outcome.step + 1}, had a loss or gradients that are not "
                f"finite (skip_at_most = {self._skip_at_most}); at the first of them not finite: "
                f"{self._first_found}; go back to a checkpoint, and look at the data, the learning rate and "
                "[step] clip_norm"
            )
        return (
            f"training cannot go on after step {outcome.step + 1}: weights or running statistics are not finite "
            f"themselves, which skipping steps does not mend; not finite: {self._first_found}; go back to a "
            f"checkpoint{self._way_out(outcome)}"
        )

    def _way_out(self, outcome: Outcome) -> str:
        if not outcome.is_left_out:
            return ", and build the optimizer with fused=True, which can skip an update on a GPU without a wait"
        if not self._update.needs_norm:
            return (
                ", and look at the data and the learning rate; with [step] clip_norm the gradients are looked at "
                "before every update, not the loss alone"
            )
        return ", and look at the data and the learning rate"

    def _warn(self, text: str) -> None:
        if self._replica.index == 0:
            log.warning("%s", text)


def _describe(findings: list[dict[str, list[str]]], ranks: Sequence[int]) -> str:
    """What is not finite, and on which ranks: equal findings of several ranks once."""
    ranks_of: dict[str, list[int]] = {}
    for kind in _KINDS:  # a cause comes before what follows from it
        for rank, found in zip(ranks, findings, strict=True):
            if found[kind]:
                text = f"{_WORDS[kind]} {shown(found[kind])}" if kind != "loss" else _WORDS[kind]
                ranks_of.setdefault(text, []).append(rank)
    described = [f"{text} ({_on(inside, ranks)})" for text, inside in ranks_of.items()]
    return "; ".join(described) or "the norm of all gradients together"


def _on(some: list[int], ranks: Sequence[int]) -> str:
    return "every rank" if len(some) == len(ranks) > 1 else name_ranks(some)
