"""From numbers to a likely cause: pure functions on every rank's evidence about the first tensor that differs.

An explanation holds if it removes nearly all of the difference: the tensor scaled by one number, summed over an axis,
or taken from the step before is then the true one. Where a number is the size of several axes, the pattern of the other
errors decides their order: an exchange of gradients affects all of them, one inside the model only those behind it, a
stage of a pipeline its own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from weft.plan.partition.grid import Grid
from weft.plan.partition.one_worker import is_served
from weft.plan.plan import Plan
from weft.verification.verdict import Cause

EXPLAINED = 1e-3
"""Largest part of the difference that may remain under an explanation."""

_SAME = 1e-6
"""Relative difference below which two factors are equal."""

_INSIDE = ("tensor", "ulysses", "ring", "pipeline")
"""Axes whose ranks exchange inside forward and backward passes."""

_SUMMED = ("data", "replicate", "ring", "ulysses", "microbatches")
"""Axes, and microbatches, over which gradients are summed after a backward pass."""

NOT_A_MEAN = (
    "is no mean over its targets (those other than -100 if they are integers, else samples), so that parts of a batch "
    "do not add up to the whole: let it return (sum, count), see docs/losses.md"
)
"""What a loss of the user's own may be, which explains any difference."""

_DEGREES = {
    "targets": "the targets in the batch, over which the mean is taken",
    "microbatches": "[step] microbatches",
}
"""Names of degrees that are not axes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One rank's measurements of a tensor that is off somewhere. Each "left" is the part of the difference that remains
    under an explanation."""

    rank: int
    is_off: bool = False
    state: str = ""
    """missing, extra, not a number (here) or nowhere a number (in one process neither); empty: plain values."""
    ratio: float = math.nan
    """Least-squares factor from the true tensor to this rank's; for a weight, from the true update."""
    ratio_left: float = math.inf
    previous_left: float = math.inf
    """Explanation: the tensor is that of the step before."""
    sums_left: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Explanation: the sum over the ranks of some axes is the true tensor, or their mean; by axes, joined by "+"."""
    own_left: float = math.inf
    """Explanation: a weight is the replica's own, as it was before the exchange that ended this step."""
    mean_left: float = math.inf
    """Explanation: a weight is the mean of the replicas, and no exchange was due."""
    dense_left: float = math.inf
    """Explanation: a compressed gradient is the sum of the replicas' gradients as they are. Infinite also where nothing
    is compressed."""
    outer_ratio: float = math.nan
    """Least-squares factor from the true change since the exchange before to this rank's."""
    outer_left: float = math.inf
    swapped_with: int | None = None
    """The rank whose true part this rank has."""
    rows: tuple[int, int, int, int] | None = None
    """(dim, first, last, length) of a range that contains all entries that are off; None if they are everywhere."""
    rows_ratio: float = math.nan
    rows_left: float = math.inf
    worst: Sequence[int] = ()
    """Index of the entry with the largest error."""
    mine: float = math.nan
    true: float = math.nan
    is_copy: bool = False
    """Only the model's copy is off; the tensor that the optimizer updates is right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientErrors:
    """The errors of all gradients in the same step, by rank."""

    off: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """By rank and name: the factor from the true gradient, NaN where no factor fits."""
    right: Mapping[int, Sequence[str]] = field(default_factory=dict)
    """By rank: names of right gradients."""


def diagnose(
    evidence: Sequence[Evidence], gradients: GradientErrors, plan: Plan, *, what: str, num_targets: float
) -> Cause:
    """The likely cause of a tensor's error."""
    off = [one for one in evidence if one.is_off]
    states = {one.state for one in off if one.state}
    if states:
        return _cause_of_state(sorted(states)[0], what)
    if what == "weight" and all(one.is_copy for one in off):
        late = " and are still those of the step before" if all(one.previous_left <= EXPLAINED for one in off) else ""
        text = f"what the optimizer updated is right, but the weights that the model computes with are not{late}"
        return Cause(kind="unpublished", text=f"{text}: they were not taken over after the update", axes=("data",))
    if all(one.own_left <= EXPLAINED for one in off):
        text = (
            "it is the replica's own: replicas exchange their weights after this step, and this one did not take part"
        )
        return Cause(kind="not exchanged", text=text, axes=_replica_axes(plan))
    if all(one.mean_left <= EXPLAINED for one in off):
        text = "it is the mean over replicas, and an exchange is not due after this step"
        return Cause(kind="exchanged", text=text, axes=_replica_axes(plan))
    if all(one.dense_left <= EXPLAINED for one in off):
        text = f'it is the sum of all replicas\' gradients as they are: [codec] name = "{plan.codec.name}" left it out'
        return Cause(kind="not compressed", text=text, axes=_codec_axes(plan))
    if all(one.previous_left <= EXPLAINED for one in off):
        stale = "it did not move in this step: the update left it out"
        text = stale if what == "weight" else "it is stale: exactly what it should have been one update before"
        return Cause(kind="stale", text=text)
    if _common([(one.ratio, one.ratio_left) for one in off]):
        return _cause_of_factor(off[0].ratio, gradients, plan, what=what, num_targets=num_targets)
    if _common([(one.outer_ratio, one.outer_left) for one in off]):
        factor = off[0].outer_ratio
        text = f"since the last exchange it moved {factor:.9g} times as far as it should: look at the outer rule"
        return Cause(kind="outer", text=text, axes=_replica_axes(plan))
    for number, word in ((0, "sum"), (1, "mean")):
        for axes in _axes_that_add_up(off, number):
            text = f"it was not summed over [axes] {axes}: its ranks hold different ones, whose {word} is the true one"
            return Cause(kind="not summed", text=text, axes=tuple(axes.split("+")))
    if all(one.swapped_with is not None for one in off):
        pairs = ", ".join(f"rank {one.rank} has rank {one.swapped_with}'s" for one in off)
        return Cause(kind="swapped", text=f"shares are swapped: {pairs}", axes=_axes_between(off, plan))
    if all(one.dense_left < math.inf for one in off):
        told = f'the rule of [codec] name = "{plan.codec.name}" gives another: look at what it sends, keeps and draws'
        return Cause(kind="codec", text=f"{told}; {_furthest(off[0])}", axes=_codec_axes(plan))
    if is_served(plan) and plan.codec.name not in ("none", "half") and what in ("state", "weight"):
        told = (
            f"the worker's gradients are right, and servers updated with others: the rule of [codec] name = "
            f'"{plan.codec.name}" gives another update: look at what it sends, keeps and draws'
        )
        return Cause(kind="codec", text=f"{told}; {_furthest(off[0])}", axes=_codec_axes(plan))
    return _cause_of_rows(off, gradients, plan, what=what, num_targets=num_targets)


