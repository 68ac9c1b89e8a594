"""What `verify` does otherwise where workers of servers are worlds of their own.

Every worker compares itself with one process of its own, which plays all workers: they share no process group. They
meet before the first step, to see that all begin with the same model, and after the last, for one verdict.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict, astuple
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from weft.comm.objects import gather_values
from weft.errors import VerifyError
from weft.layout import Layout, Split
from weft.mesh import Mesh
from weft.plan.exchange.coded_tensor import is_coded
from weft.plan.exchange.push_format import rows_together
from weft.plan.plan import Codec, Plan
from weft.server.worker_mesh import WorkerMesh, ranks_of_run
from weft.sync.served import ServedSync
from weft.sync.served_tensors import name_of
from weft.training.trainer import Trainer
from weft.verification.compression.parts import places_of
from weft.verification.served_codecs import PushedPart
from weft.verification.served_replay import Asked, Owned
from weft.verification.verdict import KINDS, Cause, Deviation, Difference, Finding, Verification


def ranks_to_verify(plan: Plan) -> int:
    """Ranks of all workers, before any of them has joined a run."""
    return dist.get_world_size() if dist.is_initialized() else ranks_of_run(plan)


def comparable_with_servers(plan: Plan) -> tuple[Plan, list[str]]:
    """The plan of servers as it is compared, and notes of what is left out. What `half` rounds is measured instead."""
    notes = []
    if plan.server.backups:
        notes.append(
            f"updates waited for all workers, backups = 0 instead of {plan.server.backups}: whose gradients come too "
            "late depends on how fast workers are"
        )
        plan = dataclasses.replace(plan, server=dataclasses.replace(plan.server, backups=0))
    if plan.server.pull != "master":
        notes.append(f'weights were not rounded on their way: [server] pull = "master" instead of "{plan.server.pull}"')
    codec = Codec() if plan.codec.name == "half" else plan.codec
    return dataclasses.replace(plan, server=dataclasses.replace(plan.server, pull="master"), codec=codec), notes


def require_same_model(model: nn.Module | None, mesh: Mesh) -> None:
    """Refuse workers that were given different first values; servers begin with the first one's. `model`: on the first
    rank of each worker; collective among all ranks of all workers."""
    if not isinstance(mesh, WorkerMesh):
        return
    digest = hashlib.sha256()
    for one in () if model is None else model.parameters():
        digest.update(one.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    found = mesh.gather_from_workers(digest.hexdigest())
    if other := [worker for worker, one in enumerate(found) if one != found[0]]:
        raise VerifyError(
            f"worker {other[0]} was given a model with other first values than worker 0, whose values servers begin "
            "with; set the same seed on all ranks before the model is made (torch.manual_seed(0))"
        )


def ask_workers(trainer: Trainer) -> Asked:
    """Which worker this is, which elements each server has, and what is compressed; collective among the worker's
    ranks."""
    mesh, sync, codec = trainer.mesh, trainer.sync, trainer.plan.codec
    assert isinstance(sync, ServedSync)
    worker = trainer.data_rank  # after this, the worker has joined
    sizes, coordinates = mesh.grid.axes.sizes, mesh.grid.coordinates(mesh.world.rank)
    held: list[list[list[int]]] = [[] for _ in sync.pieces]
    for server, places in enumerate(sync.places):
        for place in places:
            if place is not None:
                number, start, stop = place
                held[number].append([server, start, stop])
    mine = [
        [piece.name, list(piece.layout.global_shape), piece.layout.ranges(sizes, coordinates), inside]
        for piece, inside in zip(sync.pieces, held, strict=True)
    ]
    coded = [
        [
            [piece.name, name_of(piece.name, piece.layout, mesh), rows_together(codec, piece.tensor.shape)],
            [astuple(one) for one in piece.layout.runs(sizes, coordinates)],
            inside,
        ]
        for piece, inside in zip(sync.pieces, held, strict=True)
        if codec.name != "none" and is_coded(codec, piece.tensor.shape)
    ]
    gathered = gather_values([mine, coded], mesh.everyone("control"))
    return Asked(
        worker=worker,
        owned=_owned([row for rows, _ in gathered for row in rows], len(sync.places)),
        coded=_coded([row for _, rows in gathered for row in rows]),
    )


def _coded(rows: Sequence[Any]) -> list[PushedPart]:
    """`rows`: of a rank's part of a tensor that is compressed its names and columns, runs, and servers of ranges. Parts
    that several ranks have are one."""
    found: dict[str, PushedPart] = {}
    for (name, part_name, num_columns), runs, inside in rows:
        places = places_of(runs)
        for _, start, stop in inside:
            is_whole = stop - start == places.numel()
            drawn_as = part_name if is_whole else f"{part_name}[{start}:{stop}]"
            part = PushedPart(name=name, drawn_as=drawn_as, num_columns=num_columns, places=places[start:stop])
            found.setdefault(drawn_as, part)
    return list(found.values())


def _owned(rows: Sequence[Any], num_servers: int) -> Owned:
    """`rows`: name, global shape and ranges of a rank's part of a tensor, and the servers of ranges of that part."""
    owners: dict[str, torch.Tensor] = {}
    for name, shape, ranges, inside in rows:
        splits = tuple(Split(dim=dim, axis="", parts=(tuple(map(tuple, one)),)) for dim, one in enumerate(ranges))
        layout = Layout(global_shape=tuple(shape), splits=splits)
        part = torch.full(layout.local_shape({"": 1}, {"": 0}), -1, dtype=torch.int16)
        for server, start, stop in inside:
            part.view(-1)[start:stop] = server
        whole = owners.setdefault(name, torch.full(layout.global_shape, -1, dtype=torch.int16))
        for there, here in layout.windows({"": 1}, {"": 0}):
            whole[there] = part[here]
    found: Owned = []
    for server in range(num_servers):
        indices = {name: (whole.view(-1) == server).nonzero().view(-1) for name, whole in owners.items()}
        found.append({name: one for name, one in indices.items() if one.numel()})
    return found


