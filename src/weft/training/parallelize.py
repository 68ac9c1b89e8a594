"""`parallelize`: from a model and a plan to a trainer, the one call that changes an ordinary training loop."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from weft.checkpoint.new_layers import NewLayers
from weft.checkpoint.pretrained import load_weights
from weft.comm.failures.activity import calls, collective_call
from weft.comm.failures.watch import set_step_timeout
from weft.comm.world.fake_world import is_fake
from weft.mesh import Mesh, make_mesh
from weft.optim.tensor_norms import give_norms
from weft.parallel.apply import apply_plan
from weft.parallel.state.batchnorm import has_batch_norms, warn_of_microbatches
from weft.parallel.state.materialise import agreed_seed
from weft.parallel.tensor.shares import counted_elements
from weft.parallel.zero.flat_parameters import Piece
from weft.plan.all_ranks import with_ranks
from weft.plan.check import require
from weft.plan.in_process_refusals import SERVERS_ON_META
from weft.plan.partition.one_worker import is_served, one_worker
from weft.plan.partition.replicas import in_process_problems
from weft.plan.plan import Plan
from weft.plan.text import as_plan
from weft.server.worker_mesh import WorkerMesh, join_run
from weft.sync.in_process import InProcessExchange
from weft.sync.served import ServedSync
from weft.training.loss.loss import LossFunction, resolve_loss
from weft.training.meta_trainer import MetaTrainer, refuse_memory
from weft.training.replicas_in_process import make_replicas
from weft.training.setup.probe_optimizer import OptimizerFactory
from weft.training.setup.setup_problems import raise_together, setup_problems
from weft.training.step.not_finite import SKIP_AT_MOST
from weft.training.step.parallel_model import ParallelModel
from weft.training.trainer import Trainer
from weft.training.workers_in_process import make_workers, workers_problems
from weft.world import DEFAULT_TIMEOUT_S, join_world

ParameterGroups = Callable[[str, tuple[int, ...]], dict[str, Any]]


@collective_call("weft.parallelize")
def parallelize(
    model: nn.Module,
    plan: Plan | str | Path,
    *,
    loss: str | LossFunction,
    optimizer: OptimizerFactory,
    schedule: Callable[[int], float] | None = None,
    groups: ParameterGroups | None = None,
    global_batch: int | None = None,
    example: Any = None,
    weights: str | Path | None = None,
    new_layers: Sequence[str] = (),
    device: torch.device | str | None = None,
    mesh: Mesh | None = None,
    skip_at_most: int | None = SKIP_AT_MOST,
    replicas_in_process: bool = False,
) -> Trainer:
    """Train a model as a plan says.

    The model stays an ordinary module and is changed in place (`parallel/apply.py` lists how). It may be on the meta
    device, without memory: then it gets its first values here, and with `[data] shard = "parameters"` no rank ever
    holds the whole of it. A BatchNorm in training normalises each microbatch, over all data ranks: with `[step]
    microbatches` > 1 the answer is that of one process with the same microbatches, not with one whole batch.

    plan        or the path of a plan file
    loss        "cross-entropy", or loss(output, targets) -> scalar mean, or (sum, count). It is called with the outputs
                and targets of one microbatch of one data rank (and of some tokens, under `[axes] ring` and `ulysses`).
                Means are averaged over the global batch by their numbers of targets: of the first tensor of the
                targets, the entries other than -100 where it holds integers, else its samples. A loss that divides by
                another number (class weights, another ignore_index, a mask) returns (sum, count) itself; one that
                compares samples takes those of all ranks by `weft.gather_batch`. Every loss is tried on parts of a
                drawn batch in the first step, and refused where they do not add up to the whole (docs/losses.md)
    optimizer   called with the parameters: functools.partial(torch.optim.AdamW, lr=3e-4)
    schedule    step -> factor of the learning rate
    groups      (name, global shape) -> settings of the optimizer for this parameter, such as {"weight_decay": 0.0}
    global_batch  given, a plan that cannot divide it is refused here
    example     inputs of one microbatch, by which the model is cut for `[axes] pipeline`, its layers for `[axes]
                tensor` unless it declares how, and by which the split model is compared with the whole one, also for
                `[axes] ring` and `ulysses`. Where the plan has no cuts, blocks are timed, and alike ones may be cut
                differently next time: to resume to the bit, give cuts
    weights     a folder of *.safetensors, as Hugging Face stores them: each rank reads its part of them straight into
                the split model, which is best built on the meta device, where no random values are drawn for it then
    new_layers  names of layers that are not in those files, such as ["score"], a new head: they keep the model's own
                values, or are drawn if it is on the meta device. Any other tensor that is in no file is refused
    device      where this rank computes. "meta", alone or on torch's "fake" process group: nothing is run or read
                (weights neither), and the trainer shows what this rank of a large world would hold
    mesh        another trainer's mesh, of a plan with the same axes and transport: its process groups are used, and
                are still there when this trainer is closed. With `[data] sync = "server"` that of a trainer of the
                same workers, which then have another run together, with servers of its own
    skip_at_most  steps in a row whose loss (or gradients, where the plan clips or computes in 16 bits) is not finite:
                they change nothing, and a warning names the tensors; the next one raises a NotFiniteError on every
                rank, after which a loop may `trainer.load` a checkpoint and go on. 0: the first one; None: none does
    replicas_in_process  this one process is all replicas of a plan with `[data] sync = "local"` or with a codec, one
                after the other on one device, with the results of real ranks; `step` takes whole global batches
                (docs/replicas-in-process.md)
    """
    calls.forget_durations()
    plan = as_plan(plan)
    timeout_s = max(DEFAULT_TIMEOUT_S, plan.comm.timeout_s)
    if is_served(plan):
        is_meta = is_fake() or (device is not None and torch.device(device).type == "meta")
        refused = list(in_process_problems(plan)) if replicas_in_process else []
        require([*refused, *([SERVERS_ON_META.message(plan)] if is_meta else [])])
    joined = join_run(plan, device, timeout_s=timeout_s, earlier=mesh) if is_served(plan) else None
    if joined is not None:
        plan, world = one_worker(plan), joined.world
    else:
        world = join_world(device, plan=plan, timeout_s=timeout_s)
    set_step_timeout(plan.comm.timeout_s)
    if replicas_in_process:
        refused = list(in_process_problems(plan, num_processes=world.size))
        if mesh is not None:
            refused.append("replicas in process make meshes of their own, one for each; leave mesh out")
        if world.is_fake:
            refused.append("replicas in process are there to be run, and on the meta device nothing is; give another")
        if plan.replica_axis is None and isinstance(model, nn.Module):
            refused += workers_problems(model, plan)
        require(refused)
        world = replace(world, size=plan.axes.num_ranks)
    plan = with_ranks(plan, world.size)
    if problems := setup_problems(
        model,
        plan,
        loss=loss,
        optimizer=optimizer,
        num_ranks=world.size,
        device=world.device,
        global_batch=global_batch,
    ):
        raise_together(problems)
    named_model: nn.Module = getattr(model, "_orig_mod", model)
    new = NewLayers(named_model, new_layers, has_weights=weights is not None)
    if world.is_fake:
        refuse_memory(named_model)
    if world.rank == 0:
        warn_of_microbatches(named_model, plan.step.microbatches)
    resolved_loss = resolve_loss(loss, compiled=plan.compile.blocks)

    def make(
        model: nn.Module, mesh: Mesh, in_process: InProcessExchange | None = None, kind: type[Trainer] = Trainer
    ) -> Trainer:
        named_model: nn.Module = getattr(model, "_orig_mod", model)
        try:
            with agreed_seed(named_model, mesh):
                parts = ParallelModel(
                    model=named_model,
                    mesh=mesh,
                    example=example,
                    keep_output=resolved_loss.counts_targets,
                    draws=new.draws,
                    in_process=in_process,
                )
                apply_plan(parts)
            made = optimizer(_optimizer_arguments(parts.sync.pieces, groups))
            counted = {} if parts.tensor is None else counted_elements(parts.tensor.shares, parts.layouts, mesh)
            give_norms(made, parts.sync.pieces, mesh, counted=counted)
            if world.is_fake:
                return cast(Trainer, MetaTrainer(parts, made))
            trainer = kind(
                model, parts, loss=resolved_loss, optimizer=made, schedule=schedule, skip_at_most=skip_at_most
            )
            if weights is not None:
                load_weights(trainer, Path(weights), new_layers=new.names)
            if isinstance(parts.sync, ServedSync) and isinstance(mesh, WorkerMesh):
                mesh.join_with(parts.sync, trainer, timeout_s=timeout_s)
                trainer.seeds.base = mesh.run.seed
            return trainer
        except BaseException:
            mesh.close(failed=True)
            raise

    if replicas_in_process and plan.num_replicas > 1:
        return make_replicas(model, plan, world, make)
    if replicas_in_process and world.size > 1:
        return make_workers(model, plan, world, make)
    kind, sharing = (None, mesh) if joined is None else (functools.partial(WorkerMesh, joined=joined), None)
    return make(model, make_mesh(plan, world, batch_norms=has_batch_norms(named_model), sharing=sharing, kind=kind))


def _optimizer_arguments(pieces: Sequence[Piece], groups: ParameterGroups | None) -> list[dict[str, Any]]:
    """Parameter groups: parameters with equal settings together, in the order of first appearance."""
    made: list[tuple[dict[str, Any], list[torch.Tensor]]] = []
    for piece in pieces:
        settings = groups(piece.name, piece.layout.global_shape) if groups else {}
        together = next((tensors for others, tensors in made if others == settings), None)
        if together is None:
            made.append((settings, together := []))
        together.append(piece.tensor)
    # A stage may have nothing to train; torch refuses an empty list, but not an empty group.
    return [{"params": tensors, **settings} for settings, tensors in made] or [{"params": []}]
