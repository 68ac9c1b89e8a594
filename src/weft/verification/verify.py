"""`verify`: a plan against one process, on the user's own model: every loss, every gradient, every weight.

Rank 0 trains a second copy of the model by itself on the whole global batch (`one_process.py`), all ranks train theirs
under the plan, and after every step each rank compares what it holds with the reference (`compare.py`). In float64 a
logic error stands out by ten orders of magnitude from a different order of additions. The first thing that differs is
looked at closely (`examine.py`), and a likely cause named (`diagnosis.py`).

Dropout is switched off for it, and gradients that are nothing but rounding are set to zero (`zero_noise.py`). Number
formats are the comparison's own, not the plan's nor the model's, which may cast its norms to float32
(`keep_float64.py`): that would hide what this is looking for.

A plan that obeys a rule of its own is held to that rule (`oracles.py`), and a lossy one is then measured as it stands
(`deviation.py`).
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from weft.comm.collectives import all_reduce, broadcast
from weft.comm.objects import gather_values
from weft.layout import part_of
from weft.parallel.state.materialise import draw_seed, fill_alone, is_on_meta
from weft.plan.plan import Plan, Precision
from weft.training.data.trees import map_tensors, num_samples, split_tree
from weft.training.parallelize import ParameterGroups, parallelize
from weft.training.setup.probe_optimizer import OptimizerFactory
from weft.training.step.loss import LossFunction, resolve_loss
from weft.training.trainer import Trainer
from weft.verification.compare import compare_tensors, difference
from weft.verification.deviation import of_rule, rounding
from weft.verification.examine import Losses, examine
from weft.verification.keep_float64 import unrounded
from weft.verification.one_process import Key, OneProcess
from weft.verification.oracles import Oracle, Rule, find_stages, rule_of
from weft.verification.verdict import Cause, Deviation, Difference, Finding, Verification
from weft.verification.zero_noise import Silenced

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}
"""The largest error by dtype. In float32 only losses are held to it; rounding may amplify in single weights."""

_RANDOM = Cause(
    kind="random",
    text="the model draws random numbers in its passes, as a dropout that is no module does; every rank draws others, "
    "and it cannot be switched off from here: do so in the model, then verify again",
)


def verify(
    model: nn.Module,
    plan: Plan,
    *,
    loss: str | LossFunction,
    optimizer: OptimizerFactory,
    batches: Sequence[tuple[Any, Any]],
    schedule: Callable[[int], float] | None = None,
    groups: ParameterGroups | None = None,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str | None = None,
    on_step: Callable[[int], object] | None = None,
) -> Verification:
    """Train copies of a model under a plan and in one process, and compare them after every step; collective.

    `batches` are whole global batches, the same on every rank; the rest is as for `parallelize`. The model given is not
    changed. The plan's `[precision]` is left out, because both sides compute in `dtype`; where it rounds to 16 bits,
    the plan is then run as it stands and its deviation from float32 reported. `on_step` is called with the number of
    every step that is done.
    """
    settings = _Settings(
        loss=loss, optimizer=optimizer, schedule=schedule, groups=groups, device=device, on_step=on_step
    )
    if is_on_meta(model):  # one process needs the whole of it, and what a model casts by itself is seen by running it
        model = copy.deepcopy(model)
        fill_alone(model, draw_seed(), torch.device("cpu"))
    rule, exact = rule_of(plan), dataclasses.replace(plan, precision=Precision())
    outcome, deviation = _prove(model, exact, rule, settings, _cast(batches, dtype), dtype)
    if _rounds(plan.precision):
        deviation = _measure_rounding(model, plan, settings, batches)
    return dataclasses.replace(outcome, deviation=deviation)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    """What both sides are given."""

    loss: str | LossFunction
    optimizer: OptimizerFactory
    schedule: Callable[[int], float] | None
    groups: ParameterGroups | None
    device: torch.device | str | None
    on_step: Callable[[int], object] | None

    def parallel(self, model: nn.Module, plan: Plan, optimizer: OptimizerFactory, example: Any) -> Trainer:
        return parallelize(
            model,
            plan,
            loss=self.loss,
            optimizer=optimizer,
            schedule=self.schedule,
            groups=self.groups,
            device=self.device,
            example=example,
        )

    def alone(self, make: Callable[..., Any], model: nn.Module, plan: Plan, optimizer: Any, **more: Any) -> Any:
        loss = resolve_loss(self.loss)
        return make(model, plan, loss=loss, optimizer=optimizer, schedule=self.schedule, groups=self.groups, **more)


def _prove(
    model: nn.Module,
    plan: Plan,
    rule: Rule,
    settings: _Settings,
    batches: Sequence[tuple[Any, Any]],
    dtype: torch.dtype,
) -> tuple[Verification, Deviation | None]:
    """Compare a plan with one process under its rule, and the rule with plain training where it is another."""
    parallel = copied(model, dtype)
    with _unrounded(parallel, plan, batches[0][0], dtype), ExitStack() as stack:
        silenced = Silenced(settings.optimizer, by_stage=rule.needs_stages)
        trainer = stack.enter_context(settings.parallel(parallel, plan, silenced, batches[0][0]))
        silenced.mesh = trainer.mesh
        stage_of = find_stages(trainer) if rule.needs_stages else {}
        oracle, plain = None, None
        if trainer.mesh.world.rank == 0:
            # Taken from rank 0's model, which is what parallelize gave every rank.
            place = trainer.mesh.world.device
            alone = copied(model, dtype, place)
            stages = [stage_of[name] for name, p in alone.named_parameters() if p.requires_grad and stage_of]
            optimizer = Silenced(settings.optimizer, stages=stages)
            more = {"stage_of": stage_of} if rule.needs_stages else {}
            oracle = settings.alone(rule.make, alone, trainer.plan, optimizer, **more)
            if not rule.is_exact:
                plain = settings.alone(OneProcess, copied(model, dtype, place), plan, settings.optimizer)
        comparison = _Comparison(trainer, oracle, dtype)
        for number, batch in enumerate(batches, start=1):
            comparison.step(number, batch, is_settled=rule.is_exact)
            if settings.on_step is not None:
                settings.on_step(number)
        if not rule.is_exact:
            trainer.flush()
            comparison.settle(len(batches))
        outcome = comparison.outcome(rule, num_steps=len(batches))
        return outcome, None if rule.is_exact else of_rule(oracle, plain, batches, trainer.mesh)


class _Comparison:
    """A trainer beside its oracle, step by step."""

    def __init__(self, trainer: Trainer, oracle: Oracle | None, dtype: torch.dtype) -> None:
        self._trainer, self._oracle, self._dtype = trainer, oracle, dtype
        self._mesh, self._group = trainer.mesh, trainer.mesh.everyone("control")
        self._found: list[Difference] = []
        self._first: Finding | None = None
        self._is_random = 0.0
        """1 where one process drew random numbers."""
        self._losses = Losses(mine=float("nan"), true=float("nan"), before=None)

    def step(self, number: int, batch: tuple[Any, Any], *, is_settled: bool) -> None:
        inputs, targets = batch
        trainer, device = self._trainer, self._mesh.world.device
        start, stop = part_of(num_samples(inputs), trainer.data_rank, trainer.data_size)
        mine = float(trainer.step(split_tree(inputs, start, stop), split_tree(targets, start, stop)))
        expected: float | None = None
        is_random = False
        if self._oracle is not None:
            before_it = _random_state(device)
            expected = self._oracle.step(*map_tensors(lambda tensor: tensor.to(device), (inputs, targets)))
            is_random = not torch.equal(before_it, _random_state(device))
        facts = [expected or 0.0, float(expected is not None), float(is_random)]
        sent = torch.tensor(facts, dtype=torch.float64, device=device)
        broadcast(sent, self._group)
        true, is_known, self._is_random = sent.tolist()
        before = self._losses.true if number > 1 else None
        self._losses = Losses(mine=mine, true=true, before=before)
        error = abs(mine - true) / max(abs(true), 1e-30)
        if not is_known:  # then no loss may be there either
            error = 0.0 if mine != mine else float("inf")
        self._look([difference(Key("loss", ""), number, self._mesh.world.rank, error)], number, is_settled)

    def settle(self, num_steps: int) -> None:
        """Nothing is under way any more: compare all there is."""
        self._look([], num_steps, True)

    def _look(self, found: list[Difference], number: int, is_settled: bool) -> None:
        if self._dtype == torch.float64:
            found = found + compare_tensors(self._trainer, self._oracle, step=number, is_settled=is_settled)
        self._found += found
        if self._first is not None:
            return
        worst = max((one.error for one in found), default=0.0)
        is_off = torch.tensor([int(worst > self._tolerance)], device=self._mesh.world.device)
        all_reduce(is_off, self._group, op="max")
        if is_off.item():
            self._first = examine(
                self._trainer,
                self._oracle,
                self._losses,
                found,
                step=number,
                tolerance=self._tolerance,
                is_settled=is_settled,
            )
            if self._is_random:
                self._first = dataclasses.replace(self._first, cause=_RANDOM)

    @property
    def _tolerance(self) -> float:
        return TOLERANCES[self._dtype]

    def outcome(self, rule: Rule, *, num_steps: int) -> Verification:
        mine = [asdict(one) for one in _worst(self._found)]
        gathered = gather_values(mine, self._group, self._mesh.world.device)
        ordered = tuple(
            sorted(_worst(Difference(**entry) for part in gathered for entry in part), key=lambda one: -one.error)
        )
        return Verification(
            num_steps=num_steps,
            tolerance=self._tolerance,
            differences=ordered,
            rule=rule.name,
            first=self._first,
        )


def _worst(found: Iterable[Difference]) -> list[Difference]:
    """Of every tensor, the largest difference."""
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


def _rounds(precision: Precision) -> bool:
    """Whether a plan computes or adds up in 16 bits."""
    own = Precision()
    return (precision.compute, precision.reduce, precision.accumulate) != (own.compute, own.reduce, own.accumulate)


def _measure_rounding(
    model: nn.Module, plan: Plan, settings: _Settings, batches: Sequence[tuple[Any, Any]]
) -> Deviation:
    """The plan as it stands, the model in its own formats, against one process in float32."""
    parallel, batches = copied(model), _cast(batches, torch.float32)
    with settings.parallel(parallel, plan, settings.optimizer, batches[0][0]) as trainer:
        reference = None
        if trainer.mesh.world.rank == 0:
            alone = copied(model, torch.float32, trainer.mesh.world.device)
            reference = settings.alone(OneProcess, alone, plan, settings.optimizer)
        return rounding(trainer, reference, batches)


def copied(model: nn.Module, dtype: torch.dtype | None = None, device: torch.device | None = None) -> nn.Module:
    """A copy of a model that drops nothing."""
    made = copy.deepcopy(model).to(device=device, dtype=dtype)
    for module in made.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    return made


def _cast(batches: Sequence[tuple[Any, Any]], dtype: torch.dtype) -> list[Any]:
    return [map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, batch) for batch in batches]


def _unrounded(model: nn.Module, plan: Plan, inputs: Any, dtype: torch.dtype) -> AbstractContextManager[object]:
    """Where a model casts to float32 by itself, keep it from that."""
    # torch's selective checkpoint counts operators, and does not bear another mode beside it.
    if dtype != torch.float64 or plan.recompute.policy == "selective":
        return nullcontext()
    place = next(model.parameters()).device
    # A copy, because a model may keep state of its own when it runs.
    return unrounded(copy.deepcopy(model), map_tensors(lambda tensor: tensor.to(place), split_tree(inputs, 0, 1)))