def of_all_workers(outcome: Verification, mesh: Mesh) -> Verification:
    """One verdict of all workers, with ranks counted over all of them; collective."""
    if not isinstance(mesh, WorkerMesh) or mesh.whole_plan.axes.data == 1:
        return outcome
    outcomes = [_read(one) for one in mesh.gather_from_workers(asdict(outcome))]
    worst: dict[tuple[str, str], Difference] = {}
    for worker, one in enumerate(outcomes):
        for found in one.differences:
            key = (found.what, found.name)
            if key not in worst or not found.error <= worst[key].error:
                worst[key] = dataclasses.replace(found, rank=found.rank + worker * mesh.world.size)
    deviations = [one.deviation for one in outcomes if one.deviation is not None]
    return dataclasses.replace(
        outcomes[0],
        differences=tuple(sorted(worst.values(), key=lambda one: -one.error)),
        first=_first([one.first for one in outcomes], mesh.world.size),
        deviation=max(deviations, key=_size) if deviations else None,
    )


def _first(findings: Sequence[Finding | None], ranks_of_worker: int) -> Finding | None:
    """The first of all workers' first errors, in the order of a step, with the workers that have found it."""
    found = {worker: one for worker, one in enumerate(findings) if one is not None}
    if not found:
        return None
    worker, first = min(found.items(), key=lambda item: (item[1].step, KINDS.index(item[1].what), item[0]))
    seen = (first.step, first.what, first.name)
    alike = [other for other, one in found.items() if (one.step, one.what, one.name) == seen]
    whose = "every worker" if len(findings) == len(alike) else f"worker {', '.join(map(str, alike))}"
    where = f"{whose}, {first.places}" if ranks_of_worker > 1 else whose
    before = worker * ranks_of_worker
    return dataclasses.replace(first, ranks=tuple(rank + before for rank in first.ranks), places=where)


def _size(deviation: Deviation) -> float:
    found = (deviation.loss, deviation.gradient or 0.0, deviation.movement or 0.0)
    return math.inf if any(math.isnan(one) for one in found) else max(found)


def _read(plain: dict[str, Any]) -> Verification:
    """A verdict from plain values."""
    first, deviation = plain["first"], plain["deviation"]
    if first is not None:
        cause = Cause(**{**first["cause"], "axes": tuple(first["cause"]["axes"])})
        first = Finding(**{**first, "ranks": tuple(first["ranks"]), "cause": cause})
    return Verification(
        **{
            **plain,
            "differences": tuple(Difference(**one) for one in plain["differences"]),
            "first": first,
            "deviation": None if deviation is None else Deviation(**deviation),
            "notes": tuple(plain["notes"]),
        }
    )
