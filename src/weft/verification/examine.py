"""A closer look at the first thing that differs: numbers from every rank, out of which `diagnosis.py` finds a cause.

Only a wrong plan comes here, so nothing is spared: rank 0 sends what is off again, and what it was a step before; ranks
try whose share they have, and add up what they hold along every axis.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from weft.comm.collectives import all_reduce
from weft.comm.objects import gather_values
from weft.layout import Layout
from weft.mesh import Mesh
from weft.parallel.tensor.shares import local_part
from weft.training.trainer import Trainer
from weft.verification.compare import Own, own_tensors, receive
from weft.verification.diagnosis import EXPLAINED, Look, Survey, diagnose, diagnose_loss, places
from weft.verification.one_process import Key
from weft.verification.oracles import Oracle
from weft.verification.verdict import Cause, Difference, Finding

_PHASES = {"loss": "forward", "gradient": "backward", "weight": "update", "buffer": "buffers"}
"""Of what is compared, in the order in which it happens in a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """What a step returned here, and what it should have, now and a step before."""

    mine: float
    true: float
    before: float | None


@torch.no_grad()
def examine(
    trainer: Trainer,
    oracle: Oracle | None,
    losses: Losses,
    found: Sequence[Difference],
    *,
    step: int,
    tolerance: float,
    is_settled: bool,
) -> Finding:
    """The first of the differences of a step, and why; collective. `found` are this rank's, some rank's is off."""
    return _Examination(trainer, oracle, found, step=step, tolerance=tolerance, is_settled=is_settled).run(losses)


