"""A step of a pipeline that is empty between steps: naive, GPipe, 1F1B, interleaved and zero-bubble.

    every rank   take the same microbatches ─ do what the schedule says ─ complete gradients ─ agree ─ update

Loss and count are known on the last stage only; after its exchange with the other data ranks it tells the stages before
it, which by then have all they need to update, so nobody waits for the slowest. Where the plan clips, or computes in
16 bits, all stages have to wait for each other's norms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from weft.comm.collectives import all_reduce, broadcast
from weft.comm.p2p import receive
from weft.errors import DataError
from weft.mesh import Mesh
from weft.parallel.pipeline.cut_model import CutModel, tied_groups
from weft.parallel.pipeline.executor import Pipeline, make_channels, open_pairs
from weft.parallel.pipeline.recording import Recording
from weft.parallel.state.rng import Seeds
from weft.parallel.zero.gather_by_stage import StageGathering
from weft.plan.pipeline.actions import Action
from weft.plan.pipeline.communication import evaluation_of, schedule_of
from weft.sync.base import PipelineSync, Totals
from weft.training.step.clipping import join_norm
from weft.training.step.loss import Count, Loss, loss_terms, no_loss
from weft.training.step.pipeline_passes import Looking, Part, Passes
from weft.training.step.target_count import TargetCount, refuse_no_targets
from weft.training.step.update import Update

Microbatches = list[tuple[Any, Any, Count]]
_GRADIENTS = ("backward", "weight-grad")
"""The kinds of action after which gradients of parameters may be complete."""


class PipelineStep(Passes):
    """Trains a model that is cut into stages."""

    def __init__(
        self,
        *,
        cut: CutModel,
        mesh: Mesh,
        sync: PipelineSync,
        update: Update,
        loss: Loss,
        call: Callable[[Any], Any],
        counts: TargetCount,
        seeds: Seeds,
        recording: Recording,
        runs_empty: bool,
        whole_output: Callable[[Any], Any],
        enter: Callable[[Any], None],
    ) -> None:
        """`whole_output`: all features of an output of which a rank has a share; collective."""
        self._whole_output = whole_output
        gathering = sync.gathering
        assert gathering is None or isinstance(gathering, StageGathering)
        self._shared_by_all: dict[str, Any] = dict(
            data_rank=mesh.sample_rank, gathering=gathering, runs_empty=runs_empty, enter=enter
        )
        super().__init__(cut, call, seeds, **self._shared_by_all)
        self._mesh = mesh
        self._sync = sync
        self._update = update
        self._loss = loss
        self._counts = counts
        self._control = mesh.group("pipeline", "control")
        self._is_last = self._control.index == self._control.size - 1
        trained = {name: parameter for name, parameter in cut.model.named_parameters() if parameter.requires_grad}
        self.pipeline = Pipeline(
            model=cut,
            channels=make_channels(
                lambda purpose: mesh.group("pipeline", purpose), is_ring=mesh.plan.pipeline.chunks > 1
            ),
            recording=recording,
            parameters=list(trained.values()),
            device=mesh.world.device,
        )
        for group in (*self.pipeline.channels.values(), self._control):
            open_pairs(group, mesh.world.device)
        self._names = _names_of_stages(cut, trained)
        self._ties = [(name, group) for name, group in tied_groups(cut, mesh).items() if name in trained]
        self._schedule: tuple[Action, ...] = ()
        self._evaluations: dict[int, tuple[Action, ...]] = {}
        self._last: set[tuple[str, int, int]] = set()
        self._step = 0

    def step(self, microbatches: Microbatches, *, step: int) -> torch.Tensor:
        """One step; returns the mean loss over the global batch."""
        if not self._schedule:
            self._schedule = schedule_of(self._mesh.plan)[self._control.index]
            last = {a.stage: (a.kind, a.stage, a.microbatch) for a in self._schedule if a.kind in _GRADIENTS}
            self._last = set(last.values())
        self.take(microbatches, step=step)
        self._step = step
        self._divisor = self._share([count for _, _, count in microbatches])
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=self._mesh.world.device)
        self._count: Count = 0
        self.pipeline.recording.begin_step()
        self._sync.begin()
        try:
            self.pipeline.run(self._schedule, self)
            self.pipeline.settle()  # costs nothing: nobody begins the next step before the first stage, which ends last
        except BaseException:
            self.pipeline.drop()
            raise
        return self._mean

    def _share(self, counts: Sequence[Count]) -> float | torch.Tensor:
        """What losses are divided by; only the last stage has any, and counts its targets."""
        return self._counts.share(counts) if self._is_last else 1.0

    def root(self, microbatch: int, output: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
        part = self.parts[microbatch]
        if part.num_samples == 0:
            nothing = no_loss(output)
            return nothing, torch.ones_like(nothing)
        terms = loss_terms(self._loss, output, part.targets, part.count)
        self._counts.is_own = self._counts.is_own or terms.own_count
        value, multiplier = terms.value, terms.multiplier
        self._add(part, value.detach() if multiplier == 1 else value.detach() * multiplier, terms.count)
        # To scale a loss is to begin with another gradient than one; it takes no operator of its own.
        factor = multiplier * self._update.loss_scale.value / self._divisor_of(part)
        return value, torch.as_tensor(factor, dtype=value.dtype, device=value.device)

    def _divisor_of(self, part: Part) -> float | torch.Tensor:
        del part
        return self._divisor

    def _add(self, part: Part, loss_sum: torch.Tensor, count: Count) -> None:
        del part
        self._loss_sum += loss_sum
        self._count = self._count + count

    def backward(self, action: Action) -> AbstractContextManager[object]:
        self._enter(self.parts[action.microbatch].inputs)
        if self._gathering is not None:
            self._gathering.wait_for_stage(action.stage)
        if (action.kind, action.stage, action.microbatch) in self._last:
            self._sync.arm_parameters(self._names[action.stage])
        return nullcontext() if self.parts[action.microbatch].num_samples else self._sync.ignoring()

    def exchange(self, action: Action) -> None:
        if action.kind == "reduce":
            self._sync.complete(self._names[action.stage])
        elif action.kind == "update":
            self._finish()
        else:
            super().exchange(action)

    def _finish(self) -> None:
        """Complete the gradients, and update."""
        self._hand_over()
        totals, correction = self._agree(self._sum_over_data(self._loss_sum, self._count), self._divisor)
        try:
            refuse_no_targets(totals.count)
        except DataError:
            self.pipeline.settle()  # the stages before raise too, once they are told
            raise
        self._mean = totals.loss_sum / totals.count
        self._update.run(totals.norm, correction, step=self._step)

    def _sum_over_data(self, loss_sum: torch.Tensor, count: Count) -> Totals:
        counted = torch.as_tensor(count, device=self._mesh.world.device)
        totals = self._sync.finish(loss_sum, counted, with_norm=self._update.needs_norm)
        return join_norm(totals, self._mesh.group("tensor", "control"))

    def _hand_over(self) -> None:
        """Sum what several stages hold; with that, nothing keeps gradients from the other data ranks."""
        with torch.no_grad():
            for name, group in self._ties:
                all_reduce(self._sync.deferred_gradient(name), group)
        self._sync.take_deferred()
        self._sync.arm()
        self._sync.end_microbatch()

    @torch.no_grad()
    def _agree(self, totals: Totals, divisor: float | torch.Tensor) -> tuple[Totals, float | torch.Tensor | None]:
        """What the last stage knows, on every stage: the totals, and the correction of gradients."""
        words = torch.zeros(4, dtype=torch.float64, device=self._mesh.world.device)
        correction = self._counts.correction(divisor, totals.count) if self._is_last else None
        if self._is_last:
            words[0], words[1] = totals.loss_sum, totals.count
            words[2] = 1.0 if correction is None else correction
        if self._update.needs_norm:
            assert totals.norm is not None
            words[3] = totals.norm**2
            all_reduce(words, self._control)
        elif self._is_last:
            for rank in range(self._control.size - 1):
                self.pipeline.post(words, self._control, to=rank)
        else:
            receive(words, self._control, source=self._control.size - 1).wait()
        norm = words[3].sqrt() if self._update.needs_norm else None
        if not self._is_last:
            correction = words[2] if words.is_cuda else (None if float(words[2]) == 1.0 else float(words[2]))
        return Totals(loss_sum=words[0], count=words[1], norm=norm), correction

    def flush(self) -> None:
        """Nothing is in flight between steps."""

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """What must be kept to go on to the bit, between steps: tensors and plain values."""
        return {}, {}

    def load_state(self, tensors: dict[str, torch.Tensor], values: dict[str, Any]) -> None:
        """Go on from what `state` returned; from nothing where weights came from elsewhere."""
        del tensors, values

    def _evaluation(self, num_microbatches: int) -> tuple[Action, ...]:
        if num_microbatches not in self._evaluations:
            schedule = evaluation_of(self._mesh.plan, num_microbatches)
            self._evaluations[num_microbatches] = schedule[self._control.index]
        return self._evaluations[num_microbatches]

    def look(self, microbatches: Microbatches, seen: Callable[[Part, Any], None]) -> None:
        """Run microbatches forward; the last stage's ranks are told of the outputs."""
        looking = Looking(seen, self._cut, self._call, self._seeds, **self._shared_by_all)
        looking.take(microbatches)
        self.pipeline.recording.begin_step()
        self.pipeline.run(self._evaluation(len(microbatches)), looking)

    def skip_microbatch(self, num_microbatches: int) -> None:
        """Take part in what the other data ranks' forward passes exchange."""
        self.pipeline.run([a for a in self._evaluation(num_microbatches) if a.kind in ("gather", "release")], self)

    def token(self, window: torch.Tensor, pick: Callable[[Any], int]) -> int:
        """The next token, which the last stage picks, on every rank."""
        picked = torch.zeros(1, dtype=torch.int64, device=self._mesh.world.device)

        def seen(part: Part, output: Any) -> None:
            del part
            picked[0] = pick(self._whole_output(output))

        self.look([(window, None, 0)], seen)
        broadcast(picked, self._control, root=self._control.size - 1)
        return int(picked)


def _names_of_stages(cut: CutModel, trained: Iterable[str]) -> dict[int, list[str]]:
    """The parameters whose gradients are complete when one stage's are; others wait for all stages of this rank."""
    names: dict[int, list[str]] = {stage: [] for stage in cut.my_stages}
    for name in trained:
        here = cut.stages_of[name] & names.keys()
        if len(here) == 1 and name not in cut.holders:
            names[min(here)].append(name)
    return names
