"""One JSON line a step: what the progress bar, the report and every later look at a run read.

A record is written one step late, when the next step is already under way, so that reading the loss never makes a
device wait for the host.
"""

from __future__ import annotations

import json
import math
import os
import resource
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from weft.mesh import Mesh
from weft.training.data.trees import tensors_of


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What one step did, on rank 0."""

    step: int
    """Counted from 1."""
    loss: float
    """Mean over the global batch, before the update."""
    lr: float
    unit: str
    """What is counted below: tokens or samples."""
    units_per_s: float
    """Over all ranks."""
    step_s: float
    """From the end of the last step to the end of this one."""
    exchange_s: float
    """Of these, blocked in exchanges; what computation hid is not in it."""
    bubble_s: float
    """Of these, waiting for other stages of a pipeline."""
    compute_s: float
    """The rest."""
    sent_bytes: dict[str, int]
    """Put on the wire by this rank, by axis."""
    memory_bytes: int
    """Peak so far: allocated on the device, or resident in a process on the host."""
    grad_norm: float | None
    """Before clipping; None where the plan neither clips nor computes in 16 bits."""
    num_skipped: int
    """Steps so far that changed nothing, because a gradient was not finite."""
    loss_scale: float | None
    """What the loss was multiplied by; None unless the plan computes in fp16."""


class Recorder:
    """Measures steps as they pass and turns them into records."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._waiting: tuple[dict[str, Any], torch.Tensor, torch.Tensor | None] | None = None
        self.restart_clock()

    def restart_clock(self) -> None:
        """What happened since the last step (saving, evaluating) is not part of the next."""
        self._last_s = time.perf_counter()
        self._last_traffic = self._traffic()

    def add(
        self,
        *,
        step: int,
        loss: torch.Tensor,
        grad_norm: torch.Tensor | None,
        num_skipped: int = 0,
        loss_scale: float | None = None,
        lr: float,
        unit: str,
        num_units: int,
    ) -> StepRecord | None:
        """Take note of a step that has just been issued; returns the record of the one before."""
        previous = self.flush()
        now, traffic = time.perf_counter(), self._traffic()
        step_s = now - self._last_s
        waited_s = {axis: wait_s - self._last_traffic.get(axis, (0, 0.0))[1] for axis, (_, wait_s) in traffic.items()}
        bubble_s = waited_s.pop("pipeline", 0.0)
        exchange_s = sum(waited_s.values())
        measured = {
            "step": step,
            "lr": lr,
            "unit": unit,
            "units_per_s": num_units / step_s,
            "step_s": step_s,
            "exchange_s": exchange_s,
            "bubble_s": bubble_s,
            "compute_s": step_s - exchange_s - bubble_s,
            "sent_bytes": {
                axis: sent - self._last_traffic.get(axis, (0, 0.0))[0] for axis, (sent, _) in traffic.items()
            },
            "memory_bytes": peak_memory_bytes(self._mesh.world.device),
            "num_skipped": num_skipped,
            "loss_scale": loss_scale,
        }
        self._waiting = (measured, loss, grad_norm)
        self._last_s, self._last_traffic = now, traffic
        return previous

    def flush(self) -> StepRecord | None:
        """The record that is still waiting, if any. Blocks until its step is done."""
        if self._waiting is None:
            return None
        measured, loss, grad_norm = self._waiting
        self._waiting = None
        return StepRecord(loss=float(loss), grad_norm=None if grad_norm is None else float(grad_norm), **measured)

    def _traffic(self) -> dict[str, tuple[int, float]]:
        return {axis: (traffic.sent_bytes, traffic.wait_s) for axis, traffic in self._mesh.traffic.items()}


class MetricsFile:
    """`metrics.jsonl`: appended to line by line; on a resume, lines past the checkpoint are dropped first."""

    def __init__(self, path: Path, *, steps_done: int) -> None:
        kept = [line for line in _lines(path) if line["step"] <= steps_done]
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_text("".join(json.dumps(line) + "\n" for line in kept))
        os.replace(temporary, path)
        self._file = path.open("a", buffering=1)

    def write(self, record: StepRecord) -> None:
        self._write(asdict(record))

    def write_evaluation(self, step: int, held_out_loss: float) -> None:
        self._write({"step": step, "held_out_loss": held_out_loss})

    def close(self) -> None:
        self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        # JSON has no word for what is not finite; a diverged loss is null.
        finite = {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in line.items()}
        self._file.write(json.dumps(finite, allow_nan=False) + "\n")


def units_of(targets: Any) -> tuple[str, int]:
    """What to count in a batch: tokens where every sample has several integer targets, else samples."""
    first = tensors_of(targets)[0]
    if first.dim() > 1 and not first.is_floating_point():
        return "tokens", first[0].numel() if len(first) else 0
    return "samples", 1


def peak_memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a metrics file; a last one cut short by a kill is dropped."""
    lines = []
    if path.exists():
        for text in path.read_text().splitlines():
            try:
                lines.append(json.loads(text))
            except ValueError:
                continue
    return lines
