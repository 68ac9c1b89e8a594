"""Every reason why a plan cannot run, all at once, as far as can be told from what is given.

Four questions, in this order: is a field set that has no effect, or a value that is not built yet (two tables); do the
values go together (`rules.py`); are there as many ranks as the axes need; does the batch fit. A plan that says
something it does not do is refused like one that cannot run: silence would be a wrong answer. Bad values by themselves
never get here, because no `Plan` is born with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from weft.errors import PlanError
from weft.plan.fields import facts_of, one_of
from weft.plan.model_refusals import SMALL_BATCH, UNEVEN_STATISTICS
from weft.plan.plan import CODECS, SECTIONS, Axes, Plan, said, value_at
from weft.plan.rules import combination_problems

# The values that work today. A field that is not listed works with every value: whoever builds a method adds its value
# here, or deletes the line when nothing is missing any more.
_BUILT: dict[str, tuple[object, ...]] = {
    "data.sync": ("all-reduce",),
    "data.every": (1,),
    "data.switch_step": (0,),
    "data.outer": ("average",),
    "data.outer_lr": (1.0,),
    "data.outer_momentum": (0.0,),
    "data.delay": (0,),
    "data.balance": (False,),
    "server.mode": ("sync",),
    "server.shards": (1,),
    "server.staleness": (0,),
    "server.backups": (0,),
    "server.compensation": (0.0,),
    "server.lr_scaling": ("none",),
    "codec.name": ("none",),
    "codec.density": (0.01,),
    "codec.rank": (4,),
    "codec.levels": (256,),
    "codec.clip": (0.0,),
    "codec.warmup_steps": (0,),
}


@dataclass(frozen=True, slots=True)
class _Switch:
    """A field, and the values of it without which other fields have no effect."""

    path: str
    values: tuple[object, ...] = ()
    at_least: int = 0
    instead: str = "leave it out"
    """What to do with the fields while the switch is off."""

    def is_on(self, value: object) -> bool:
        return value in self.values if self.values else isinstance(value, int) and value >= self.at_least

    @property
    def condition(self) -> str:
        """What switches the fields on."""
        section, name = self.path.split(".")
        return f"[{section}] {name} = {one_of(self.values)}" if self.values else f"[{section}] {name} ≥ {self.at_least}"

    @property
    def advice(self) -> str:
        """What would give the fields an effect, as far as it is built; empty if nothing would today."""
        section, name = self.path.split(".")
        built = _BUILT.get(self.path)
        if not self.values:
            known = built is None or any(self.is_on(value) for value in built)
            return f", or set [{section}] {name} to {self.at_least} or more" if known else ""
        values = tuple(value for value in self.values if built is None or value in built)
        return f", or set [{section}] {name} to {one_of(values)}" if values else ""


_SHARDED = ("optimizer", "gradients", "parameters")

# Fields that do nothing while a switch is off. A field may depend on several; the first that is off is named.
_SWITCHES: tuple[tuple[str, _Switch], ...] = (
    ("axes.replicate", _Switch("data.shard", _SHARDED, instead="leave it out and put its ranks on [axes] data")),
    ("pipeline.schedule", _Switch("axes.pipeline", at_least=2)),
    ("pipeline.chunks", _Switch("axes.pipeline", at_least=2)),
    ("pipeline.chunks", _Switch("pipeline.schedule", ("interleaved",))),
    ("pipeline.cuts", _Switch("axes.pipeline", at_least=2)),
    ("pipeline.vertical_sync", _Switch("axes.pipeline", at_least=2)),
    ("pipeline.vertical_sync", _Switch("pipeline.schedule", ("pipedream",))),
    ("tensor.sequence", _Switch("axes.tensor", at_least=2)),
    ("sequence.layout", _Switch("axes.ring", at_least=2)),
    ("sequence.variant", _Switch("axes.ring", at_least=2)),
    ("data.reshard", _Switch("data.shard", ("parameters",))),
    ("data.offload", _Switch("data.sync", ("all-reduce", "local", "delayed"))),  # the server has the optimizer
    ("data.every", _Switch("data.sync", ("local", "delayed"))),
    ("data.switch_step", _Switch("data.sync", ("local",))),
    ("data.switch_step", _Switch("data.every", at_least=2)),
    ("data.outer", _Switch("data.sync", ("local",))),
    ("data.outer_lr", _Switch("data.sync", ("local",))),
    ("data.outer_lr", _Switch("data.outer", ("nesterov",))),
    ("data.outer_momentum", _Switch("data.sync", ("local",))),
    ("data.outer_momentum", _Switch("data.outer", ("nesterov",))),
    ("data.delay", _Switch("data.sync", ("delayed",))),
    ("data.balance", _Switch("step.microbatches", at_least=2)),  # with one there is nothing to share out
    ("server.mode", _Switch("data.sync", ("server",))),
    ("server.shards", _Switch("data.sync", ("server",))),
    ("server.staleness", _Switch("data.sync", ("server",))),
    ("server.staleness", _Switch("server.mode", ("bounded",))),
    ("server.backups", _Switch("data.sync", ("server",))),
    ("server.backups", _Switch("server.mode", ("sync",))),
    ("server.compensation", _Switch("data.sync", ("server",))),
    ("server.compensation", _Switch("server.mode", ("async", "bounded"))),
    ("server.lr_scaling", _Switch("data.sync", ("server",))),
    ("server.lr_scaling", _Switch("server.mode", ("async", "bounded"))),
    ("codec.density", _Switch("codec.name", ("topk", "dgc"))),
    ("codec.rank", _Switch("codec.name", ("powersgd",))),
    ("codec.levels", _Switch("codec.name", ("qsgd",))),
    ("codec.clip", _Switch("codec.name", ("dgc",))),
    ("codec.warmup_steps", _Switch("codec.name", CODECS)),
    ("precision.loss_scale", _Switch("precision.compute", ("fp16",))),
)


def conditions() -> Iterator[tuple[str, str]]:
    """Of each field that does not always have an effect, as `[section] field`: what it needs."""
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
    """Every reason why this plan cannot run; the more is given, the more is checked.

    `num_ranks` are running; `optimizer` is its class name, and `elementwise` says whether it treats each element by
    itself (None: not known, the name decides); `local_batch_statistics` says that the model has layers which normalise
    by the batch they see (BatchNorm).
    """
    idle = _idle(plan)
    problems = [*idle.values(), *_unbuilt(plan, set(idle)).values()]
    problems += combination_problems(plan, optimizer=optimizer, elementwise=elementwise)
    if num_ranks is not None:
        problems += _rank_problems(plan.axes, num_ranks)
    if global_batch is not None:
        problems += _batch_problems(plan, global_batch, local_batch_statistics)
    return problems


def require(
    plan: Plan,
    *,
    num_ranks: int | None = None,
    optimizer: str | None = None,
    elementwise: bool | None = None,
    global_batch: int | None = None,
    local_batch_statistics: bool = False,
) -> None:
    """Raise PlanError with everything that `check` finds."""
    problems = check(
        plan,
        num_ranks=num_ranks,
        optimizer=optimizer,
        elementwise=elementwise,
        global_batch=global_batch,
        local_batch_statistics=local_batch_statistics,
    )
    if problems:
        raise PlanError(problems)


def _idle(plan: Plan) -> dict[str, str]:
    """Fields that were set although they have no effect, with the problem."""
    problems: dict[str, str] = {}
    for path, switch in _SWITCHES:
        section, name = path.split(".")
        is_set = value_at(plan, path) != facts_of(SECTIONS[section])[name].default
        if is_set and path not in problems and not switch.is_on(value_at(plan, switch.path)):
            problems[path] = (
                f"{said(plan, path)} has no effect with {said(plan, switch.path)}; {switch.instead}{switch.advice}"
            )
    return problems


def _unbuilt(plan: Plan, idle: set[str]) -> dict[str, str]:
    """Values that are not built yet, with the problem; a field is not blamed where its switch already is."""
    paths = [path for path, built in _BUILT.items() if value_at(plan, path) not in built and path not in idle]
    behind = {path for path, switch in _SWITCHES if switch.path in paths}
    return {
        path: f"{said(plan, path)} is not built yet; use {one_of(_BUILT[path])}" for path in paths if path not in behind
    }


def _rank_problems(axes: Axes, num_ranks: int) -> Iterator[str]:
    needed = axes.num_ranks
    if needed == num_ranks:
        return
    others = needed // axes.data
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
        advice = f"start {needed} or another multiple of {others}, which is what the axes besides data take"
    yield (
        f"the axes need {_factors(axes)} = {needed} rank{'s' * (needed > 1)}, {num_ranks} "
        f"{'is' if num_ranks == 1 else 'are'} running{why}; {advice}"
    )


def _factors(axes: Axes, *, besides: str = "") -> str:
    """The axes longer than 1, as a product in words."""
    sizes = {axis: size for axis, size in axes.sizes.items() if size > 1 and axis != besides}
    return " × ".join(f"{axis} {size}" for axis, size in sizes.items()) or "data 1"


def _nearest_split(num_ranks: int, replicate: int) -> tuple[int, int]:
    """The most replicas, up to as many as wished, that share these ranks and still have two or more each to shard."""
    fits = [size for size in range(2, min(replicate, num_ranks // 2) + 1) if num_ranks % size == 0]
    best = max(fits, default=1)
    return best, num_ranks // best


def _batch_problems(plan: Plan, global_batch: int, local_batch_statistics: bool) -> Iterator[str]:
    data_ranks, microbatches = plan.axes.replicate * plan.axes.data, plan.step.microbatches
    if global_batch < data_ranks:
        yield SMALL_BATCH.message(
            global_batch=global_batch,
            data_ranks=data_ranks,
            replicate=plan.axes.replicate,
            per_replica=plan.axes.data,
        )
    parts = data_ranks * microbatches
    if local_batch_statistics and plan.data.buffers != "synchronise" and global_batch % parts:
        below = global_batch // parts * parts
        sizes = (below, below + parts) if below else (parts,)
        yield UNEVEN_STATISTICS.message(
            plan,
            global_batch=global_batch,
            data_ranks=data_ranks,
            microbatches=microbatches,
            parts=parts,
            sizes=one_of(sizes),
        )
