"""`verify`: a plan against one process, on the user's own model: every loss, every gradient, every weight.

Rank 0 also trains a copy of the model by itself on the whole global batch, by the rule that the plan obeys
(`oracles.py`), and each rank compares its tensors with it after every step (`compare.py`). In float64 a logic error is
ten orders of magnitude larger than that of another order of additions; both sides compute in the dtype of the
comparison, not the plan's or the model's own (`float64/keep_float64.py`), whose rounding would hide errors.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from weft.comm.collectives import all_reduce
from weft.comm.objects import gather_values
from weft.mesh import Mesh, join_world
from weft.parallel.state.materialise import draw_seed, fill_alone, is_on_meta
from weft.plan.all_ranks import with_ranks
from weft.plan.plan import Codec, Plan, Precision
from weft.plan.text import as_plan
from weft.training.data.trees import map_tensors, num_samples, split_microbatches, split_tree
from weft.training.loss.loss import LossFunction
from weft.training.parallelize import ParameterGroups, parallelize
from weft.training.setup.probe_optimizer import OptimizerFactory
from weft.training.trainer import Trainer
from weft.verification.compare import (
    TOLERANCES,
    compare_tensors,
    difference,
    from_first,
    loss_error,
    step_on_part,
)
from weft.verification.compressed_replicas import with_compression
from weft.verification.deviation import measure_rounding, measure_rule
from weft.verification.examine import WHOLE_BATCH, Examination
from weft.verification.float64.float64_products import Float64Products
from weft.verification.float64.keep_float64 import keep_float64
from weft.verification.float64.widen import widened
from weft.verification.one_process import Key, OneProcess, Recipe
from weft.verification.oracles import Oracle, ask_ranks, rule_of
from weft.verification.replicas import LocalReplicas, comparable, with_an_exchange
from weft.verification.silence import Silence
from weft.verification.verdict import Cause, Deviation, Difference, Finding, Verification
from weft.verification.zero_noise import ZeroNoise

_RANDOM = Cause(
    kind="random",
    text="the model draws random numbers in its passes, by a function that verify does not silence; every rank draws "
    "others: switch it off in the model, then verify again",
)


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
    plan = with_ranks(as_plan(plan), join_world(device).size)
    recipe = Recipe(loss=widened(loss), optimizer=optimizer, schedule=schedule, groups=groups)
    if is_on_meta(model):  # one process needs all of it, and the model's own casts are detected by running it
        model = copy.deepcopy(model)
        fill_alone(model, draw_seed(), torch.device("cpu"))
    plan, notes = with_an_exchange(plan, num_steps=len(batches))
    plan, more_notes = with_compression(plan, num_steps=len(batches))
    exact = dataclasses.replace(comparable(plan), precision=Precision())
    cast = _cast(batches, dtype)

    def make_trainer(model: nn.Module, plan: Plan, recipe: Recipe, batches: Sequence[Any]) -> Trainer:
        given = {field.name: getattr(recipe, field.name) for field in dataclasses.fields(recipe)}
        # One microbatch, so that pipelines need not trace the model again in the first step.
        of_one_rank = max(split_microbatches(batches[0][0], plan.axes.data_ranks), key=num_samples)
        example = max(split_microbatches(of_one_rank, plan.step.microbatches), key=num_samples)
        return parallelize(model, plan, **given, device=device, mesh=mesh, example=example)

    silence, products = Silence(model), Float64Products(model)

    def make_notes() -> list[str]:
        return [*silence.notes(), *products.notes(), *notes, *more_notes]

    with silence.replacements, products.replacements:
        outcome, deviation = _prove(
            model, exact, recipe, cast, make_trainer, dtype=dtype, on_step=on_step, make_notes=make_notes
        )
    if _rounds(plan):
        if deviation is not None:
            outcome = dataclasses.replace(outcome, notes=(*outcome.notes, str(deviation)))
        single = _cast(batches, torch.float32)
        if plan.codec.name != "half":  # what others change by their rule is no rounding
            plan = dataclasses.replace(plan, codec=Codec())
        with silence.replacements, make_trainer(_copy_without_dropout(model), plan, recipe, single) as trainer:
            reference, place = None, trainer.mesh.world.device
            if trainer.mesh.world.rank == 0:
                alone = _copy_without_dropout(model, torch.float32, place)
                reference = (OneProcess if plan.replica_axis is None else LocalReplicas)(alone, plan, recipe)
            deviation = measure_rounding(trainer, reference, single)
    return dataclasses.replace(outcome, deviation=deviation)


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
) -> tuple[Verification, Deviation | None]:
    """Compare a plan with one process under its rule, and an inexact rule with plain training."""
    rule = rule_of(plan)
    parallel = _copy_without_dropout(model, dtype)
    zero_noise = ZeroNoise(recipe.optimizer, by_stage=rule.is_streamed)
    silent = dataclasses.replace(recipe, optimizer=zero_noise)
    casts = _without_casts(parallel, batches[0][0], dtype)
    with casts, make_trainer(parallel, plan, silent, batches) as trainer:
        zero_noise.mesh = trainer.mesh
        asked = ask_ranks(rule, trainer)
        oracle: Oracle | None = None
        plain = None
        if trainer.mesh.world.rank == 0:
            # Made from rank 0's model, which is what parallelize gave every rank.
            place = trainer.mesh.world.device
            alone = _copy_without_dropout(model, dtype, place)
            trained = [name for name, parameter in alone.named_parameters() if parameter.requires_grad]
            stages = [asked[name] for name in trained] if rule.is_streamed else []
            quiet = dataclasses.replace(recipe, optimizer=ZeroNoise(recipe.optimizer, stages=stages))
            oracle = rule(alone, trainer.plan, quiet, asked)
            if not rule.is_exact:
                plain = OneProcess(_copy_without_dropout(model, dtype, place), plan, recipe)
        comparison = _Comparison(trainer, oracle, dtype)
        for number, batch in enumerate(batches, start=1):
            comparison.step(number, batch, is_drained=not rule.is_streamed)
            if on_step is not None:
                on_step(number)
        if rule.is_streamed:
            trainer.flush()
            comparison.compare([], len(batches), is_drained=True)
        outcome = comparison.outcome(rule.rule, num_steps=len(batches), notes=make_notes())
        if rule.is_exact:
            return outcome, None
        return outcome, measure_rule(oracle, plain, batches, trainer.mesh, against=rule.instead_of)


class _Comparison:
    """A trainer and its oracle, compared step by step."""

    def __init__(self, trainer: Trainer, oracle: Oracle | None, dtype: torch.dtype) -> None:
        self._trainer, self._oracle = trainer, oracle
        self._compares_tensors, self._tolerance = dtype == torch.float64, TOLERANCES[dtype]
        self._mesh, self._group = trainer.mesh, trainer.mesh.everyone("control")
        self._found: list[Difference] = []
        self._first: Finding | None = None
        self._is_random = False
        self._losses: dict[str, Any] = {}

    def step(self, number: int, batch: tuple[Any, Any], *, is_drained: bool) -> None:
        device = self._mesh.world.device
        if isinstance(self._oracle, OneProcess):
            self._oracle.shares = self._trainer.shares
        mine = step_on_part(self._trainer, batch)
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
        self.compare(found, number, is_drained=is_drained, has_targets=bool(is_known))

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

    def compare(self, found: list[Difference], number: int, *, is_drained: bool, has_targets: bool = True) -> None:
        """Compare all tensors, and examine the first error of the run."""
        if self._compares_tensors:
            found = found + compare_tensors(
                self._trainer, self._oracle, step=number, is_drained=is_drained, has_targets=has_targets
            )
        self._found += found
        if self._first is not None:
            return
        worst = max((one.error for one in found), default=0.0)
        is_off = torch.tensor([int(worst > self._tolerance)])
        all_reduce(is_off, self._group, op="max")
        if is_off.item():
            self._first = Examination(
                self._trainer, self._oracle, found, step=number, tolerance=self._tolerance, is_drained=is_drained
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


def _worst(found: Iterable[Difference]) -> list[Difference]:
    """The largest difference of every tensor."""
    worst: dict[tuple[str, str], Difference] = {}
    for one in found:
        key = (one.what, one.name)
        if key not in worst or not one.error <= worst[key].error:
            worst[key] = one
    return list(worst.values())


def _rounds(plan: Plan) -> bool:
    """True if the plan rounds to 16 bits, in its passes or on the wire."""
    names, default = ("compute", "reduce", "accumulate"), Precision()
    is_narrow = any(getattr(plan.precision, name) != getattr(default, name) for name in names)
    return is_narrow or plan.codec.name == "half"


def _random_state(device: torch.device) -> torch.Tensor:
    if device.type != "cuda":
        return torch.get_rng_state()
    return torch.cat([torch.get_rng_state(), torch.cuda.get_rng_state(device)])


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
