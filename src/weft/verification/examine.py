"""Examines the first tensor that differs: measurements from every rank, in which `diagnosis.py` finds a cause.

Only a wrong plan comes here, so speed does not matter: rank 0 broadcasts the tensor again, and that of the step before;
ranks compare with other ranks' parts, and sum what they hold over every axis.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from weft.comm.collectives import all_reduce
from weft.comm.objects import gather_values
from weft.layout import Layout
from weft.mesh import Mesh
from weft.parallel.tensor.shares import local_part
from weft.training.trainer import Trainer
from weft.verification.compare import LocalTensor, broadcast_tensors, local_tensors
from weft.verification.diagnosis import EXPLAINED, NOT_A_MEAN, Evidence, GradientErrors, diagnose, diagnose_loss, places
from weft.verification.one_process import Key
from weft.verification.oracles import Oracle
from weft.verification.verdict import Cause, Difference, Finding

_PHASES = {
    "loss": "forward",
    "gradient": "backward",
    "state": "update",
    "weight": "update",
    "average": "update",
    "buffer": "buffers",
}
"""The phase in which each kind of value is computed, in the order of a step."""

_OF_EXCHANGES = ("not summed", "not exchanged", "exchanged", "outer", "not compressed", "codec")
"""Kinds of causes that lie in an exchange."""

WHOLE_BATCH = "of the whole batch"
"""Name of the loss that one process computes on all microbatches at once."""

Rows = tuple[int, int, int, int]
"""A dim, the first and the last index along it, and its length."""

Compared = tuple[LocalTensor, dict[str, torch.Tensor]]
"""A tensor of this rank, and whole tensors to compare it with: the "true" one, the "previous" one of the step before,
and those of `Oracle.at_exchange`, where they are known."""


class Examination:
    """Finds the first error of a step, and its cause. Every method that sends tensors is collective."""

    def __init__(
        self,
        trainer: Trainer,
        oracle: Oracle | None,
        found: Sequence[Difference],
        *,
        step: int,
        tolerance: float,
        is_drained: bool,
        held: Sequence[LocalTensor] | None = None,
    ) -> None:
        """`found` are this rank's differences; on some rank one is above the tolerance. `held`: what this rank had
        after that step, unless it has it now."""
        self._trainer = trainer
        self._mesh, self._oracle, self._tolerance, self._step = trainer.mesh, oracle, tolerance, step
        self._reference = dict(oracle.tensors(is_drained=is_drained)) if oracle else {}
        self._held: dict[tuple[str, str], list[LocalTensor]] = {}
        for local in local_tensors(trainer, is_drained=is_drained) if held is None else held:
            self._held.setdefault((local.key.what, local.key.name), []).append(local)
        errors = [[one.what, one.name, one.error] for one in found]
        self._errors: list[list[tuple[str, str, float]]] = self._gather(errors)
        """By rank: what, name and error of all that was compared there."""

    @torch.no_grad()
    def run(self, *, mine: float, true: float, before: float | None) -> Finding:
        """Given the loss that the step returned here, and the true one of this step and of the one before."""
        facts = self._gather(None if self._oracle is None else [self._oracle.backward_order, self._oracle.num_targets])
        order, targets_of = facts[0]
        what, name = first = self._first(order)
        ranks = self._replica_of_first(first)
        gradients = self._gradient_errors() if what in ("loss", "gradient") else GradientErrors()
        if first == ("loss", WHOLE_BATCH):
            return self._finding(first, Cause(kind="loss", text=f"the loss {NOT_A_MEAN}"))
        if what == "loss":
            is_own = not self._trainer.own_loss.loss.counts_targets
            losses = [one for rank, one in enumerate(self._gather([mine, true, before])) if rank in ranks]
            _, true, before = losses[0]
            everybodys = [one[0] for one in losses]
            cause = diagnose_loss(everybodys, true, before, gradients, self._mesh.whole_plan, is_own_loss=is_own)
            return self._finding(first, cause)
        evidence = self._collect(what, name)
        num_targets = targets_of[self._gather(self._mesh.replica)[ranks[0]]]
        return self._finding(
            first, diagnose(evidence, gradients, self._mesh.whole_plan, what=what, num_targets=num_targets)
        )

    def _gather(self, value: Any) -> list[Any]:
        return gather_values(value, self._mesh.everyone("control"))

    def _is_off(self, error: float) -> bool:
        return not error <= self._tolerance

    def _first(self, backward_order: Sequence[str]) -> tuple[str, str]:
        """The first error in the order of a step."""
        off = {(what, name) for mine in self._errors for what, name, error in mine if self._is_off(error)}
        what = next(what for what in _PHASES if any(what == other for other, _ in off))
        names = {name for other, name in off if other == what}
        listed = list(dict.fromkeys(name for mine in self._errors for other, name, _ in mine if other == what))
        order = [*backward_order, *reversed(listed)] if what == "gradient" else listed
        return what, next(name for name in order if name in names)

    def _replica_of_first(self, first: tuple[str, str]) -> list[int]:
        """The ranks of a replica on which this error is; all ranks where replicas never differ."""
        replicas = self._gather(self._mesh.replica)
        is_off = [any((w, n) == first and self._is_off(error) for w, n, error in mine) for mine in self._errors]
        chosen = replicas[is_off.index(True)]
        return [rank for rank, replica in enumerate(replicas) if replica == chosen]

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
            phase="exchange" if cause.kind in _OF_EXCHANGES else _PHASES[what],
            what=what,
            name=name,
            error=max(errors.values()),
            ranks=ranks,
            places=places(ranks, list(errors), self._mesh.plan),
            cause=cause,
        )

    def _gradient_errors(self) -> GradientErrors:
        """All gradients of all ranks: those that are off, with their factors, and those that are right."""
        errors = [{name: error for what, name, error in mine if what == "gradient"} for mine in self._errors]
        ratios: dict[str, float] = {}
        for name in sorted({name for mine in errors for name, error in mine.items() if self._is_off(error)}):
            for local, known in self._compared("gradient", name):
                if local.tensor is not None and "true" in known:
                    ratio, left = ratio_of(local.tensor, self._part(known["true"], local.layout))
                    ratios[name] = ratio if left <= EXPLAINED else math.nan
        off: dict[int, dict[str, float]] = {}
        right: dict[int, list[str]] = {}
        for rank, (mine, factors) in enumerate(zip(errors, self._gather(ratios), strict=True)):
            off[rank] = {name: factors.get(name, math.nan) for name, error in mine.items() if self._is_off(error)}
            right[rank] = [name for name in mine if name not in off[rank]]
        return GradientErrors(off=off, right=right)

    def _part(self, whole: torch.Tensor, layout: Layout, rank: int | None = None) -> torch.Tensor:
        return local_part(whole, layout, self._mesh.grid, self._mesh.world.rank if rank is None else rank)

    def _compared(self, what: str, name: str) -> list[Compared]:
        """This rank's tensors of a name, each with what is known of it."""
        sent: dict[Key, torch.Tensor] = {}
        for key, tensor in self._reference.items():
            if self._oracle is not None and (key.what, key.name) == (what, name):
                previous = self._oracle.previous(key)
                found = {"true": tensor, **({} if previous is None else {"previous": previous})}
                found |= self._oracle.at_exchange(key)
                sent |= {key._replace(what=kind): one for kind, one in found.items()}
        known: dict[Key, dict[str, torch.Tensor]] = {}
        for key, tensor in broadcast_tensors(sent, self._mesh):
            known.setdefault(key._replace(what=what), {})[key.what] = tensor
        return [(local, known.get(local.key, {})) for local in self._held.get((what, name), [])]

    def _collect(self, what: str, name: str) -> list[Evidence]:
        """The evidence of every rank, in order."""
        compared = self._compared(what, name)
        worst = max(compared, key=lambda one: self._largest_error(one[0], one[1].get("true")), default=None)
        errors = self._errors[self._mesh.world.rank]
        is_off = any(self._is_off(error) for w, n, error in errors if (w, n) == (what, name))
        local = None if worst is None else worst[0]
        held = self._gather(None if local is None or local.tensor is None else _described(local))
        sums = self._sums(local, held)
        found: dict[str, Any] = {"rank": self._mesh.world.rank, "is_off": is_off}
        if worst is None and is_off:
            found["state"] = "missing"
        if worst is not None and is_off:
            others = [(other, known.get("true")) for other, known in compared if not other.is_copy]
            found["is_copy"] = worst[0].is_copy and not any(self._is_far(*other) for other in others)
            found |= self._measure(*worst, sums, held)
        gathered = self._gather(asdict(Evidence(**found)))
        return [Evidence(**{**one, "rows": one["rows"] and tuple(one["rows"])}) for one in gathered]

    def _largest_error(self, local: LocalTensor, whole: torch.Tensor | None) -> float:
        """The largest difference; infinite where there is nothing to compare, or not a number."""
        if local.tensor is None or whole is None:
            return math.inf
        true = self._part(whole, local.layout)
        error = float((local.tensor.to(true) - true).abs().max()) if true.numel() else 0.0
        return math.inf if math.isnan(error) else error

    def _is_far(self, local: LocalTensor, whole: torch.Tensor | None) -> bool:
        if whole is None or not whole.numel():
            return True
        return self._is_off(self._largest_error(local, whole) / max(float(whole.abs().max()), 1e-300))

    def _measure(
        self,
        local: LocalTensor,
        known: Mapping[str, torch.Tensor],
        sums: Mapping[str, tuple[torch.Tensor, int]],
        held: Sequence[Any],
    ) -> dict[str, Any]:
        """All explanations tried on this rank's tensor."""
        whole = known.get("true")
        if whole is None or local.tensor is None:
            return {"state": "missing" if local.tensor is None else "extra"}
        if not (whole.isfinite().all() and local.tensor.isfinite().all()):
            return {"state": "not a number" if whole.isfinite().all() else "nowhere a number"}
        parts = {kind: self._part(one, local.layout) for kind, one in known.items()}
        mine, true, before = local.tensor.to(whole), parts["true"], parts.get("previous")
        off = (mine - true).abs()
        error, place = float(off.max()), int(off.argmax())
        start = before if local.key.what == "weight" and before is not None else torch.zeros_like(true)
        ratio, left = ratio_of(mine - start, true - start)
        measured: dict[str, Any] = {
            "ratio": ratio,
            "ratio_left": left,
            "swapped_with": self._swapped_with(mine, local.layout, whole, error, held),
            "sums_left": {
                axes: [float((total / part - true).abs().max()) / error for part in (1, size)]
                for axes, (total, size) in sums.items()
            },
            "worst": [int(index) for index in torch.unravel_index(torch.tensor(place), off.shape)] if off.dim() else [],
            "mine": float(mine.flatten()[place]),
            "true": float(true.flatten()[place]),
        }
        for kind in ("previous", "own", "mean", "dense"):
            if kind in parts:
                measured[f"{kind}_left"] = float((mine - parts[kind]).abs().max()) / error
        if "anchor" in parts:
            measured["outer_ratio"], measured["outer_left"] = ratio_of(mine - parts["anchor"], true - parts["anchor"])
        rows = rows_off(off > EXPLAINED * error)
        if rows is not None:
            inside = [one.narrow(rows[0], rows[1], rows[2] - rows[1] + 1) for one in (mine, true, start)]
            measured["rows"] = self._rows_of_whole(rows, local.layout)
            measured["rows_ratio"], measured["rows_left"] = ratio_of(inside[0] - inside[2], inside[1] - inside[2])
        return measured

    def _rows_of_whole(self, rows: Rows, layout: Layout) -> Rows:
        """The same range in the whole tensor, where this rank has one contiguous part of it."""
        dim, first, last, _ = rows
        if layout.flat_range is not None:
            return rows
        ranges = layout.ranges(self._mesh.grid.axes.sizes, self._mesh.grid.coordinates(self._mesh.world.rank))[dim]
        start = ranges[0][0]
        return rows if len(ranges) > 1 else (dim, first + start, last + start, layout.global_shape[dim])

    def _swapped_with(
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

    def _sums(self, local: LocalTensor | None, held: Sequence[Any]) -> dict[str, tuple[torch.Tensor, int]]:
        """Sums of the ranks' tensors over every axis along which they have the same part, and numbers of summands."""
        totals = {}
        self._mesh.add_groups((axes, "control") for axes in _axes_to_sum(self._mesh))
        for axes in _axes_to_sum(self._mesh):
            group = self._mesh.group(axes, "control")
            inside = [held[rank] for rank in group.ranks if held[rank] is not None]
            if len(inside) < 2 or any(one != inside[0] for one in inside) or set(axes.split("+")) & set(inside[0][1]):
                continue
            total = torch.zeros(inside[0][0], dtype=torch.float64)
            if local is not None and local.tensor is not None:
                total += local.tensor.to(total)
            all_reduce(total, group)
            totals[axes] = (total.to(self._mesh.world.device), len(inside))
        return totals


def _described(local: LocalTensor) -> list[Any]:
    """Shape of a tensor of this rank, the axes that split it, and its flat range: for other ranks."""
    assert local.tensor is not None
    flat, axes = local.layout.flat_range, [split.axis for split in local.layout.splits]
    return [list(local.tensor.shape), axes, None if flat is None else list(flat)]


def _axes_to_sum(mesh: Mesh) -> list[str]:
    """Every axis of several ranks, and those over which gradients are summed together."""
    several = [axis for axis, size in mesh.grid.axes.sizes.items() if size > 1]
    together = [axis for axis in several if axis in ("data", "ring", "ulysses")]
    replicate = [axis for axis in several if axis == "replicate"]
    return list(dict.fromkeys([*several, *("+".join(axes) for axes in (together, replicate + together) if axes)]))


def ratio_of(mine: torch.Tensor, true: torch.Tensor) -> tuple[float, float]:
    """The least-squares factor, and the part of the largest difference that remains under it."""
    mine = mine.to(true)
    size, error = float((true * true).sum()), float((mine - true).abs().max()) if true.numel() else 0.0
    if size == 0 or error == 0:
        return math.nan, math.inf
    ratio = float((mine * true).sum()) / size
    return ratio, float((mine - ratio * true).abs().max()) / error


def rows_off(is_off: torch.Tensor) -> Rows | None:
    """The narrowest range of indices along one dim that contains all errors; None if that is all of every dim."""
    found: list[tuple[float, Rows]] = []
    for dim, length in enumerate(is_off.shape):
        others = [other for other in range(is_off.dim()) if other != dim]
        where = (is_off.any(dim=others) if others else is_off).nonzero().flatten().tolist()
        if where and where[-1] - where[0] + 1 < length:
            found.append(((where[-1] - where[0] + 1) / length, (dim, where[0], where[-1], length)))
    return min(found)[1] if found else None
