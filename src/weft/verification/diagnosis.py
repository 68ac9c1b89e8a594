"""From numbers to a likely cause: pure functions on what every rank saw of the first thing that differs.

An explanation counts when it leaves next to nothing of the difference: scaled by one number, added up over an axis,
taken from the step before, a tensor is then the true one. Where a number is the degree of several axes, the pattern of
what else is off decides their order: an exchange of gradients spoils all of them, one inside the model only those
behind it, a stage of a pipeline its own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from weft.plan.partition.grid import Grid
from weft.plan.plan import Plan
from weft.verification.verdict import Cause

EXPLAINED = 1e-3
"""An explanation holds if it leaves less than this part of the difference."""

_SAME = 1e-6
"""Two factors are one if they differ by less than this part."""

_INSIDE = ("tensor", "ulysses", "ring", "pipeline")
"""Axes whose ranks exchange inside a model's passes."""

_BETWEEN = ("data", "replicate", "ring", "ulysses", "microbatches")
"""What a gradient is added up over when a pass is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What one rank sees of one tensor that is off somewhere. Each "left" is the part of the difference left by an
    explanation."""

    rank: int
    is_off: bool = False
    state: str = ""
    """missing, extra, not a number (here) or nowhere a number (in one process neither); empty: plain values."""
    ratio: float = math.nan
    """Of mine to the true one, by least squares; of a weight, of what it moved."""
    ratio_left: float = math.inf
    before_left: float = math.inf
    """If it is the one of the step before."""
    sums_left: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """By axes, joined by "+": if the sum over their ranks is the true one, or their mean."""
    twin: int | None = None
    """The rank whose true part this rank has."""
    rows: tuple[int, int, int, int] | None = None
    """(dim, first, last, length): all that is off is in here; None if it is everywhere."""
    rows_ratio: float = math.nan
    rows_left: float = math.inf
    worst: tuple[int, ...] = ()
    """The entry that is furthest off."""
    mine: float = math.nan
    true: float = math.nan
    is_copy: bool = False
    """Only the model's copy is off; what the optimizer updates is right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What else is off in the same step: of each rank, its gradients."""

    off: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """By rank and name: the factor, NaN where it is none."""
    right: Mapping[int, Sequence[str]] = field(default_factory=dict)


def diagnose(looks: Sequence[Look], survey: Survey, plan: Plan, *, what: str, num_targets: float) -> Cause:
    """Why a tensor is probably off."""
    off = [look for look in looks if look.is_off]
    states = {look.state for look in off if look.state}
    if states:
        return _cause_of_state(sorted(states)[0], what)
    if what == "weight" and all(look.is_copy for look in off):
        late = " and are still those of the step before" if all(_holds(look.before_left) for look in off) else ""
        text = f"what the optimizer updated is right, but the weights that the model computes with are not{late}"
        return Cause(kind="unpublished", text=f"{text}: they were not taken over after the update", axes=("data",))
    if all(_holds(look.before_left) for look in off):
        stale = "it did not move in this step: the update left it out"
        text = stale if what == "weight" else "it is stale: exactly what it should have been one update before"
        return Cause(kind="stale", text=text)
    if _common([(look.ratio, look.ratio_left) for look in off]):
        return _cause_of_factor(off[0].ratio, survey, plan, what=what, num_targets=num_targets)
    for number, word in ((0, "sum"), (1, "mean")):
        for axes in _axes_that_add_up(off, number):
            text = f"it was not summed over [axes] {axes}: its ranks hold different ones, whose {word} is the true one"
            return Cause(kind="not summed", text=text, axes=tuple(axes.split("+")))
    if all(look.twin is not None for look in off):
        pairs = ", ".join(f"rank {look.rank} has rank {look.twin}'s" for look in off)
        return Cause(kind="swapped", text=f"shares are swapped: {pairs}", axes=_axes_between(off, plan))
    return _cause_of_rows(off, survey, plan, what=what, num_targets=num_targets)


def diagnose_loss(mine: Sequence[float], true: float, before: float | None, survey: Survey, plan: Plan) -> Cause:
    """Why a loss is probably off: `mine` of every rank, `before` the true one of the step before."""
    if not math.isfinite(true):
        return _cause_of_state("nowhere a number", "loss")
    if not all(math.isfinite(one) for one in mine):
        return _cause_of_state("not a number", "loss")
    if len(set(mine)) > 1:
        return Cause(kind="unknown", text="ranks return different losses, so it was not summed over all of them")
    if before is not None and _is_same(mine[0], before):
        return Cause(kind="stale", text="it is stale: exactly the loss of the step before")
    if true and (candidates := _factors(mine[0] / true, plan, num_targets=math.nan)):
        return _say_factor(mine[0] / true, candidates, plan, "")
    inside = tuple(axis for axis in _INSIDE if plan.axes.sizes[axis] > 1)
    if any(survey.right.values()) and not any(survey.off.values()):
        return Cause(kind="unknown", text="no simple one; gradients are right, so only what is reported is off")
    text = f"no simple one: the forward pass computes something else ({mine[0]:.9g} for {true:.9g})"
    if inside:
        text += f"; of this plan's axes, these exchange in a forward pass: {', '.join(inside)}"
    return Cause(kind="unknown", text=text, axes=inside)