def diagnose_loss(
    mine: Sequence[float],
    true: float,
    before: float | None,
    gradients: GradientErrors,
    plan: Plan,
    *,
    is_own_loss: bool = False,
) -> Cause:
    """The likely cause of a loss's error: `mine` by rank, `before` the true one of the step before. `is_own_loss`: it
    is the user's, computed on parts of the batch."""
    if not math.isfinite(true):
        return _cause_of_state("nowhere a number", "loss")
    if not all(math.isfinite(one) for one in mine):
        return _cause_of_state("not a number", "loss")
    if len(set(mine)) > 1:
        return Cause(kind="unknown", text="ranks return different losses, so it was not summed over all of them")
    if before is not None and _is_same(mine[0], before):
        return Cause(kind="stale", text="it is stale: exactly the loss of the step before")
    num_parts = plan.axes.data_ranks * plan.step.microbatches * plan.axes.sequence
    own = f"; or the loss {NOT_A_MEAN}" if is_own_loss and num_parts > 1 else ""
    if true and (candidates := _factors(mine[0] / true, plan, num_targets=math.nan)):
        cause = _say_factor(mine[0] / true, candidates, plan, "")
        return replace(cause, text=cause.text + own)
    inside = tuple(axis for axis in _INSIDE if plan.axes.sizes[axis] > 1)
    if any(gradients.right.values()) and not any(gradients.off.values()):
        return Cause(kind="unknown", text="no simple one; gradients are right, so only what is reported is off")
    text = f"no simple one: the forward pass computes something else ({mine[0]:.9g} for {true:.9g})"
    if inside:
        text += f"; of this plan's axes, these exchange in a forward pass: {', '.join(inside)}"
    return Cause(kind="unknown", text=text + own, axes=inside)


