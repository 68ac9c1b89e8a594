"""`verify`: a plan against one process, on the user's own model: every loss, every gradient, every weight.

Rank 0 also trains a copy of the model by itself on the whole global batch, by the rule that the plan obeys
(`oracles.py`), and each rank compares its tensors with it after every step (`compare.py`). In float64 a logic error is
ten orders of magnitude larger than that of another order of additions; both sides compute in the dtype of the
comparison, not the plan's or the model's own (`float64/keep_float64.py`), whose rounding would hide errors.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from weft.mesh import Mesh
from weft.parallel.state.materialise import draw_seed, fill_alone, is_on_meta
from weft.plan.all_ranks import with_ranks
from weft.plan.partition.one_worker import is_served
from weft.plan.plan import Codec, Plan, Precision
from weft.plan.text import as_plan
from weft.training.data.trees import map_tensors, num_samples, split_microbatches, split_tree
from weft.training.loss.loss import LossFunction
from weft.training.parallelize import ParameterGroups, parallelize
from weft.training.setup.probe_optimizer import OptimizerFactory
from weft.training.trainer import Trainer
from weft.verification.comparison import Comparison, ReplayedComparison
from weft.verification.compressed_replicas import with_compression
from weft.verification.deviation import measure_rounding, measure_rule
from weft.verification.float64.float64_products import Float64Products
from weft.verification.float64.keep_float64 import keep_float64
from weft.verification.float64.widen import widened
from weft.verification.one_process import OneProcess, Recipe
from weft.verification.oracles import Oracle, ask_ranks, rule_of
from weft.verification.replicas import LocalReplicas, comparable, with_an_exchange
from weft.verification.served_batches import ServedBatches
from weft.verification.served_replay import ReplayedTraining
from weft.verification.served_workers import (
    comparable_with_servers,
    of_all_workers,
    ranks_to_verify,
    require_same_model,
)
from weft.verification.silence import Silence
from weft.verification.verdict import Deviation, Verification
from weft.verification.zero_noise import ZeroNoise
from weft.world import join_world


def verify(
    model: nn.Module,
    plan: Plan | str | Path,
    *,
    loss: str | LossFunction,
    optimizer: OptimizerFactory,
    batches: Sequence[tuple[Any, Any]],
    schedule: Callable[[int], float] | None = None,
    groups: ParameterGroups | None = None,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str | None = None,
    mesh: Mesh | None = None,
    on_step: Callable[[int], object] | None = None,
) -> Verification:
    """Train copies of a model under a plan and in one process, and compare them after every step; collective.

    `batches` are whole global batches, the same on every rank; the rest is as for `parallelize`. The model given is not
    changed. The plan's `[precision]` is left out, because both sides compute in `dtype`, and so is `[codec] name =
    "half"`; where these round to 16 bits, the plan is then run once more (without another codec) and its deviation from
    float32 reported. Replicas that would not exchange in so few steps exchange sooner, and so does a codec's warm-up
    end. `on_step` is called with the number of every step that is done.
    """
    plan = as_plan(plan)
    plan = with_ranks(plan, ranks_to_verify(plan) if is_served(plan) else join_world(device).size)
    recipe = Recipe(loss=widened(loss), optimizer=optimizer, schedule=schedule, groups=groups)
    if is_on_meta(model):  # one process needs all of it, and the model's own casts are detected by running it
        model = copy.deepcopy(model)
        fill_alone(model, draw_seed(), torch.device("cpu"))
    if is_served(plan):
        plan, notes = with_compression(plan, num_steps=len(batches))
        exact, more_notes = comparable_with_servers(plan)
        notes = [*notes, *more_notes]
        waits = dataclasses.replace(plan.server, backups=0)  # also where rounding is measured: all are waited for
        plan = dataclasses.replace(plan, server=waits)
    else:
        plan, notes = with_an_exchange(plan, num_steps=len(batches))
        plan, more_notes = with_compression(plan, num_steps=len(batches))
        exact, notes = comparable(plan), [*notes, *more_notes]
    exact = dataclasses.replace(exact, precision=Precision())
    cast = _cast(batches, dtype)

    def make_trainer(
        model: nn.Module, plan: Plan, recipe: Recipe, batches: Sequence[Any], mesh: Mesh | None = mesh
    ) -> Trainer:
        given = {field.name: getattr(recipe, field.name) for field in dataclasses.fields(recipe)}
        # One microbatch, so that pipelines need not trace the model again in the first step.
        of_one_rank = max(split_microbatches(batches[0][0], plan.axes.data_ranks), key=num_samples)
        example = max(split_microbatches(of_one_rank, plan.step.microbatches), key=num_samples)
        return parallelize(model, plan, **given, device=device, mesh=mesh, example=example)

    silence, products = Silence(model), Float64Products(model)

    def make_notes() -> list[str]:
        return [*silence.notes(), *products.notes(), *notes]

    with silence.replacements, products.replacements:
        outcome, deviation, mesh_used = _prove(
            model, exact, recipe, cast, make_trainer, dtype=dtype, on_step=on_step, make_notes=make_notes
        )
    if _rounds(plan) and rule_of(plan) is not ReplayedTraining:  # which has no order that could be replayed rounded
        if deviation is not None:
            outcome = dataclasses.replace(outcome, notes=(*outcome.notes, str(deviation)))
        single = _cast(batches, torch.float32)
        if plan.codec.name != "half":  # what others change by their rule is no rounding
            plan = dataclasses.replace(plan, codec=Codec())
        again = mesh_used if is_served(plan) else mesh  # workers have met, and are worlds of their own by now
        narrow = _copy_without_dropout(model)
        with silence.replacements, make_trainer(narrow, plan, recipe, single, again) as trainer:
            reference: OneProcess | LocalReplicas | None = None
            place = trainer.mesh.world.device
            worker = trainer.data_rank if is_served(plan) else None
            if trainer.mesh.world.rank == 0:
                alone = _copy_without_dropout(model, torch.float32, place)
                if worker is not None:
                    reference = ServedBatches(alone, plan, recipe, worker)
                else:
                    reference = (OneProcess if plan.replica_axis is None else LocalReplicas)(alone, plan, recipe)
            deviation = measure_rounding(trainer, reference, single)
            mesh_used = trainer.mesh
    return of_all_workers(dataclasses.replace(outcome, deviation=deviation), mesh_used)


def _prove(
    model: nn.Module,
    plan: Plan,
    recipe: Recipe,
    batches: Sequence[Any],
    make_trainer: Callable[..., Trainer],
    *,
    dtype: torch.dtype,
    on_step: Callable[[int], object] | None,
    make_notes: Callable[[], list[str]],
) -> tuple[Verification, Deviation | None, Mesh]:
    """Compare a plan with one process under its rule, and an inexact rule with plain training. Returns the mesh, too,
    which is closed by now."""
    rule = rule_of(plan)
    parallel = _copy_without_dropout(model, dtype)
    zero_noise = ZeroNoise(recipe.optimizer, by_stage=rule.is_streamed)
    silent = dataclasses.replace(recipe, optimizer=zero_noise)
    casts = _without_casts(parallel, batches[0][0], dtype)
    with casts, make_trainer(parallel, plan, silent, batches) as trainer:
        zero_noise.mesh = trainer.mesh
        asked = ask_ranks(rule, trainer)
        oracle: Oracle | None = None
        alone = plain = None
        if trainer.mesh.world.rank == 0:
            # Made from rank 0's model, which is what parallelize gave every rank.
            place = trainer.mesh.world.device
            alone = _copy_without_dropout(model, dtype, place)
            trained = [name for name, parameter in alone.named_parameters() if parameter.requires_grad]
            stages = [asked[name] for name in trained] if rule.is_streamed else []
            quiet = dataclasses.replace(recipe, optimizer=ZeroNoise(recipe.optimizer, stages=stages))
            quiet = recipe if is_served(plan) else quiet  # servers update with gradients as they are
            oracle = rule(alone, trainer.plan, quiet, asked)
            if not rule.is_exact:
                plain = OneProcess(_copy_without_dropout(model, dtype, place), plan, recipe)
        require_same_model(alone, trainer.mesh)
        kind = ReplayedComparison if rule is ReplayedTraining else Comparison
        comparison = kind(trainer, oracle, dtype)
        comparison.run(batches, is_drained=not rule.is_streamed, on_step=on_step)
        if rule.is_streamed:
            trainer.flush()
            comparison.compare([], len(batches), is_drained=True)
        outcome = comparison.outcome(rule.rule, num_steps=len(batches), notes=make_notes())
        if rule.is_exact:
            return outcome, None, trainer.mesh
        deviation = measure_rule(oracle, plain, batches, trainer.mesh, against=rule.instead_of)
        return outcome, deviation, trainer.mesh


def _rounds(plan: Plan) -> bool:
    """True if the plan rounds to 16 bits, in its passes or on the wire."""
    names, default = ("compute", "reduce", "accumulate"), Precision()
    is_narrow = any(getattr(plan.precision, name) != getattr(default, name) for name in names)
    return is_narrow or plan.codec.name == "half" or (is_served(plan) and plan.server.pull != "master")


def _copy_without_dropout(
    model: nn.Module, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> nn.Module:
    made = copy.deepcopy(model).to(device=device, dtype=dtype)
    for module in made.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        if isinstance(module, nn.MultiheadAttention | nn.RNNBase):
            module.dropout = 0.0
    return made


def _cast(batches: Sequence[tuple[Any, Any]], dtype: torch.dtype) -> list[Any]:
    return [map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, batch) for batch in batches]


def _without_casts(model: nn.Module, inputs: Any, dtype: torch.dtype) -> AbstractContextManager[object]:
    """Context in which a float64 model's own casts to float32 are no-ops."""
    if dtype != torch.float64:
        return nullcontext()
    place = next(model.parameters()).device
    # A copy, because a model may keep state of its own when it runs.
    return keep_float64(copy.deepcopy(model), map_tensors(lambda tensor: tensor.to(place), split_tree(inputs, 0, 1)))