def places(ranks: Sequence[int], holders: Sequence[int], plan: Plan) -> str:
    """Where ranks are along the axes, in words; `holders` are all that have the thing in question."""
    grid, sizes = Grid(plan.axes), plan.axes.sizes
    everyone = range(plan.axes.num_ranks)
    if set(ranks) == set(everyone):
        return "every rank"
    for among in (everyone, holders):
        for axis in (axis for axis, size in sizes.items() if size > 1):
            for place in range(sizes[axis]):
                if {rank for rank in among if grid.coordinates(rank)[axis] == place} == set(ranks):
                    return f"{axis} {place} (rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))})"
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


def _cause_of_factor(ratio: float, survey: Survey, plan: Plan, *, what: str, num_targets: float) -> Cause:
    if what == "weight":
        return Cause(kind="factor", text=f"it moved {ratio:.9g} times as far as it should: look at the learning rate")
    order, seen = _pattern(ratio, survey, plan)
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
    named = [" × ".join(_said(name, plan) for name in names) for names in candidates]
    text = f"it is too {'large' if ratio > 1 else 'small'} by exactly {degree:.9g}, the degree of {named[0]}"
    if len(named) > 1:
        text += f" (also of {', '.join(named[1:])})"
    if seen:
        text += f"; {seen}"
    return Cause(kind="factor", text=text, axes=tuple(dict.fromkeys(itertools.chain(*candidates))))


def _said(name: str, plan: Plan) -> str:
    if name == "targets":
        return "the targets in the batch, over which the mean is taken"
    return f"[step] {name}" if name == "microbatches" else f"[axes] {name}"


def _factors(ratio: float, plan: Plan, *, num_targets: float) -> list[tuple[str, ...]]:
    """What in a plan has this degree, or one over it: single axes if any, else products of two or more."""
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


def _pattern(ratio: float, survey: Survey, plan: Plan) -> tuple[list[str], str]:
    """Which axes a factor points to, likeliest first, by what else is off."""
    ranks = [rank for rank, off in survey.off.items() if off or survey.right.get(rank)]
    is_none = {rank: not survey.off[rank] for rank in ranks}
    is_all = {
        rank: not survey.right.get(rank) and all(_is_same(one, ratio) for one in survey.off[rank].values())
        for rank in ranks
    }
    everything = [*_BETWEEN, "pipeline", "tensor", "targets"]
    if is_all and all(is_all.values()):
        return everything, "every gradient is off by it, as from an exchange that all of them go through"
    grid, stages = Grid(plan.axes), range(plan.axes.pipeline)
    on_stage = {s: [rank for rank in ranks if grid.coordinates(rank)["pipeline"] == s] for s in stages}
    wrong = [s for s in stages if on_stage[s] and all(is_all[rank] for rank in on_stage[s])]
    if wrong and all(is_none[rank] for s in stages if s not in wrong for rank in on_stage[s]):
        told = f"all gradients of pipeline stage {', '.join(map(str, wrong))} are off by it, and those of others right"
        return ["pipeline", *(name for name in everything if name != "pipeline")], told
    num_off = len({name for off in survey.off.values() for name in off})
    num = num_off + len({name for names in survey.right.values() for name in names})
    told = f"{num_off} of {num} gradients are off, not all by it, as from an exchange inside the model"
    return [*_INSIDE, *(name for name in everything if name not in _INSIDE)], told


def _cause_of_rows(off: Sequence[Look], survey: Survey, plan: Plan, *, what: str, num_targets: float) -> Cause:
    """Only a part of it is off, or there is nothing simple to say."""
    told = []
    for look in off[:1]:
        if look.rows is not None:
            dim, first, last, length = look.rows
            told.append(f"only entries {first} to {last} of {length} along dim {dim} are off")
        at = f" at {list(look.worst)}" if look.worst else ""
        told.append(f"the furthest entry{at} is {look.mine:.9g} for {look.true:.9g}")
    rows = {look.rows for look in off}
    if len(rows) == 1 and None not in rows and _common([(look.rows_ratio, look.rows_left) for look in off]):
        cause = _cause_of_factor(off[0].rows_ratio, survey, plan, what=what, num_targets=num_targets)
        return Cause(kind="factor", text=f"{told[0]}: there {cause.text}", axes=cause.axes)
    if None not in rows:
        return Cause(kind="rows", text=", ".join(told))
    return Cause(kind="unknown", text=f"no simple one; {', '.join(told)}")


def _axes_that_add_up(off: Sequence[Look], number: int) -> list[str]:
    """Axes over which the sum (0) or mean (1) of what ranks hold is true for all of them, the fewest first."""
    names = set.intersection(*(set(look.sums_left) for look in off))
    found = [axes for axes in names if all(_holds(look.sums_left[axes][number]) for look in off)]
    return sorted(found, key=lambda axes: (axes.count("+"), axes))


def _axes_between(off: Sequence[Look], plan: Plan) -> tuple[str, ...]:
    """Along which axes ranks and their twins differ."""
    grid = Grid(plan.axes)
    found = []
    for look in off:
        assert look.twin is not None
        here, there = grid.coordinates(look.rank), grid.coordinates(look.twin)
        found += [axis for axis in here if here[axis] != there[axis]]
    return tuple(dict.fromkeys(found))


def _common(ratios: Sequence[tuple[float, float]]) -> bool:
    """Whether one factor explains them all."""
    return all(_holds(left) and _is_same(ratio, ratios[0][0]) for ratio, left in ratios)


def _holds(left: float) -> bool:
    return left <= EXPLAINED


def _is_same(one: float, other: float) -> bool:
    return abs(one - other) <= _SAME * abs(other)
