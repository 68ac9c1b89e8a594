"""All replicas of a plan in one process, one after the other on one device: local SGD and DiLoCo studied on one GPU.

Each replica is an ordinary trainer that takes itself for one rank of the plan: its mesh says which, so that dropout and
the parts of the batch are those of real ranks, and each of its groups has one member. Only exchanges between replicas
are made otherwise, in memory (`sync/in_process.py`). The trainer of replica 0 owns the others and is what users see. It
is stepped last, because the exchange is made in the last replica's step.

Checkpoints are those of real ranks: the average that any plan reads, and one file per replica.

It shows neither time nor bytes of a run on real ranks.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import nn

from weft.checkpoint.load import require_whole
from weft.checkpoint.snapshot import give_mean_weights, give_means
from weft.comm.failures.activity import collective_call
from weft.comm.process_groups import ProcessGroups
from weft.errors import DataError, NotFiniteError
from weft.layout import part_of
from weft.mesh import Mesh
from weft.parallel.state.batchnorm import has_batch_norms
from weft.plan.partition.groups import plan_groups
from weft.plan.plan import Average, Plan
from weft.sync.in_process import InProcessExchange
from weft.sync.local import LocalSync
from weft.training.data.trees import num_samples, split_tree
from weft.training.step.parallel_model import ParallelModel
from weft.training.trainer import Trainer
from weft.world import World


class _LoneGroups(ProcessGroups):
    """Process groups of one member each."""

    def _ranks_of_all(self, axes: str) -> list[tuple[int, ...]]:
        return [(self._rank,)]


class LoneMesh(Mesh):
    """One rank of a plan without the others: it knows its place, and is alone in all its groups."""

    def __init__(self, plan: Plan, world: World, *, batch_norms: bool) -> None:
        super().__init__(plan, world)
        self._own = self.process_groups = _LoneGroups(
            self.grid,
            rank=world.rank,
            hosts=world.hosts,
            device=world.device,
            backend=world.backend,
            transport=plan.comm.transport,
        )
        self.add_groups(plan_groups(plan, batch_norms=batch_norms))


class MakeTrainer(Protocol):
    """Makes the trainer of one replica."""

    def __call__(
        self, model: nn.Module, mesh: Mesh, in_process: InProcessExchange, kind: type[Trainer] = Trainer
    ) -> Trainer: ...


def make_replicas(model: nn.Module, plan: Plan, world: World, make: MakeTrainer) -> Trainer:
    """A trainer of all replicas of a plan; `world` is that of its ranks, `model` becomes the first replica's."""
    in_process, batch_norms = InProcessExchange(), has_batch_norms(getattr(model, "_orig_mod", model))
    hosts = (0,) * world.size

    def make_one(rank: int, model: nn.Module, kind: type[Trainer]) -> Trainer:
        place = replace(world, rank=rank, hosts=hosts)
        return make(model, LoneMesh(plan, place, batch_norms=batch_norms), in_process, kind)

    # First values may be drawn, and all replicas begin with the same ones.
    random_state = torch.get_rng_state()
    others = []
    try:
        for rank in range(1, world.size):
            others.append(make_one(rank, copy.deepcopy(model), _OtherReplica))
            torch.set_rng_state(random_state)
        first = cast(ReplicasInProcess, make_one(0, model, ReplicasInProcess))
    except BaseException:
        for trainer in others:
            trainer.mesh.close(failed=True)
        raise
    first.own(others, in_process)
    return first


class _OtherReplica(Trainer):
    """The trainer of a replica other than the first."""

    def __init__(self, model: nn.Module, parts: ParallelModel, **settings: Any) -> None:
        # The average of the weights is the same on all replicas, and the first one's is enough.
        plan, parts.mesh.plan = parts.mesh.plan, replace(parts.mesh.plan, average=Average())
        super().__init__(model, parts, **settings)
        parts.mesh.plan = plan