def _replica_axes(plan: Plan) -> tuple[str, ...]:
    return () if plan.replica_axis is None else (plan.replica_axis,)


def _codec_axes(plan: Plan) -> tuple[str, ...]:
    return ("data",) if plan.data.shard == "nothing" else ("replicate",)


def places(ranks: Sequence[int], holders: Sequence[int], plan: Plan) -> str:
    """The coordinates of ranks along the axes, in words; `holders` are all ranks that have the tensor."""
    grid, sizes = Grid(plan.axes), plan.axes.sizes
    everyone = range(plan.axes.num_ranks)
    if set(ranks) == set(everyone):
        return "every rank"
    for among in (everyone, holders):
        for axis in (axis for axis, size in sizes.items() if size > 1):
            for place in range(sizes[axis]):
                if {rank for rank in among if grid.coordinates(rank)[axis] == place} == set(ranks):
                    named = f"replica {place}, {axis} {place}" if axis == plan.replica_axis else f"{axis} {place}"
                    return f"{named} (rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))})"
    return f"all ranks that have it ({_listed(holders, grid)})" if set(ranks) == set(holders) else _listed(ranks, grid)


def _listed(ranks: Sequence[int], grid: Grid) -> str:
    several = [axis for axis, size in grid.axes.sizes.items() if size > 1]
    named = []
    for rank in ranks[:8]:
        place = ", ".join(f"{axis} {grid.coordinates(rank)[axis]}" for axis in several)
        named.append(f"rank {rank}: {place}" if place else f"rank {rank}")
    return "; ".join(named) + (f"; and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def _cause_of_state(state: str, what: str) -> Cause:
    text = {
        "missing": "it is missing here, and one process has it",
        "extra": "it is there, and one process has none: nothing it computes depends on it",
        "not a number": f"the {what} is not a number (or infinite), and one process's is",
        "nowhere a number": f"one process's {what} is not a number (or infinite): look at the model or the data",
    }[state]
    return Cause(kind="not a number" if state == "nowhere a number" else state, text=text)


def _cause_of_factor(ratio: float, gradients: GradientErrors, plan: Plan, *, what: str, num_targets: float) -> Cause:
    if what == "weight":
        return Cause(kind="factor", text=f"it moved {ratio:.9g} times as far as it should: look at the learning rate")
    order, seen = _pattern(ratio, gradients, plan)
    candidates = _factors(ratio, plan, num_targets=num_targets)
    candidates.sort(key=lambda names: (len(names), [order.index(name) for name in names]))
    if candidates:
        return _say_factor(ratio, candidates, plan, seen)
    text = f"it is exactly {ratio:.9g} times the true one, which is no degree of this plan; {seen}"
    if plan.step.clip_norm and order[0] == "data" and ratio:
        text += f"; the plan clips, so the norm it clips by may be {1 / ratio:.9g} times too large"
    return Cause(kind="factor", text=text, axes=())


def _say_factor(ratio: float, candidates: Sequence[tuple[str, ...]], plan: Plan, seen: str) -> Cause:
    degree = ratio if ratio > 1 else 1 / ratio
    named = [" × ".join(_DEGREES.get(name, f"[axes] {name}") for name in names) for names in candidates]
    text = f"it is too {'large' if ratio > 1 else 'small'} by exactly {degree:.9g}, the degree of {named[0]}"
    if len(named) > 1:
        text += f" (also of {', '.join(named[1:])})"
    if seen:
        text += f"; {seen}"
    return Cause(kind="factor", text=text, axes=tuple(dict.fromkeys(itertools.chain(*candidates))))


def _factors(ratio: float, plan: Plan, *, num_targets: float) -> list[tuple[str, ...]]:
    """Parts of a plan with this degree, or one over it: single axes if any, else products of two or more."""
    degrees = {axis: size for axis, size in plan.axes.sizes.items() if size > 1}
    if plan.step.microbatches > 1:
        degrees["microbatches"] = plan.step.microbatches
    known: dict[tuple[str, ...], float] = {("targets",): num_targets}
    for number in range(1, max(len(degrees), 1) + 1):
        for names in itertools.combinations(degrees, number):
            known[names] = float(math.prod(degrees[name] for name in names))
        found = [names for names, degree in known.items() if _is_same(ratio, degree) or _is_same(ratio * degree, 1.0)]
        if found:
            return found
    return []


def _pattern(ratio: float, gradients: GradientErrors, plan: Plan) -> tuple[list[str], str]:
    """The axes that may cause a factor, likeliest first, by the pattern of all errors; and that pattern in words."""
    ranks = [rank for rank, off in gradients.off.items() if off or gradients.right.get(rank)]
    is_none = {rank: not gradients.off[rank] for rank in ranks}
    is_all = {
        rank: not gradients.right.get(rank) and all(_is_same(one, ratio) for one in gradients.off[rank].values())
        for rank in ranks
    }
    everything = [*_SUMMED, "pipeline", "tensor", "targets"]
    if is_all and all(is_all.values()):
        return everything, "every gradient is off by it, as from an exchange that all of them go through"
    grid, stages = Grid(plan.axes), range(plan.axes.pipeline)
    on_stage = {s: [rank for rank in ranks if grid.coordinates(rank)["pipeline"] == s] for s in stages}
    wrong = [s for s in stages if on_stage[s] and all(is_all[rank] for rank in on_stage[s])]
    if wrong and all(is_none[rank] for s in stages if s not in wrong for rank in on_stage[s]):
        told = f"all gradients of pipeline stage {', '.join(map(str, wrong))} are off by it, and those of others right"
        return ["pipeline", *(name for name in everything if name != "pipeline")], told
    num_off = len({name for off in gradients.off.values() for name in off})
    num = num_off + len({name for names in gradients.right.values() for name in names})
    told = f"{num_off} of {num} gradients are off, not all by it, as from an exchange inside the model"
    return [*_INSIDE, *(name for name in everything if name not in _INSIDE)], told


def _cause_of_rows(
    off: Sequence[Evidence], gradients: GradientErrors, plan: Plan, *, what: str, num_targets: float
) -> Cause:
    """The cause where only some rows are off, or no simple explanation holds."""
    told, one = [], off[0]
    if one.rows is not None:
        dim, first, last, length = one.rows
        told.append(f"only entries {first} to {last} of {length} along dim {dim} are off")
    told.append(_furthest(one))
    rows = {one.rows for one in off}
    if len(rows) == 1 and None not in rows and _common([(one.rows_ratio, one.rows_left) for one in off]):
        cause = _cause_of_factor(off[0].rows_ratio, gradients, plan, what=what, num_targets=num_targets)
        return Cause(kind="factor", text=f"{told[0]}: there {cause.text}", axes=cause.axes)
    if None not in rows:
        return Cause(kind="rows", text=", ".join(told))
    return Cause(kind="unknown", text=f"no simple one; {', '.join(told)}")


def _furthest(one: Evidence) -> str:
    at = f" at {list(one.worst)}" if one.worst else ""
    return f"the furthest entry{at} is {one.mine:.9g} for {one.true:.9g}"


def _axes_that_add_up(off: Sequence[Evidence], number: int) -> list[str]:
    """Axes over which the sum (0) or mean (1) of the ranks' tensors is true for all of them, the fewest first."""
    names = set.intersection(*(set(one.sums_left) for one in off))
    found = [axes for axes in names if all(one.sums_left[axes][number] <= EXPLAINED for one in off)]
    return sorted(found, key=lambda axes: (axes.count("+"), axes))


def _axes_between(off: Sequence[Evidence], plan: Plan) -> tuple[str, ...]:
    """The axes along which ranks differ from those they swapped with."""
    grid = Grid(plan.axes)
    found = []
    for one in off:
        assert one.swapped_with is not None
        here, there = grid.coordinates(one.rank), grid.coordinates(one.swapped_with)
        found += [axis for axis in here if here[axis] != there[axis]]
    return tuple(dict.fromkeys(found))


def _common(ratios: Sequence[tuple[float, float]]) -> bool:
    """True if one factor explains them all."""
    return all(left <= EXPLAINED and _is_same(ratio, ratios[0][0]) for ratio, left in ratios)


def _is_same(one: float, other: float) -> bool:
    return abs(one - other) <= _SAME * abs(other)
