"""All data ranks of a plan with a codec in one process, one after the other: compression studied on one device.

Ranks that exchange gradients at every step hold the same weights. So there is one model and one optimizer, in a trainer
that takes itself for the first rank of the plan and is alone in all its groups. It takes whole global batches, cuts
them into the parts that real ranks get, and each of these into the plan's microbatches; numbered one after the other,
they draw the random numbers of real ranks. `sync/compressed_in_process.py` encodes the gradient of each part by itself.

It shows neither time nor bytes of a run on real ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weft.checkpoint.load import require_whole
from weft.comm.failures.activity import collective_call
from weft.errors import DataError
from weft.layout import part_of
from weft.parallel.state.batchnorm import has_batch_norms
from weft.plan.in_process_refusals import BATCH_STATISTICS_OF_WORKERS
from weft.plan.plan import Plan
from weft.sync.in_process import InProcessExchange
from weft.training.data.trees import num_samples, split_tree
from weft.training.replicas_in_process import LoneMesh, MakeTrainer
from weft.training.step.microbatches import CountedBatch, Microbatches
from weft.training.step.parallel_model import ParallelModel
from weft.training.trainer import Trainer
from weft.world import World


class MeshOfWorkers(LoneMesh):
    """The first rank of a plan without the others, which gets whole global batches."""

    @property
    def num_batch_parts(self) -> int:
        return 1


def workers_problems(model: nn.Module, plan: Plan) -> Iterator[str]:
    """Every reason why this model cannot be trained by workers in one process."""
    if plan.data.buffers != "broadcast" and has_batch_norms(model):
        yield BATCH_STATISTICS_OF_WORKERS.message(plan)


def make_workers(model: nn.Module, plan: Plan, world: World, make: MakeTrainer) -> Trainer:
    """A trainer of all data ranks of a plan; `world` is that of its ranks."""
    batch_norms = has_batch_norms(getattr(model, "_orig_mod", model))
    mesh = MeshOfWorkers(plan, replace(world, rank=0, hosts=(0,) * world.size), batch_norms=batch_norms)
    return make(model, mesh, InProcessExchange(), WorkersInProcess)


class WorkersInProcess(Trainer):
    """The trainer of one model with the gradients of all data ranks of its plan."""

    def __init__(self, model: nn.Module, parts: ParallelModel, **settings: Any) -> None:
        super().__init__(model, parts, **settings)
        self._microbatches = _OfWorkers(self._microbatches, self.mesh.data_size)  # type: ignore[assignment]
        self.counts.is_late = True

    @property
    def data_rank(self) -> int:
        return 0

    @property
    def data_size(self) -> int:
        """1: whole global batches are taken here, and cut into the workers' parts."""
        return 1

    @collective_call("trainer.step")
    def step(self, inputs: Any, targets: Any) -> torch.Tensor:
        """A step on a global batch, with each worker's gradient compressed by itself; returns its mean loss."""
        if not num_samples(inputs):
            raise DataError("the global batch is empty; give at least one sample")
        return super().step(inputs, targets)

    @collective_call("trainer.load")
    def load(self, directory: str | Path, *, extra_state: bool = True) -> None:
        self.wait_for_save()
        # A rank looks for damage in its share of the files; here nobody looks at the others'.
        alone = LoneMesh(Plan(), replace(self.mesh.world, size=1, hosts=(0,)), batch_norms=False)
        with alone:
            require_whole(Path(directory), [alone])
        super().load(directory, extra_state=extra_state)


@dataclass(frozen=True, slots=True)
class _OfWorkers:
    """Cuts global batches into the microbatches of all workers, one worker after the other."""

    inside: Microbatches
    num_workers: int

    def cut(self, inputs: Any, targets: Any, share: tuple[int, int] | None = None) -> list[CountedBatch]:
        del share  # as many for all
        total = num_samples(inputs, "inputs")
        if total != num_samples(targets, "targets"):
            return self.inside.cut(inputs, targets)  # which refuses it
        ranges = [part_of(total, worker, self.num_workers) for worker in range(self.num_workers)]
        return [
            batch for span in ranges for batch in self.inside.cut(split_tree(inputs, *span), split_tree(targets, *span))
        ]