class ReplicasInProcess(Trainer):
    """The trainer of replica 0, which owns those of the others and takes the global batches of all."""

    replica_losses: Sequence[torch.Tensor]
    """Every replica's loss in the last step; those without samples have none."""

    def own(self, others: Sequence[Trainer], in_process: InProcessExchange) -> None:
        self.others, self._in_process, self.replica_losses = others, in_process, ()
        in_process.syncs = [cast(LocalSync, trainer.sync) for trainer in self.replicas]

    @property
    def replicas(self) -> Sequence[Trainer]:
        """The trainers of all replicas, in their order."""
        return (self, *self.others)

    @property
    def data_rank(self) -> int:
        return 0

    @property
    def data_size(self) -> int:
        """1: whole global batches are taken here, and cut into the replicas' parts."""
        return 1

    @collective_call("trainer.step")
    def step(self, inputs: Any, targets: Any) -> torch.Tensor:
        """A step of every replica on its part of a global batch, and their exchange if one is due; returns the mean of
        their losses."""
        self._require_weights("step()")  # before any replica is changed
        if not num_samples(inputs):
            raise DataError("the global batch is empty; give at least one sample")
        if self.seeds.base is None:
            self.seeds.base = self._draw_seed()
        total, size = num_samples(inputs), len(self.replicas)
        losses: dict[int, torch.Tensor] = {}
        problems: list[str] = []
        is_over = False
        try:
            for number in (*range(1, size), 0):
                start, stop = part_of(total, number, size)
                part = (split_tree(inputs, start, stop), split_tree(targets, start, stop))
                trainer = self.replicas[number]
                trainer.seeds.base = self.seeds.base
                try:
                    loss = Trainer.step(trainer, *part)
                    if stop > start:
                        losses[number] = loss.detach()
                except NotFiniteError as error:  # its step is over; those of the others must be, too
                    problems += error.problems
                    is_over = True
            is_over = self._check_others(problems) or is_over
        except BaseException:
            self._in_process.abandon()
            raise
        if is_over:
            raise NotFiniteError(problems)
        self.replica_losses = [losses[number] for number in sorted(losses)]
        return torch.stack(list(self.replica_losses)).mean()

    def _check_others(self, problems: list[str]) -> bool:
        """After an exchange: let the other replicas read what was reported in it, for which their steps were too early.
        True if training cannot go on; adds why."""
        is_over = False
        assert isinstance(self.sync, LocalSync)
        for trainer in self.others if self.sync.merged_step == self.sync.steps_done else ():
            try:
                trainer.not_finite.look()
            except NotFiniteError as error:
                problems += error.problems
                is_over = True
        return is_over

    def flush(self) -> None:
        for trainer in self.others:
            trainer.flush()
        super().flush()

    @contextmanager
    def _after_others(self, call: Callable[[Trainer], object], *, gathers: bool = False) -> Iterator[None]:
        """Context of a call that all ranks make together, after those of the other replicas. `gathers`: it also gathers
        plain values."""
        self.flush()
        calls = [functools.partial(call, trainer) for trainer in self.others]
        self._in_process.collect(calls, first=functools.partial(call, self) if gathers else None)
        try:
            yield
        finally:
            self._in_process.clear()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        with self._after_others(_enter_consensus), super().averaged():
            yield

    @collective_call("trainer.evaluate")
    def evaluate(self, batches: Iterable[tuple[Any, Any]], *, average: bool = False) -> float:
        """The mean loss of the average of the replicas over whole batches, without training."""
        with self._after_others(_enter_consensus):
            return super().evaluate(batches, average=average)

    @collective_call("trainer.generate")
    def generate(
        self, tokens: Sequence[int], *, num_tokens: int, context: int, temperature: float = 1.0, seed: int = 0
    ) -> list[int]:
        with self._after_others(_enter_consensus):
            return super().generate(tokens, num_tokens=num_tokens, context=context, temperature=temperature, seed=seed)

    @collective_call("trainer.save")
    def save(self, directory: str | Path, *, wait: bool = True) -> None:
        self._require_weights("save()")
        with self._after_others(give_means, gathers=True):
            super().save(directory, wait=wait)

    @collective_call("trainer.export")
    def export(self, directory: str | Path, *, average: bool = False) -> None:
        self._require_weights("export()")
        with self._after_others(functools.partial(give_mean_weights, average=self.average if average else None)):
            super().export(directory, average=average)

    @collective_call("trainer.load")
    def load(self, directory: str | Path, *, extra_state: bool = True) -> None:
        directory = Path(directory)
        self._require_weights("load()")
        self.wait_for_save()
        require_whole(directory, [trainer.mesh for trainer in self.replicas])
        for trainer in self.others:
            trainer.load(directory, extra_state=False)
        super().load(directory, extra_state=extra_state)

    @collective_call("trainer.close")
    def close(self) -> None:
        try:
            with self._after_others(_enter_consensus) if not self._has_failed else nullcontext():
                super().close()
        finally:
            for trainer in self.others:
                trainer.mesh.close(failed=self._has_failed)

    def __exit__(self, kind: object, *given: object) -> None:
        if kind is not None:
            for trainer in self.others:
                trainer.mesh.close(failed=True)
        super().__exit__(kind, *given)


def _enter_consensus(trainer: Trainer) -> None:
    with trainer.sync.consensus():
        pass
