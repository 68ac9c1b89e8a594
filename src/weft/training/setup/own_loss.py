"""A loss of the user's own under a plan that cuts batches: tried before its first use, its errors agreed on by all.

Only ranks that have an output can try a loss, and only those with samples: an error there would leave the others in
their exchanges. So what a rank finds in the first step, or what the loss raises there, is kept, the loss is taken for
zero, and at the end of the step all ranks tell each other and raise alike. Later steps call the loss and nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from weft.comm.objects import gather_values
from weft.errors import ModelError, WeftError
from weft.mesh import Mesh
from weft.parallel.sequence.device_assertion import DeviceAssertion
from weft.parallel.tensor.cross_entropy import IGNORED_TARGET
from weft.plan.model_refusals import COUNTS_OF_PARTS, LOSS_FAILED, LOSS_OF_PARTS, LOSS_OF_SOME_TARGETS, LOSS_OVER_TOKENS
from weft.plan.partition.replicas import one_replica
from weft.training.data.trees import num_samples, tensors_of
from weft.training.loss.gather_batch import BatchGathering, GatheringError, refuse_empty
from weft.training.loss.loss import Loss, no_loss
from weft.training.setup.probe_loss import LossFinding, can_be_tried, probe_loss
from weft.training.setup.trial_batch import SAMPLES, TOKENS
from weft.units import name_ranks

log = logging.getLogger("weft")

_MOST_TRIALS = 8
"""Steps in which a loss is tried that no trial has shown anything of."""


class OwnLoss:
    """A loss function that is tried before its first use."""

    def __init__(
        self,
        loss: Loss,
        mesh: Mesh,
        *,
        outside: Callable[[], AbstractContextManager[None]] | None = None,
    ) -> None:
        """`outside`: given where ranks share sequences, the context in which losses run, outside of the pass's
        replacements: one may call a model of its own."""
        self._mesh, self._inner = mesh, loss
        self._outside = outside or nullcontext
        cuts_samples = one_replica(mesh.plan).data_ranks * mesh.plan.step.microbatches > 1
        self._alongs = (SAMPLES,) * cuts_samples + (TOKENS,) * (outside is not None)
        is_own = not loss.counts_targets and bool(self._alongs)
        self.loss = replace(loss, function=self) if is_own else loss
        """The loss to call."""
        self._is_settled = not is_own
        self._gathers = False
        self.gathering = BatchGathering(mesh=mesh)
        self._needs_all_targets: DeviceAssertion | None = None
        """Watches for targets of −100, where the loss is right only without them."""
        self._num_steps = 0
        self._found: LossFinding | None = None
        self._is_tried = False
        self._error: Exception | None = None

    @property
    def may_gather(self) -> bool:
        """True if the loss exchanges tensors with other data ranks, or nothing is known yet."""
        return self._mesh.num_batch_parts > 1 and (self._gathers or not self._is_settled)

    def __call__(self, output: Any, targets: Any) -> Any:
        with self._outside():
            if self._needs_all_targets is not None:
                counts = tensors_of(targets)[0] != IGNORED_TARGET
                if not self._needs_all_targets.holds(counts.all(), "targets"):
                    raise ModelError(LOSS_OF_SOME_TARGETS.message(self._mesh.plan))
            if self._is_settled and not self._gathers:
                return self._inner.function(output, targets)
            if self._is_settled:
                with self.gathering.during("loss"):
                    return self._inner.function(output, targets)
            return self._first_call(output, targets)

    def _first_call(self, output: Any, targets: Any) -> Any:
        if not self._is_tried and can_be_tried(output, targets):
            self._is_tried = True
            try:
                with self.gathering.during("trial"):
                    self._found = probe_loss(self._inner, output, targets, self._alongs)
            except GatheringError:
                self._gathers = True
        if self._found is not None and not self._found.is_additive:
            return no_loss(output)
        try:
            with self.gathering.during("loss"):
                return self._inner.function(output, targets)
        except Exception as error:
            if self._mesh.world.size == 1:
                raise
            self._error = self._error or error
            return no_loss(output)

    def begin(self, inputs: Any) -> None:
        """Prepare a step; collective where the loss may gather."""
        if self.may_gather:
            self.take_sizes(num_samples(inputs))

    def take_sizes(self, num_samples: int) -> Sequence[int]:
        """Learn the number of samples in every part of the batch; collective."""
        sizes = dict(gather_values([self._mesh.batch_part, num_samples], self._mesh.batch_group("control")))
        self.gathering.sizes = tuple(sizes[part] for part in range(self._mesh.num_batch_parts))
        if self._gathers and any(self.gathering.sizes):
            refuse_empty(self.gathering.sizes)
        return self.gathering.sizes

    def settle(self) -> None:
        """Agree on what was found in a step, and raise on every rank what one of them has found; collective, until all
        is known."""
        if self._is_settled:
            return
        self._num_steps += 1
        found = self._found
        mine = {
            "tried": self._is_tried,
            "gathers": self._gathers,
            "problem": None if found is None or found.is_additive else self._refusal(found),
            "known": found is not None,
            "needs_all": found is not None and found.needs_all_targets,
            "error": None if self._error is None else f"{type(self._error).__name__}: {self._error}",
            "refused": list(self._error.problems) if isinstance(self._error, WeftError) else [],
        }
        everyone = gather_values(mine, self._mesh.everyone("control"))
        self._raise_alike(everyone)
        self._gathers = any(one["gathers"] for one in everyone)
        if any(one["needs_all"] for one in everyone):
            self._needs_all_targets = DeviceAssertion(LOSS_OF_SOME_TARGETS.message(self._mesh.plan))
        is_tried = any(one["tried"] for one in everyone)
        is_known = self._gathers or any(one["known"] for one in everyone)
        if is_tried and not is_known and self._num_steps < _MOST_TRIALS:
            self._is_tried = False
        elif is_tried:
            self._is_settled = True
            if not is_known and self._mesh.world.rank == 0:
                log.warning(
                    "the loss could not be tried on parts of a batch (it does not accept outputs drawn at random, or "
                    "draws random numbers itself), so weft does not know whether parts add up to the whole; run weft "
                    "verify (docs/losses.md)"
                )

    def _raise_alike(self, everyone: list[dict[str, Any]]) -> None:
        problems = [one["problem"] for one in everyone if one["problem"] is not None]
        if problems:
            raise ModelError(problems[0])
        failed = {rank: one["error"] for rank, one in enumerate(everyone) if one["error"] is not None}
        if not failed:
            return
        if self._error is not None and (isinstance(self._error, WeftError) or len(failed) == len(everyone)):
            raise self._error
        if refused := [problem for one in everyone for problem in one["refused"]]:
            raise ModelError(list(dict.fromkeys(refused)))
        texts = "; ".join(sorted(set(failed.values())))
        raise ModelError(LOSS_FAILED.message(ranks=name_ranks([*failed]), error=texts)) from self._error

    def _refusal(self, found: LossFinding) -> str:
        if found.along == TOKENS:
            return LOSS_OVER_TOKENS.message(whole=found.whole, parts=found.parts)
        seen = f"{found.whole:.6g} for the whole against {found.parts:.6g}"
        seen = f"it raises {found.error} on a part" if found.error else seen
        if found.counts_itself:
            return COUNTS_OF_PARTS.message(self._mesh.plan, seen=seen)
        return LOSS_OF_PARTS.message(self._mesh.plan, seen=seen)
