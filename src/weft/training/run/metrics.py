"""One JSON line per step, from which the progress bar and every report are made.

A record is written one step late, after the next step was launched, so that reading the loss does not stall a device:
its numbers are copied to the host at the end of their step, and only they are waited for.
"""

from __future__ import annotations

import contextlib
import json
import math
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from weft.errors import JobError
from weft.mesh import Mesh
from weft.plan.text import write_text
from weft.sync.delayed import DelayedSync
from weft.sync.local import LocalSync
from weft.sync.served import ServedSync
from weft.training.data.trees import tensors_of
from weft.training.replicas_in_process import ReplicasInProcess
from weft.training.run.spikes import SpikeRule
from weft.training.step.async_scalars import AsyncScalars
from weft.training.stragglers import Straggler
from weft.training.trainer import Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """The measurements of one step, on rank 0."""

    step: int
    """Number of the step, from 1."""
    loss: float
    """Mean over the global batch, before the update; with `[data] sync = "local"`, over the part of rank 0's replica,
    or the mean of all replicas' losses where they are in one process."""
    lr: float
    unit: str
    """Unit of `units_per_s`: tokens or samples."""
    units_per_s: float
    """Speed over all ranks."""
    step_s: float
    """Time from the end of the last step to the end of this one."""
    exchange_s: float
    """Part of step_s blocked in exchanges, without those hidden by computation."""
    bubble_s: float
    """Part of step_s waiting for other stages of a pipeline."""
    compute_s: float
    """The rest of step_s."""
    sent_bytes: dict[str, int]
    """Bytes sent by this rank, by axis."""
    memory_bytes: int
    """Peak so far: allocated on the device, or resident in a process on the host."""
    grad_norm: float | None
    """Norm before clipping; None if the plan neither clips nor computes in 16 bits."""
    num_skipped: int
    """Number of steps skipped so far because the loss or a gradient was not finite."""
    loss_scale: float | None
    """Factor of the loss; None unless the plan computes in fp16."""
    spike: float | None
    """The usual loss, at the step with which a loss spike begins; else None."""
    exchanged: bool = True
    """All replicas have equal weights after this step; False between exchanges of replicas that differ, and in all
    steps where these are merged later."""
    spread: float | None = None
    """Distance of rank 0's replica from the mean of all, relative to the norm of the mean, before an exchange that was
    merged in this step; None in other steps, and where replicas never differ."""
    delay: int | None = None
    """Steps after which exchanges are merged, where that is measured (`[data] delay = "auto"`); else None."""
    staleness: list[int] | None = None
    """Updates of the first server so far by their gradients' age, of all workers: 15 stands for older ones, too. None
    unless servers make an update of every worker's gradient by itself."""
    num_dropped: int | None = None
    """Gradients of all workers so far that came too late, by the first server; None unless servers make updates of all
    workers' gradients together."""
    replica_losses: list[float] | None = None
    """Every replica's loss, where all replicas are in one process; else None."""
    shares: tuple[int, ...] | None = None
    """Microbatches of each data rank; None unless the plan balances."""
    straggler: Straggler | None = None
    """The rank that the others wait for, as far as was known at the end of the step; None if there is none."""


