"""Every reason why a plan cannot run, all at once, as far as the given facts tell.

Four checks, in this order: fields without effect (a table); contradictions (`rules.py`); the number of ranks; the
batch. A field without effect is refused because ignoring it silently would be a wrong answer. Values that are bad by
themselves cannot occur: `Plan` refuses them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from weft.errors import PlanError
from weft.plan.all_ranks import with_ranks
from weft.plan.fields import facts_of, one_of
from weft.plan.model_refusals import SMALL_BATCH, UNEVEN_STATISTICS
from weft.plan.plan import ALL, AXES, CODECS, SECTIONS, Axes, Plan, said, value_at
from weft.plan.rules import combination_problems


@dataclass(frozen=True, slots=True)
class _Switch:
    """A field, and the values of it that give other fields an effect."""

    path: str
    values: tuple[object, ...] = ()
    at_least: int = 0
    above: float | None = None
    instead: str = "leave it out"
    """Remedy for setting the fields while the switch is off."""
    alternative: _Switch | None = None
    """Another switch that is enough by itself."""

    def is_on_in(self, plan: Plan) -> bool:
        is_on = self.is_on(value_at(plan, self.path))
        return is_on or (self.alternative is not None and self.alternative.is_on_in(plan))

    def is_on(self, value: object) -> bool:
        if self.above is not None:
            return isinstance(value, float) and value > self.above
        return value in self.values if self.values else isinstance(value, int) and value >= self.at_least

    @property
    def condition(self) -> str:
        """The condition in words."""
        section, name = self.path.split(".")
        if self.above is not None:
            words = f"[{section}] {name} > {self.above:g}"
        elif self.values:
            words = f"[{section}] {name} = {one_of(self.values)}"
        else:
            words = f"[{section}] {name} ≥ {self.at_least}"
        return words if self.alternative is None else f"({words} or {self.alternative.condition})"

    @property
    def advice(self) -> str:
        """Values that would give the fields an effect, in words."""
        return self._own_advice + ("" if self.alternative is None else self.alternative.advice)

    @property
    def _own_advice(self) -> str:
        section, name = self.path.split(".")
        if self.above is not None:
            return f", or set [{section}] {name} above {self.above:g}"
        if not self.values:
            return f", or set [{section}] {name} to {self.at_least} or more"
        return f", or set [{section}] {name} to {one_of(self.values)}"


_SHARDED = ("optimizer", "gradients", "parameters")

# Fields without effect while a switch is off. A field may depend on several; the message names the first that is off.
_DEPENDENT: tuple[tuple[str, _Switch], ...] = (
    ("axes.replicate", _Switch("data.shard", _SHARDED, instead="leave it out and put its ranks on [axes] data")),
    ("pipeline.schedule pipeline.chunks pipeline.cuts pipeline.vertical_sync", _Switch("axes.pipeline", at_least=2)),
    ("pipeline.chunks", _Switch("pipeline.schedule", ("interleaved",))),
    ("pipeline.vertical_sync", _Switch("pipeline.schedule", ("pipedream",))),
    ("tensor.sequence", _Switch("axes.tensor", at_least=2)),
    ("sequence.layout sequence.variant", _Switch("axes.ring", at_least=2)),
    ("data.reshard", _Switch("data.shard", ("parameters",))),
    ("data.offload", _Switch("data.sync", ("all-reduce", "local", "delayed"))),  # the server has the optimizer
    ("data.every", _Switch("data.sync", ("local", "delayed"))),
    ("data.switch_step data.outer data.outer_lr data.outer_momentum", _Switch("data.sync", ("local",))),
    ("data.fragments data.mix", _Switch("data.sync", ("local",))),
    # After every step and with plain averages replicas do all along what they do until the switch.
    ("data.switch_step", _Switch("data.every", at_least=2, alternative=_Switch("data.outer", ("nesterov",)))),
    ("data.outer_lr data.outer_momentum", _Switch("data.outer", ("nesterov",))),
    ("data.delay", _Switch("data.sync", ("local", "delayed"))),
    (
        "data.balance",
        _Switch(
            "step.microbatches",
            at_least=2,
            instead="leave it out (each rank computes one at least, so none is left for a faster rank)",
        ),
    ),
    ("server.mode server.shards server.staleness server.backups", _Switch("data.sync", ("server",))),
    ("server.compensation server.lr_scaling server.pull", _Switch("data.sync", ("server",))),
    ("server.staleness", _Switch("server.mode", ("bounded",))),
    ("server.backups", _Switch("server.mode", ("sync",))),
    ("server.compensation server.lr_scaling", _Switch("server.mode", ("async", "bounded"))),
    ("codec.density codec.bits", _Switch("codec.name", ("topk", "dgc"))),
    ("codec.rank", _Switch("codec.name", ("powersgd",))),
    ("codec.levels", _Switch("codec.name", ("qsgd",))),
    ("codec.memory", _Switch("codec.name", ("topk", "dgc", "onebit", "powersgd"))),  # others are unbiased, or votes
    ("codec.clip codec.masking", _Switch("codec.name", ("dgc",))),
    (
        "codec.warmup_steps codec.dense_below",
        _Switch("codec.name", tuple(name for name in CODECS if name != "half")),
    ),
    ("average.start", _Switch("average.decay", above=0.0)),
    ("precision.loss_scale", _Switch("precision.compute", ("fp16",))),
)
_PATHS = [f"{name}.{field}" for name, section in SECTIONS.items() for field in facts_of(section)]
_SWITCHES = [(path, switch) for path in _PATHS for paths, switch in _DEPENDENT if path in paths.split()]


def conditions() -> Iterator[tuple[str, str]]:
    """Each field that does not always have an effect, as `[section] field`, and its condition."""
    for path, found in groupby(_SWITCHES, lambda entry: entry[0]):
        section, name = path.split(".")
        yield f"[{section}] {name}", " and ".join(switch.condition for _, switch in found)


def check(
    plan: Plan,
    *,
    num_ranks: int | None = None,
    optimizer: str | None = None,
    elementwise: bool | None = None,
    global_batch: int | None = None,
    local_batch_statistics: bool = False,
) -> list[str]:
    """Every reason why this plan cannot run; the more is known besides the plan, the more is checked.

    `optimizer` and `elementwise` are those of `combination_problems`; `local_batch_statistics`: the model has layers
    that normalise over the batch they see (BatchNorm).
    """
    if num_ranks is not None:
        plan = with_ranks(plan, num_ranks)
    problems = list(_idle(plan).values())
    problems += combination_problems(plan, optimizer=optimizer, elementwise=elementwise)
    if num_ranks is not None:
        problems += _rank_problems(plan, num_ranks)
    if global_batch is not None and plan.axes.data != ALL:
        problems += _batch_problems(plan, global_batch, local_batch_statistics)
    return problems


def require(problems: list[str]) -> None:
    """Raise PlanError with what `check` found, if anything."""
    if problems:
        raise PlanError(problems)


def _idle(plan: Plan) -> dict[str, str]:
    """The problem of each field that is set but has no effect, by path."""
    problems: dict[str, str] = {}
    default = Plan()
    for path, switch in _SWITCHES:
        is_set = value_at(plan, path) != value_at(default, path)
        if is_set and path not in problems and not switch.is_on_in(plan):
            problems[path] = (
                f"{said(plan, path)} has no effect with {said(plan, switch.path)}; {switch.instead}{switch.advice}"
            )
    return problems


def _rank_problems(plan: Plan, num_ranks: int) -> Iterator[str]:
    axes, others = plan.axes, plan.axes.besides_data
    if problem := _replica_problem(plan, num_ranks):
        yield problem
        return
    if axes.data == ALL:
        if num_ranks % others:
            product = f" = {others}" if " × " in (factors := _factors(axes, besides="data")) else ""
            yield (
                f'[axes] data = "all" takes the ranks that the other axes leave, and {num_ranks} '
                f"{'is' if num_ranks == 1 else 'are'} not a multiple of {factors}{product}; start {others} or another "
                f"multiple of {others}"
            )
        return
    needed = axes.num_ranks
    if needed == num_ranks:
        return
    fixed = others // axes.replicate
    why = ""
    if num_ranks % others == 0:
        advice = f"set [axes] data = {num_ranks // others}, or start {needed}"
    elif num_ranks % fixed == 0:
        product = f" = {others}" if fixed > 1 else ""
        why = f"; {num_ranks} is not a multiple of {_factors(axes, besides='data')}{product}"
        replicate, data = _nearest_split(num_ranks // fixed, axes.replicate)
        advice = f"set [axes] replicate = {replicate} and data = {data}, or start {needed}"
    else:
        advice = f'start {needed}, or set [axes] data = "all" and start any multiple of {others}'
    yield (
        f"the axes need {_factors(axes)} = {needed} rank{'s' * (needed > 1)}, {num_ranks} "
        f"{'is' if num_ranks == 1 else 'are'} running{why}; {advice}"
    )


def _replica_problem(plan: Plan, num_ranks: int) -> str | None:
    """The problem of ranks that are not whole replicas, where replicas differ from each other."""
    axes, axis = plan.axes, "data" if plan.data.shard == "nothing" else "replicate"
    if plan.data.sync not in ("local", "delayed") or (axes.data == ALL and axis == "replicate"):
        return None
    size = math.prod(getattr(axes, name) for name in AXES if name != axis)
    if num_ranks % size == 0:
        return None
    product = f" = {size}" if " × " in (factors := _factors(axes, besides=axis)) else ""
    more = f"another multiple of {size}"
    if axes.data == ALL:
        advice = f"start {size} or {more}"
    else:
        advice = f"start {axes.num_ranks}, or {more} with [axes] {axis} set to the number of replicas"
    return (
        f"a replica takes {factors}{product} ranks, and {num_ranks} {'is' if num_ranks == 1 else 'are'} not a multiple "
        f"of that, so one replica would be smaller than the others; {advice}"
    )


def _factors(axes: Axes, *, besides: str = "") -> str:
    """The axes of several ranks, as a product in words."""
    sizes = {axis: getattr(axes, axis) for axis in axes.order if axis != besides and getattr(axes, axis) != 1}
    return " × ".join(f"{axis} {size}" for axis, size in sizes.items()) or "data 1"


def _nearest_split(num_ranks: int, replicate: int) -> tuple[int, int]:
    """(replicate, data) for these ranks: the most replicas up to `replicate` that leave data two or more."""
    fits = [size for size in range(2, min(replicate, num_ranks // 2) + 1) if num_ranks % size == 0]
    best = max(fits, default=1)
    return best, num_ranks // best


def _batch_problems(plan: Plan, global_batch: int, local_batch_statistics: bool) -> Iterator[str]:
    data_ranks = plan.axes.data_ranks
    if global_batch < data_ranks:
        yield SMALL_BATCH.message(plan, global_batch=global_batch, data_ranks=data_ranks)
    parts = data_ranks * plan.step.microbatches
    if local_batch_statistics and plan.data.buffers != "synchronise" and global_batch % parts:
        below = global_batch // parts * parts
        sizes = one_of((below, below + parts) if below else (parts,))
        yield UNEVEN_STATISTICS.message(
            plan, global_batch=global_batch, data_ranks=data_ranks, parts=parts, sizes=sizes
        )