class _Examination:
    def __init__(
        self,
        trainer: Trainer,
        oracle: Oracle | None,
        found: Sequence[Difference],
        *,
        step: int,
        tolerance: float,
        is_settled: bool,
    ) -> None:
        self._mesh = trainer.mesh
        self._group, self._device = self._mesh.everyone("control"), self._mesh.world.device
        self._oracle = oracle
        self._wanted = dict(oracle.tensors(is_settled=is_settled)) if oracle else {}
        self._tolerance = tolerance
        self._step = step
        self._owned: dict[tuple[str, str], list[Own]] = {}
        for own in own_tensors(trainer, is_settled=is_settled):
            self._owned.setdefault((own.key.what, own.key.name), []).append(own)
        errors = [[one.what, one.name, one.error] for one in found]
        self._errors: list[list[tuple[str, str, float]]] = self._gather(errors)
        """Of every rank: what, name and error of all that was compared there."""

    def run(self, losses: Losses) -> Finding:
        facts = self._gather(None if self._oracle is None else [self._oracle.backward_order, self._oracle.num_targets])
        order, num_targets = facts[0]
        first = self._first(order)
        survey = self._survey() if first[0] in ("loss", "gradient") else Survey()
        if first[0] == "loss":
            mine = self._gather(losses.mine)
            return self._finding(first, diagnose_loss(mine, losses.true, losses.before, survey, self._mesh.plan))
        looks = self._look_at(*first)
        cause = diagnose(looks, survey, self._mesh.plan, what=first[0], num_targets=num_targets)
        return self._finding(first, cause)

    def _gather(self, value: Any) -> list[Any]:
        return gather_values(value, self._group, self._device)

    def _is_off(self, error: float) -> bool:
        return not error <= self._tolerance

    def _first(self, backward_order: Sequence[str]) -> tuple[str, str]:
        """What is off first, in the order in which things happen."""
        off = {(what, name) for mine in self._errors for what, name, error in mine if self._is_off(error)}
        what = next(what for what in _PHASES if any(what == other for other, _ in off))
        names = {name for other, name in off if other == what}
        listed = list(dict.fromkeys(name for mine in self._errors for other, name, _ in mine if other == what))
        order = [*backward_order, *reversed(listed)] if what == "gradient" else listed
        return what, next(name for name in order if name in names)

    def _finding(self, first: tuple[str, str], cause: Cause) -> Finding:
        what, name = first
        errors = {
            rank: max(error for w, n, error in mine if (w, n) == first)
            for rank, mine in enumerate(self._errors)
            if any((w, n) == first for w, n, _ in mine)
        }
        ranks = tuple(rank for rank, error in errors.items() if self._is_off(error))
        return Finding(
            step=self._step,
            phase="exchange" if cause.kind == "not summed" else _PHASES[what],
            what=what,
            name=name,
            error=max(errors.values()),
            ranks=ranks,
            places=places(ranks, list(errors), self._mesh.plan),
            cause=cause,
        )

    def _survey(self) -> Survey:
        """All gradients that are off, and by which factor; collective."""
        off = {
            name for mine in self._errors for what, name, error in mine if what == "gradient" and self._is_off(error)
        }
        ratios: dict[str, float] = {}
        for name in sorted(off):
            for own, true, _ in self._wholes("gradient", name):
                if own.tensor is not None and true is not None:
                    ratio, left = ratio_of(own.tensor, self._part(true, own.layout))
                    ratios[name] = ratio if left <= EXPLAINED else math.nan
        gathered = self._gather(ratios)
        rank_off = [
            {n: gathered[rank].get(n, math.nan) for w, n, e in mine if w == "gradient" and self._is_off(e)}
            for rank, mine in enumerate(self._errors)
        ]
        right = [[n for w, n, e in mine if w == "gradient" and not self._is_off(e)] for mine in self._errors]
        return Survey(off=dict(enumerate(rank_off)), right=dict(enumerate(right)))

    def _part(self, whole: torch.Tensor, layout: Layout, rank: int | None = None) -> torch.Tensor:
        return local_part(whole, layout, self._mesh.grid, self._mesh.world.rank if rank is None else rank)

    def _wholes(self, what: str, name: str) -> list[tuple[Own, torch.Tensor | None, torch.Tensor | None]]:
        """This rank's tensors of a name, each beside the whole true one, and the one before; collective."""
        known: list[list[Any]] = []
        kept: dict[Key, tuple[torch.Tensor, torch.Tensor | None]] = {}
        for key, true in self._wanted.items():
            if self._oracle is not None and (key.what, key.name) == (what, name):
                kept[key] = (true, self._oracle.before(key))
                known.append([key.version, list(true.shape), kept[key][1] is not None])
        received = {}
        for version, shape, has_before in self._gather(known)[0]:
            key = Key(what, name, version)
            sent = kept.get(key, (None, None))
            received[key] = (
                receive(sent[0], tuple(shape), self._group, self._device),
                receive(sent[1], tuple(shape), self._group, self._device) if has_before else None,
            )
        nothing = (None, None)
        return [(own, *received.get(own.key, nothing)) for own in self._owned.get((what, name), [])]

    def _look_at(self, what: str, name: str) -> list[Look]:
        """Of every rank, in order; collective."""
        pairs = [
            (own, true, before, largest_error(own.tensor, None if true is None else self._part(true, own.layout)))
            for own, true, before in self._wholes(what, name)
        ]
        look: dict[str, Any] = {"rank": self._mesh.world.rank}
        chosen = max(pairs, key=lambda pair: pair[3], default=None)
        errors = self._errors[self._mesh.world.rank]
        look["is_off"] = any(self._is_off(error) for w, n, error in errors if (w, n) == (what, name))
        held = self._gather(None if chosen is None or chosen[0].tensor is None else _described(chosen[0]))
        sums = self._sums(None if chosen is None else chosen[0], held)
        look["state"] = "missing" if chosen is None and look["is_off"] else ""
        if chosen is not None and look["is_off"]:
            own, true, before, _ = chosen
            look["is_copy"] = own.is_copy and not any(
                self._is_far(other, true) for other, true, _, _ in pairs if not other.is_copy
            )
            look |= self._measure(own, true, before, sums, held)
        return [_read_look(one) for one in self._gather(asdict(Look(**look)))]

    def _is_far(self, own: Own, true: torch.Tensor | None) -> bool:
        if true is None or not true.numel():
            return True
        return self._is_off(
            largest_error(own.tensor, self._part(true, own.layout)) / max(float(true.abs().max()), 1e-300)
        )

    def _measure(
        self,
        own: Own,
        whole: torch.Tensor | None,
        whole_before: torch.Tensor | None,
        sums: Mapping[str, tuple[torch.Tensor, int]],
        held: Sequence[Any],
    ) -> dict[str, Any]:
        """All explanations tried on this rank's tensor."""
        if whole is None or own.tensor is None:
            return {"state": "missing" if own.tensor is None else "extra"}
        if not (whole.isfinite().all() and own.tensor.isfinite().all()):
            return {"state": "not a number" if whole.isfinite().all() else "nowhere a number"}
        mine, true = own.tensor.to(whole), self._part(whole, own.layout)
        before = None if whole_before is None else self._part(whole_before, own.layout)
        off = (mine - true).abs()
        error, place = float(off.max()), int(off.argmax())
        moved = before if own.key.what == "weight" and before is not None else torch.zeros_like(true)
        ratio, left = ratio_of(mine - moved, true - moved)
        measured: dict[str, Any] = {
            "ratio": ratio,
            "ratio_left": left,
            "twin": self._twin(mine, own.layout, whole, error, held),
        }
        if before is not None:
            measured["before_left"] = float((mine - before).abs().max()) / error
        measured["sums_left"] = {
            axes: [float((total / part - true).abs().max()) / error for part in (1, size)]
            for axes, (total, size) in sums.items()
        }
        rows = rows_off(off > EXPLAINED * error)
        if rows is not None:
            inside = [one.narrow(rows[0], rows[1], rows[2] - rows[1] + 1) for one in (mine, true, moved)]
            measured["rows"] = self._in_whole(rows, own.layout)
            measured["rows_ratio"], measured["rows_left"] = ratio_of(inside[0] - inside[2], inside[1] - inside[2])
        worst = [int(index) for index in torch.unravel_index(torch.tensor(place), off.shape)] if off.dim() else []
        return {**measured, "worst": worst, "mine": float(mine.flatten()[place]), "true": float(true.flatten()[place])}

    def _in_whole(self, rows: Rows, layout: Layout) -> Rows:
        """The same range in the whole tensor, where this rank has one stretch of it."""
        dim, first, last, length = rows
        if layout.flat_range is not None:
            return rows
        ranges = layout.ranges(self._mesh.grid.axes.sizes, self._mesh.grid.coordinates(self._mesh.world.rank))[dim]
        if len(ranges) > 1:
            return rows
        start = ranges[0][0]
        return dim, first + start, last + start, layout.global_shape[dim]

    def _twin(
        self, mine: torch.Tensor, layout: Layout, whole: torch.Tensor, error: float, held: Sequence[Any]
    ) -> int | None:
        """Another rank whose true part this rank has."""
        for rank, other in enumerate(held):
            if rank == self._mesh.world.rank or other is None or tuple(other[0]) != tuple(mine.shape):
                continue
            theirs = self._part(whole, replace(layout, flat_range=other[2] and tuple(other[2])), rank)
            if theirs.shape == mine.shape and float((mine - theirs).abs().max()) <= EXPLAINED * error:
                return rank
        return None

    def _sums(self, own: Own | None, held: Sequence[Any]) -> dict[str, tuple[torch.Tensor, int]]:
        """What ranks hold, added up over every axis along which they have the same part; collective."""
        totals = {}
        self._mesh.add_groups((axes, "control") for axes in _axes_to_add(self._mesh))
        for axes in _axes_to_add(self._mesh):
            group = self._mesh.group(axes, "control")
            inside = [held[rank] for rank in group.ranks if held[rank] is not None]
            if len(inside) < 2 or any(one != inside[0] for one in inside) or set(axes.split("+")) & set(inside[0][1]):
                continue
            total = torch.zeros(inside[0][0], dtype=torch.float64, device=self._device)
            if own is not None and own.tensor is not None:
                total += own.tensor.to(total)
            all_reduce(total, group)
            totals[axes] = (total, len(inside))
        return totals