class Recorder:
    """Measures steps and makes their records."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._spikes = SpikeRule()
        self._waiting: tuple[dict[str, Any], AsyncScalars] | None = None
        """Fields in which `...` stands for a number that the device may still compute, and those numbers."""
        self.restart_clock()

    def restart_clock(self) -> None:
        """Leave what happened since the last step (saving, evaluating) out of the next."""
        self._last_s = time.perf_counter()
        self._last_traffic = self._traffic()

    def add(self, *, num_units: int, **fields: Any) -> StepRecord | None:
        """Note a step that has just been launched; `fields` are the record's other ones, some of them as tensors.

        Returns the record of the step before.
        """
        previous = self.flush()
        now, traffic = time.perf_counter(), self._traffic()
        step_s = now - self._last_s
        before = {axis: self._last_traffic.get(axis, (0, 0.0)) for axis in traffic}
        waited_s = {axis: wait_s - before[axis][1] for axis, (_, wait_s) in traffic.items()}
        bubble_s = waited_s.pop("pipeline", 0.0)
        exchange_s = sum(waited_s.values())
        measured = {
            **{name: _place_of(value) for name, value in fields.items()},
            "units_per_s": num_units / step_s,
            "step_s": step_s,
            "exchange_s": exchange_s,
            "bubble_s": bubble_s,
            "compute_s": step_s - exchange_s - bubble_s,
            "sent_bytes": {axis: sent - before[axis][0] for axis, (sent, _) in traffic.items()},
            "memory_bytes": peak_memory_bytes(self._mesh.world.device),
        }
        scalars = AsyncScalars(*(tensor for value in fields.values() for tensor in _tensors_in(value)))
        self._waiting = (measured, scalars)
        self._last_s, self._last_traffic = now, traffic
        return previous

    def flush(self) -> StepRecord | None:
        """The record that is still waiting, if any. Blocks until its step is done."""
        if self._waiting is None:
            return None
        measured, scalars = self._waiting
        self._waiting = None
        numbers = iter(scalars.read())
        complete: dict[str, Any] = {name: _filled(value, numbers) for name, value in measured.items()}
        spike = self._spikes.add(complete["loss"])
        return StepRecord(**{**complete, "num_skipped": int(complete["num_skipped"]), "spike": spike})

    def _traffic(self) -> dict[str, tuple[int, float]]:
        return {axis: (traffic.sent_bytes, traffic.wait_s) for axis, traffic in self._mesh.traffic.items()}


def replica_fields(trainer: Trainer) -> dict[str, Any]:
    """What the record of the step just made says of replicas that differ between exchanges; nothing of others."""
    if not isinstance(trainer.sync, LocalSync):
        return {}
    losses = list(trainer.replica_losses) if isinstance(trainer, ReplicasInProcess) else None
    sync = trainer.sync
    spread = sync.spread if sync.merged_step == sync.steps_done else None
    delay = sync.delay if isinstance(sync, DelayedSync) and sync.auto is not None else None
    return {"exchanged": sync.agrees, "spread": spread, "replica_losses": losses, "delay": delay}


def served_fields(trainer: Trainer) -> dict[str, Any]:
    """What the record says of servers; nothing of other runs."""
    if not isinstance(trainer.sync, ServedSync):
        return {}
    _, begin = trainer.sync.told[0]
    if trainer.sync.shares_batch:
        return {"num_dropped": begin.num_dropped}
    oldest = max((age for age, number in enumerate(begin.ages) if number), default=-1)
    return {"staleness": list(begin.ages[: oldest + 1])}


class MetricsFile:
    """`metrics.jsonl`, appended to line by line; a resume first drops the lines after its checkpoint."""

    def __init__(self, path: Path, *, steps_done: int) -> None:
        kept = [line for line in read_lines(path) if line["step"] <= steps_done]
        write_text(path, "".join(json.dumps(line) + "\n" for line in kept), kind=JobError)
        self._file = path.open("a", buffering=1)

    def close(self) -> None:
        self._file.close()

    def write(self, line: dict[str, Any]) -> None:
        finite = {key: _finite(value) for key, value in line.items()}
        self._file.write(json.dumps(finite, allow_nan=False) + "\n")


def _tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of a field: itself, or its items."""
    return [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, torch.Tensor)]


def _place_of(value: Any) -> Any:
    if isinstance(value, list):
        return [_place_of(one) for one in value]
    return ... if isinstance(value, torch.Tensor) else value


def _filled(value: Any, numbers: Iterator[float]) -> Any:
    if isinstance(value, list):
        return [_filled(one, numbers) for one in value]
    return next(numbers) if value is ... else value


def _finite(value: Any) -> Any:
    """JSON has no infinity and no NaN: a diverged loss is null."""
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def units_of(targets: Any) -> tuple[str, int]:
    """The unit of a batch and its number per sample: tokens if samples have several integer targets, else samples."""
    first = tensors_of(targets)[0]
    if first.dim() > 1 and not first.is_floating_point():
        return "tokens", first[0].numel() if len(first) else 0
    return "samples", 1


def peak_memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file, without one cut short by a kill."""
    lines = []
    for text in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            lines.append(json.loads(text))
    return lines
