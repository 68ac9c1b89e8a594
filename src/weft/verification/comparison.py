"""A trainer and its oracle side by side: the same steps, and after each of them every tensor compared.

Where the answer is known only when all ranks are done (asynchronous servers, whose order of updates is replayed), what
a rank has is copied after every step, and compared in the end.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from weft.comm.collectives import all_reduce
from weft.comm.objects import gather_values
from weft.server.worker_mesh import WorkerMesh
from weft.sync.served import ServedSync
from weft.training.data.trees import map_tensors
from weft.training.trainer import Trainer
from weft.verification.compare import (
    TOLERANCES,
    LocalTensor,
    compare_tensors,
    difference,
    from_first,
    local_tensors,
    loss_error,
    step_on_part,
)
from weft.verification.examine import WHOLE_BATCH, Examination
from weft.verification.one_process import Key, OneProcess
from weft.verification.oracles import Oracle
from weft.verification.served_record import Recorder, WorkerRecord, orders_of
from weft.verification.served_replay import ReplayedTraining
from weft.verification.verdict import Cause, Difference, Finding, Verification

Batch = tuple[Any, Any]
OnStep = Callable[[int], object]

_RANDOM = Cause(
    kind="random",
    text="the model draws random numbers in its passes, by a function that verify does not silence; every rank draws "
    "others: switch it off in the model, then verify again",
)


class Comparison:
    """A trainer and its oracle, compared step by step."""

    def __init__(self, trainer: Trainer, oracle: Oracle | None, dtype: torch.dtype) -> None:
        self._trainer, self._oracle = trainer, oracle
        self._compares_tensors, self._tolerance = dtype == torch.float64, TOLERANCES[dtype]
        self._mesh, self._group = trainer.mesh, trainer.mesh.everyone("control")
        self._found: list[Difference] = []
        self._first: Finding | None = None
        self._is_random = False
        self._losses: dict[str, Any] = {}

    def run(self, batches: Sequence[Batch], *, is_drained: bool, on_step: OnStep | None = None) -> None:
        """Take all steps, and compare after each."""
        for number, batch in enumerate(batches, start=1):
            if isinstance(self._oracle, OneProcess):
                self._oracle.shares = self._trainer.shares
            self._look(number, batch, step_on_part(self._trainer, batch), is_drained=is_drained)
            if on_step is not None:
                on_step(number)

    def _look(
        self,
        number: int,
        batch: Batch,
        mine: float,
        *,
        is_drained: bool,
        held: Sequence[LocalTensor] | None = None,
    ) -> None:
        """Compare a step that returned the loss `mine`. `held`: what this rank had then, unless it has it now."""
        device = self._mesh.world.device
        is_random, (true, is_known, whole, has_whole) = self._expect(map_tensors(lambda one: one.to(device), batch))
        self._is_random = is_random
        self._losses = {"mine": mine, "true": true, "before": self._losses.get("true")}
        error = loss_error(mine, true)
        if not is_known:  # then the plan must return none either
            error = 0.0 if math.isnan(mine) else math.inf
        found = [difference(Key("loss", ""), number, self._mesh.world.rank, error)]
        if has_whole:  # microbatches are compared with themselves, and it is not
            off = loss_error(true, whole)
            found.append(difference(Key("loss", WHOLE_BATCH), number, self._mesh.world.rank, off))
        self.compare(found, number, is_drained=is_drained, has_targets=bool(is_known), held=held)

    def _expect(self, batch: tuple[Any, Any]) -> tuple[bool, list[float]]:
        """Let the oracle do the same step. Returns whether it drew random numbers, and of this rank's replica: the true
        loss, whether there is one, that of the whole batch, and whether that is known."""
        facts = [0.0] * (1 + 4 * self._mesh.num_replicas)
        if self._oracle is not None:
            device = self._mesh.world.device
            random_state = _random_state(device)
            self._oracle.step(*batch)
            facts = [float(not torch.equal(random_state, _random_state(device)))]
            for one in zip(self._oracle.returned, self._oracle.whole_losses, strict=True):
                facts += [value for loss in one for value in (loss or 0.0, float(loss is not None))]
        is_random, *facts = from_first(facts, self._mesh)
        return bool(is_random), facts[4 * self._mesh.replica :][:4]

    def compare(
        self,
        found: list[Difference],
        number: int,
        *,
        is_drained: bool,
        has_targets: bool = True,
        held: Sequence[LocalTensor] | None = None,
    ) -> None:
        """Compare all tensors, and examine the first error of the run."""
        if self._compares_tensors:
            found = found + compare_tensors(
                self._trainer, self._oracle, step=number, is_drained=is_drained, has_targets=has_targets, held=held
            )
        self._found += found
        if self._first is not None:
            return
        worst = max((one.error for one in found), default=0.0)
        is_off = torch.tensor([int(worst > self._tolerance)])
        all_reduce(is_off, self._group, op="max")
        if is_off.item():
            self._first = Examination(
                self._trainer,
                self._oracle,
                found,
                step=number,
                tolerance=self._tolerance,
                is_drained=is_drained,
                held=held,
            ).run(**self._losses)
            if self._is_random:
                self._first = dataclasses.replace(self._first, cause=_RANDOM)

    def outcome(self, rule: str, *, num_steps: int, notes: list[str]) -> Verification:
        mine = [asdict(one) for one in _worst(self._found)]
        gathered = gather_values(mine, self._group)
        worst = _worst(Difference(**entry) for part in gathered for entry in part)
        return Verification(
            num_steps=num_steps,
            tolerance=self._tolerance,
            differences=tuple(sorted(worst, key=lambda one: -one.error)),
            rule=rule,
            first=self._first,
            notes=tuple(gather_values(notes, self._group)[0]),  # the first rank has run the whole model
        )


class ReplayedComparison(Comparison):
    """A worker of asynchronous servers, compared when the order of all updates is known."""

    def run(self, batches: Sequence[Batch], *, is_drained: bool, on_step: OnStep | None = None) -> None:
        sync, mesh = self._trainer.sync, self._mesh
        assert isinstance(sync, ServedSync) and isinstance(mesh, WorkerMesh)
        recorder, steps = Recorder(sync), []
        for number, batch in enumerate(batches, start=1):
            mine = step_on_part(self._trainer, batch)
            recorder.after_step()
            held = [_copied(one) for one in local_tensors(self._trainer, is_drained=is_drained)]
            steps.append((batch, mine, held))
            if on_step is not None:
                on_step(number)
        records = [WorkerRecord(**one) for one in mesh.gather_from_workers(asdict(recorder.record))]
        orders_of(records)  # on every rank: all raise alike
        if isinstance(self._oracle, ReplayedTraining):
            device = mesh.world.device
            self._oracle.replay(records, [map_tensors(lambda one: one.to(device), batch) for batch in batches])
        for number, (batch, mine, held) in enumerate(steps, start=1):
            self._look(number, batch, mine, is_drained=is_drained, held=held)


def _copied(local: LocalTensor) -> LocalTensor:
    copy = None if local.tensor is None else local.tensor.detach().to("cpu", copy=True)
    return dataclasses.replace(local, tensor=copy)


def _worst(found: Iterable[Difference]) -> list[Difference]:
    """The largest difference of every tensor."""
    worst: dict[tuple[str, str], Difference] = {}
    for one in found:
        key = (one.what, one.name)
        if key not in worst or not one.error <= worst[key].error:
            worst[key] = one
    return list(worst.values())


def _random_state(device: torch.device) -> torch.Tensor:
    if device.type != "cuda":
        return torch.get_rng_state()
    return torch.cat([torch.get_rng_state(), torch.cuda.get_rng_state(device)])