def _described(own: Own) -> list[Any]:
    """What others must know of a tensor of this rank's: its shape, the axes that split it, and its flat range."""
    assert own.tensor is not None
    flat = own.layout.flat_range
    return [list(own.tensor.shape), [split.axis for split in own.layout.splits], None if flat is None else list(flat)]


def _axes_to_add(mesh: Mesh) -> list[str]:
    """Every axis of several ranks, and those that gradients are added up over together."""
    several = [axis for axis, size in mesh.grid.axes.sizes.items() if size > 1]
    together = [axis for axis in several if axis in ("data", "ring", "ulysses")]
    found = [*several]
    for axes in (together, [*(axis for axis in several if axis == "replicate"), *together]):
        if len(axes) > 1 and "+".join(axes) not in found:
            found.append("+".join(axes))
    return found


def _read_look(values: dict[str, Any]) -> Look:
    rows = values["rows"]
    return Look(
        **{
            **values,
            "sums_left": {axes: (left[0], left[1]) for axes, left in values["sums_left"].items()},
            "rows": None if rows is None else tuple(rows),
            "worst": tuple(values["worst"]),
        }
    )


Rows = tuple[int, int, int, int]
"""A dim, the first and the last index along it, and its length."""


def largest_error(mine: torch.Tensor | None, true: torch.Tensor | None) -> float:
    """The largest difference; infinite where there is nothing to compare, or not a number."""
    if mine is None or true is None:
        return math.inf
    error = float((mine.to(true) - true).abs().max()) if true.numel() else 0.0
    return math.inf if math.isnan(error) else error


def ratio_of(mine: torch.Tensor, true: torch.Tensor) -> tuple[float, float]:
    """The factor that fits best, by least squares, and the part of the largest difference that it leaves."""
    mine = mine.to(true)
    size, error = float((true * true).sum()), float((mine - true).abs().max()) if true.numel() else 0.0
    if size == 0 or error == 0:
        return math.nan, math.inf
    ratio = float((mine * true).sum()) / size
    return ratio, float((mine - ratio * true).abs().max()) / error


def rows_off(is_off: torch.Tensor) -> Rows | None:
    """The narrowest range of indices along one dim that has all that is off; None if that is all of every dim."""
    found: list[tuple[float, Rows]] = []
    for dim, length in enumerate(is_off.shape):
        others = [other for other in range(is_off.dim()) if other != dim]
        where = (is_off.any(dim=others) if others else is_off).nonzero().flatten().tolist()
        if where and where[-1] - where[0] + 1 < length:
            found.append(((where[-1] - where[0] + 1) / length, (dim, where[0], where[-1], length)))
    return min(found)[1] if found else None
