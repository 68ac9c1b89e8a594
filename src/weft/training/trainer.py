"""The trainer: one step of a parallel model, from this rank's part of a batch to updated weights.

    inputs, targets ─┬─ microbatch 0: forward, loss, backward ─┐
                     ├─ microbatch 1: ...                      ├─ sync.finish ─ scale, clip ─ optimizer ─ checks
                     └─ last one: exchange overlaps backward ───┘

Gradients are sums over targets divided by one number that all ranks share (`training/loss/target_count.py`), so the
mean over the global batch is exact for unequal, short and empty parts. The drawing is `step/microbatch_loop.py`, or
with a pipeline `step/pipeline_step.py` and `step/pipeline_stream.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from weft.checkpoint import load as checkpoint
from weft.checkpoint.save import Saving
from weft.comm.collectives import broadcast
from weft.comm.failures.activity import collective_call
from weft.layout import part_of
from weft.parallel.pipeline.cut_model import tied_groups
from weft.parallel.pipeline.recording import Recording
from weft.parallel.state.buffers import broadcast_buffers
from weft.parallel.tensor.cross_entropy import split_cross_entropy_sum
from weft.parallel.wrapping.wrap import add_hook
from weft.plan.pipeline.communication import FLUSH_FREE
from weft.plan.pipeline.timeline import Timeline
from weft.plan.plan import Plan
from weft.sync.served import ServedSync
from weft.training.data.batches import Batches
from weft.training.data.split_tokens import SequenceSplit
from weft.training.data.trees import forward
from weft.training.describe import describe
from weft.training.loss.loss import Count, Loss, loss_terms
from weft.training.loss.target_count import TargetCount
from weft.training.rank_speeds import RankSpeeds
from weft.training.setup.own_loss import OwnLoss
from weft.training.setup.split_layers import KeepingShares
from weft.training.setup.unshifted import warn_of_unshifted
from weft.training.step.average import make_average, require_average
from weft.training.step.divergence import DivergenceCheck, require_same_batch
from weft.training.step.evaluating import evaluating, mean_of_all, together
from weft.training.step.generate import generate_tokens, pick_token
from weft.training.step.microbatch_loop import MicrobatchLoop
from weft.training.step.microbatches import Microbatches
from weft.training.step.not_finite import SKIP_AT_MOST, NotFiniteWatch
from weft.training.step.parallel_model import ParallelModel
from weft.training.step.pipeline_step import PipelineStep
from weft.training.step.pipeline_stream import PipelineStream
from weft.training.step.precision import Caller
from weft.training.step.served_update import make_update
from weft.training.step.step_parts import StepParts


class Trainer:
    """A parallel model and everything that trains it. Made by `parallelize`."""

    others: Sequence[Trainer] = ()
    """The trainers of replicas 1, 2, ..., where all replicas are in this process (`replicas_in_process.py`)."""

    def __init__(
        self,
        model: nn.Module,
        parts: ParallelModel,
        *,
        loss: Loss,
        optimizer: torch.optim.Optimizer,
        schedule: Callable[[int], float] | None,
        skip_at_most: int | None = SKIP_AT_MOST,
    ) -> None:
        """`model`: the one to call, which may be a compiled wrapper of the one in `parts`."""
        mesh, sync, cut, tensor, sample_split = parts.mesh, parts.sync, parts.cut, parts.tensor, parts.sample_split
        plan, device = mesh.plan, mesh.world.device
        self.model, self.parts, self.mesh, self.blueprint = model, parts, mesh, parts.blueprint
        self.layouts = parts.layouts
        """Each parameter's placement in the global tensor, by name."""
        self.cut, self.tensor, self.sample_split = cut, tensor, sample_split
        self.optimizer = optimizer
        self.sync = sync
        self.steps_done = 0
        self.data_position = 0
        """Samples handed out so far, over all ranks and epochs; kept by `weft.batches`."""
        self.counts = TargetCount.of(mesh)
        self.rank_speeds = RankSpeeds(mesh)
        """How fast the ranks compute, and which of them is slow."""
        self.balance = parts.balance = self.rank_speeds.balance
        self.seeds = parts.seeds
        self.average = make_average(sync.pieces, plan)
        """The average of the weights, where the plan keeps one."""
        self.extra_state: dict[str, Any] = {}
        """State of your own for checkpoints, the same on all ranks: objects with `state_dict`, or plain values."""
        self.companions: dict[str, bytes] = {}
        """Files beside pretrained weights that checkpoints repeat (a tokenizer's), by name; on rank 0."""
        self.update = make_update(optimizer, sync, mesh.whole_plan, schedule=schedule, average=self.average)
        self.not_finite = NotFiniteWatch(parts.model, self.update, sync, mesh, skip_at_most=skip_at_most)
        if mesh.world.device.type == "cuda" and plan.axes.pipeline > 1:
            self.not_finite.warm_up()
            if self.average is not None:
                self.average.warm_up()
        self.replacements = parts.make_replacements()
        """Functions of torch and transformers that are replaced while a step runs."""
        self._recording = Recording(mesh.index("pipeline"))
        if tensor is not None and tensor.output is not None:
            split_loss = functools.partial(split_cross_entropy_sum, vocabulary=tensor.output, group=tensor.group)
            loss = replace(loss, function=split_loss)
        cuts_tokens = isinstance(sample_split, SequenceSplit)
        self.own_loss = OwnLoss(loss, mesh, outside=self.replacements.paused if cuts_tokens else None)
        self._loss = loss = self.own_loss.loss
        call: Callable[[Any], Any] = Caller(model, plan, widens=not loss.counts_targets)
        if tensor is not None and tensor.output is not None:
            call = KeepingShares(call, tensor.output_mode)
        if sample_split is not None:
            call = sample_split.around(call)
        if model is not parts.model and (sync.flats or isinstance(sync, ServedSync)):  # compiled, with hooks inside
            why = "waits for all parameters, which come after an update"
            add_hook(model, "forward_pre", lambda *_: sync.settle(), by="zero", why=why)
        self._has_compared = self._has_failed = False
        tied = tied_groups(cut, mesh) if cut is not None else {}
        self._divergence = DivergenceCheck(self.named_model, optimizer, sync, mesh, self.layouts, tied, self.average)
        self.num_parameters = parts.num_parameters
        """Elements of the whole model's parameters."""
        self._microbatches = Microbatches(
            plan.step.microbatches,
            device,
            sample_split,
            has_loss=mesh.index("pipeline") == mesh.size("pipeline") - 1,
            counts_targets=loss.counts_targets,
        )
        update, counts, recording, clock = self.update, self.counts, self._recording, self.rank_speeds.clock
        inside = StepParts(
            model=parts, update=update, loss=loss, call=call, counts=counts, recording=recording, clock=clock
        )
        self.pipeline_step: PipelineStep | None = None
        if cut is not None:
            kind = PipelineStream if plan.pipeline.schedule in FLUSH_FREE else PipelineStep
            self.pipeline_step = kind(inside)
        self._steps = self.pipeline_step or MicrobatchLoop(inside)
        self.saving = Saving(device)

    @property
    def plan(self) -> Plan:
        return self.mesh.whole_plan

    @property
    def data_rank(self) -> int:
        return self.mesh.data_rank

    @property
    def data_size(self) -> int:
        return self.mesh.data_size

    @property
    def shares(self) -> tuple[int, ...]:
        """Microbatches of each data rank in the next step: as many for all, or by speed with `[data] balance`."""
        return self.balance.shares

    def batch_range(self, num_samples: int) -> tuple[int, int]:
        """This rank's part of the next global batch, as `weft.batches` cuts it: first sample, one after the last."""
        if self.balance.is_on:
            return self.balance.range(num_samples)
        return part_of(num_samples, self.data_rank, self.data_size)

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """The latest step's gradient norm before clipping, where the plan clips or computes in 16 bits."""
        return self.update.grad_norm

    @property
    def num_skipped(self) -> int:
        """Number of updates skipped so far, because the loss or a gradient was not finite."""
        return sum(one.update.num_skipped for one in (self, *self.others))

    @property
    def loss_scale(self) -> float | None:
        """The factor of the next step's loss, where the plan computes in fp16."""
        return self.update.loss_scale.value if self.plan.precision.compute == "fp16" else None

    @property
    def named_model(self) -> nn.Module:
        """The model under its own names, also where the user wrapped it with `torch.compile`."""
        original: nn.Module = getattr(self.model, "_orig_mod", self.model)
        return original

    @property
    def nan_from_start(self) -> Collection[str]:
        return self.not_finite.nan_from_start

    @collective_call("trainer.step")
    def step(self, inputs: Any, targets: Any) -> torch.Tensor:
        """Forward, backward, exchange, update; returns the mean loss over the global batch.

        `inputs` and `targets` are this rank's part of the batch, possibly empty. The loss is the same on every rank,
        and a tensor that does not block until it is read. A loss that is not finite skips the update, with a warning;
        too many of these in a row raise a NotFiniteError on every rank, after which the trainer can still be used.
        With `[data] sync = "local"` the loss is that of this replica's samples.
        """
        self._require_weights("step()")
        self.sync.take_part()
        if not self._has_compared:
            require_same_batch(self.mesh, inputs, targets)
            self._has_compared = True
            if self.mesh.world.rank == 0 and self._loss.counts_targets:
                warn_of_unshifted(inputs, targets)
        share = self.balance.share(padded=self.sync.exchanges_in_microbatches or self.parts.runs_empty)
        microbatches = self._microbatches.cut(inputs, targets, share)
        self.not_finite.keep(self.steps_done, inputs, targets)
        if self.seeds.base is None:
            self.seeds.base = self._draw_seed()
        self.own_loss.begin(inputs)
        self._has_failed = True  # until the step is over
        with self.replacements, self.own_loss.gathering.during("model"):
            loss = self._steps.step(microbatches, step=self.steps_done)
        self.own_loss.settle()
        self._end_step()
        self._has_failed = False
        self.not_finite.look()
        return self.sync.end_step(loss)

    def flush(self) -> None:
        """Finish the batches that flush-free schedules have in flight, and the last update's gathers; collective."""
        if self.average is not None:
            self.average.publish_weights(self.sync)
        if self.pipeline_step is not None:
            with self.replacements:
                self.pipeline_step.flush()
            self.own_loss.settle()  # flush-free schedules may reach the first loss here
        self.sync.settle()
        self.not_finite.look_at_all()

    def describe(self) -> str:
        """A text of this rank's wrapped modules, parameter placements, process groups and replaced functions."""
        return describe(self.parts, self.replacements)

    def keep_trace(self) -> None:
        """From now on keep the times of every step, not of the latest only (up to some 100,000 actions)."""
        self._recording.keep_all()

    def trace(self) -> Timeline:
        """Times of all actions on all ranks of this pipeline, in the latest step or all that are kept; collective."""
        return self._recording.of_all(self.mesh.group("pipeline", "control"))

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Context in which the model has its averaged weights (`[average]`), to evaluate or generate; collective."""
        average = require_average(self.average)
        self.flush()
        with self.sync.consensus(), average.in_place_of_weights(self.sync, self.mesh.everyone("control")):
            yield

    @collective_call("trainer.evaluate")
    def evaluate(self, batches: Iterable[tuple[Any, Any]], *, average: bool = False) -> float:
        """The mean loss over the batches of all ranks, without training; collective.

        An iterator of `weft.batches` is read from its start, and the position of the training data does not change.
        With `average`, that of the averaged weights. Replicas that differ are one model, with their average.
        """
        if average:
            with self.averaged():
                return self.evaluate(batches)
        if isinstance(batches, Batches):
            batches = batches.from_start()
        self.flush()
        if self.sync.exchanges_in_forward or self.own_loss.may_gather:
            batches = together(batches, self.own_loss.take_sizes, self._skip_evaluation)
        totals = torch.zeros(2, dtype=torch.float64, device=self.mesh.world.device)

        def add(output: Any, targets: Any, count: Count) -> None:
            terms = loss_terms(self._loss, output, targets, count)
            totals[0] += terms.value * terms.multiplier
            totals[1] += terms.count

        with evaluating(self.model, self.sync), self.replacements, self.own_loss.gathering.during("model"):
            for number, batch in enumerate(batches):
                if number == 0:
                    require_same_batch(self.mesh, *batch)
                self._steps.evaluate(self._microbatches.cut(*batch), add)
        self.own_loss.settle()
        return mean_of_all(totals.cpu(), self.mesh)

    @collective_call("trainer.generate")
    def generate(
        self, tokens: Sequence[int], *, num_tokens: int, context: int, temperature: float = 1.0, seed: int = 0
    ) -> list[int]:
        """Continue a sequence of tokens with a language model. Every rank calls it and gets the same answer."""
        self.flush()
        with evaluating(self.model, self.sync):
            return generate_tokens(
                self._next_token, tokens, num_tokens=num_tokens, context=context, temperature=temperature, seed=seed
            )

    def _next_token(self, window: Sequence[int], temperature: float, generator: torch.Generator) -> int:
        inputs = torch.tensor([window], dtype=torch.int64, device=self.mesh.world.device)
        pick = functools.partial(pick_token, temperature=temperature, generator=generator)
        if self.pipeline_step is not None:
            return self.pipeline_step.token(inputs, pick)
        return pick(forward(self.model, inputs))

    @collective_call("trainer.save")
    def save(self, directory: str | Path, *, wait: bool = True) -> None:
        """Write a checkpoint; collective. The directory appears only when it is whole: when this returns, or later
        without `wait`, while training goes on."""
        self._require_weights("save()")
        self.flush()
        with self.update.holding_state() as writes:
            self.saving.save(self, Path(directory), wait=wait, writes=writes)

    @collective_call("trainer.export")
    def export(self, directory: str | Path, *, average: bool = False) -> None:
        """Write the weights alone, or their average, as a folder that transformers and safetensors read; collective."""
        self._require_weights("export()")
        self.flush()
        averaging = require_average(self.average) if average else None
        with self.update.holding_state() as writes:
            if writes:
                self.saving.export(self, Path(directory), averaging)

    def wait_for_save(self) -> None:
        """Wait until the last checkpoint is whole; raises the error of one that failed."""
        self.saving.wait()

    @collective_call("trainer.load")
    def load(self, directory: str | Path, *, extra_state: bool = True) -> None:
        """Continue from a checkpoint of this model, written under any plan; collective.

        Without `extra_state`, that of the checkpoint is left alone, and `trainer.extra_state` stays as it is.
        """
        self._require_weights("load()")
        self.update.require_loadable()
        self.flush()
        self.wait_for_save()
        checkpoint.load(self, Path(directory), extra_state=extra_state)
        self.not_finite.restart()
        self.rank_speeds.restart(self.steps_done)

    def _require_weights(self, what: str) -> None:
        if self.average is not None:
            self.average.refuse_use(what)
            self.average.publish_weights(self.sync)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:  # that error is the one to be seen, and other ranks may wait in an exchange
            self.mesh.close(failed=True)

    @collective_call("trainer.close")
    def close(self) -> None:
        """Flush, wait for a background save, then give back process groups, threads and shared memory. All ranks do it.

        The trainer cannot be used any more. The model keeps its values, those of replicas that differ their average,
        unless parameters are sharded.
        """
        failed = self._has_failed or (self.pipeline_step is not None and self.pipeline_step.pipeline.has_failed)
        try:
            if not failed:
                self.flush()
                self.sync.conclude()
            self.wait_for_save()
        except BaseException:
            failed = True
            raise
        finally:
            self.mesh.close(failed=failed)

    @collective_call("trainer.check_divergence")
    def check_divergence(self) -> None:
        """Compare weights, optimizer state and buffers of all replicas now; collective."""
        self._divergence.run(self.steps_done)

    def _draw_seed(self) -> int:
        """A seed for all ranks, drawn from rank 0's random state, so that a seed set by the user repeats the run."""
        drawn = torch.randint(2**62, (1,))
        broadcast(drawn, self.mesh.everyone("control"))
        return int(drawn)

    def _skip_evaluation(self) -> None:
        if self.sync.exchanges_in_forward:
            self._steps.skip_evaluation(self.plan.step.microbatches)

    def _end_step(self) -> None:
        self.steps_done += 1
        self.rank_speeds.end_step(self.steps_done, self.sync)
        for traffic in self.mesh.traffic.values():
            traffic.collect_stream_waits()
        if self.tensor is not None:
            self.tensor.look_at_draws(self.seeds)
        broadcast_buffers(self.named_model, self.mesh)
        if self._divergence.is_due(self.steps_done):
            self._divergence.run(self.steps_done)
