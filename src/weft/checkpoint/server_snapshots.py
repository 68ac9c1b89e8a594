"""The last snapshots of a run's parameter servers as an ordinary checkpoint, which any plan goes on from.

    servers/saved-0/common-120, servers/saved-1/common-120  ──>  checkpoints/step-120

It is written when a run is resumed of which everybody is gone. Servers hold flat parts of tensors, and keep with them
where each lies in which whole one; this puts them together, one process for all. What only workers have is not in it:
their random states, what codecs had not sent, `trainer.extra_state`, the latest running statistics of a BatchNorm
(those with which the run began are), and how far a dynamic loss scale had grown.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from weft.checkpoint.files.hugging_face import WEIGHTS_INDEX, weights_index
from weft.checkpoint.files.safetensors import MOST_FILE_BYTES, Entry, TensorFile, pack, rank_file
from weft.checkpoint.folders import all_checkpoints
from weft.checkpoint.portable import KINDS, MODEL, OPTIMIZER, Part
from weft.checkpoint.save import write
from weft.checkpoint.snapshot import FORMAT, Snapshot, by_file
from weft.comm.group import Group, Traffic
from weft.errors import CheckpointError, WeftError
from weft.layout import Layout, Split
from weft.server import snapshot_file
from weft.server.protocol.frames import tensor_of
from weft.server.protocol.layout import ServerLayout
from weft.server.protocol.message import Buffer, Kind, Malformed, Message
from weft.server.protocol.optimizer_state import read_states
from weft.server.protocol.served_run import seed_of
from weft.server.protocol.settings import Settings, settings_of_object
from weft.server.snapshot import Snapshot as ServerSnapshot

log = logging.getLogger("weft")
SERVERS = "servers"
"""The folder of a run in which its servers keep their snapshots."""
_FIRST_LOSS_SCALE = {"value": 65536.0, "num_good": 0}


def save_servers(run: Path, checkpoints: Path) -> Path | None:
    """Write what the servers of a run have saved as its newest checkpoint, if it is that, and delete their files;
    returns the checkpoint. Files that cannot be read are put aside, with a warning."""
    folder, written = run / SERVERS, None
    try:
        snapshots = _newest(folder)
        step = max((int(one.plain["step"]) for one in snapshots), default=0)
        newest = max((int(path.name[5:]) for path in all_checkpoints(checkpoints)), default=0)
        snapshot = _checkpoint_of(snapshots) if step > newest else None
    except (WeftError, Malformed) as problem:
        aside = next(one for number in range(10**6) if not (one := run / f"{SERVERS}.damaged{number or ''}").exists())
        folder.rename(aside)
        log.warning("%s; put aside as %s, and the run goes on from its last checkpoint", problem, aside.name)
        return None
    if snapshot is not None:
        written = checkpoints / f"step-{step}"
        alone = Group(axis="world", purpose="saving", ranks=(0,), index=0, handle=None, traffic=Traffic())
        write(snapshot, written, alone)
        log.warning(
            "this run goes on from what its servers had saved after step %d, now in %s: buffers that the model "
            "changes, and random states, begin anew",
            step,
            written,
        )
    snapshot_file.remove_snapshots(folder)
    return written


def _newest(folder: Path) -> list[ServerSnapshot]:
    """One snapshot of each server, of the same version where they make updates together; none if there are none."""
    folders = sorted(folder.glob("saved-*"), key=lambda one: int(one.name[6:]))
    last = [found for one in folders if (found := snapshot_file.read_snapshot(one)) is not None]
    if not last:
        return []
    settings = _settings_of(last[0])
    if len(last) < settings.num_servers:
        log.warning(
            "%s has snapshots of %d of %d servers, which are not enough to go on from; the others may be on other "
            "machines, or had not begun",
            folder,
            len(last),
            settings.num_servers,
        )
        return []
    if not settings.is_sync:
        return last
    if len({one.version for one in last}) == 1:
        return last
    common = set.intersection(*(set(snapshot_file.common_snapshots(one)) for one in folders))
    if not common:
        return []
    name = f"{snapshot_file.COMMON}{max(common)}"
    return [found for one in folders if (found := snapshot_file.read_snapshot(one, name)) is not None]


def _checkpoint_of(snapshots: Sequence[ServerSnapshot]) -> Snapshot:
    """A checkpoint of the snapshots of all servers, in their order; raises Malformed or CheckpointError."""
    settings = _settings_of(snapshots[0])
    layouts = [ServerLayout.of(settings, server) for server in range(settings.num_servers)]
    parts = [*_trained(settings, layouts, snapshots), *_fixed(settings, layouts, snapshots)]
    entries = {kind: list({one.entry.name: one.entry for one in parts if one.kind == kind}.values()) for kind in KINDS}
    files = {kind: pack(kind, entries[kind], MOST_FILE_BYTES) for kind in KINDS}
    maps = {kind: {entry.name: file.name for file in files[kind] for entry in file.entries} for kind in KINDS}
    plain = max((one.plain for one in snapshots), key=lambda one: int(one["step"]))
    num_bytes = sum(entry.num_bytes for entry in entries[MODEL])
    return Snapshot(
        files=tuple(file for kind in KINDS for file in files[kind]),
        own_files=(TensorFile(name=rank_file(0), entries=(), metadata={}),),
        parts=by_file(files, [one for one in parts if one.runs]),
        others={WEIGHTS_INDEX: weights_index(maps[MODEL], num_bytes).encode()},
        facts={
            "format": FORMAT,
            "step": plain["step"],
            "data_position": plain["position"],
            "seed": plain["step"],
            "dropout_seed": seed_of(settings.job),
            "plan": "",  # of none, so that no plan looks for what only workers have
            "optimizer": settings.optimizer["class"].rpartition(".")[2],
            "optimizer_numbers": {},
            "update": {"loss_scale": _FIRST_LOSS_SCALE, "num_skipped": plain["num_skipped"]},
            "shapes": {entry.name: list(entry.shape) for entry in entries[MODEL]},
            "tensors": maps,
        },
        device=torch.device("cpu"),
    )


def _settings_of(snapshot: ServerSnapshot) -> Settings:
    try:
        return settings_of_object(snapshot.plain["settings"])
    except Malformed as problem:
        raise CheckpointError(f"the snapshots of a server cannot be read: {problem}") from None


def _trained(
    settings: Settings, layouts: Sequence[ServerLayout], snapshots: Sequence[ServerSnapshot]
) -> Iterator[Part]:
    """Weights, and the optimizer's state of them."""
    one_each = zip(settings.tensors, settings.dtypes, strict=True)
    weights = {one.name: torch.empty(one.numel, dtype=getattr(torch, dtype)) for one, dtype in one_each}
    states: dict[tuple[str, str], torch.Tensor] = {}
    for layout, snapshot in zip(layouts, snapshots, strict=True):
        for bucket, (state, frames) in zip(layout.buckets, snapshot.buckets, strict=True):
            parts = [layout.parts[number] for number in bucket]
            kept = read_states(Message(kind=Kind.STATE, frames=state), [part.numel for part in parts])
            for part, number, frame, found in zip(parts, bucket, frames, kept, strict=True):
                name = settings.tensors[part.tensor].name
                weights[name][part.start : part.stop] = tensor_of(frame, layout.dtype(number))
                for key, value in found.items():
                    if not isinstance(value, torch.Tensor) or value.dim() == 0:
                        dtype = torch.float64 if isinstance(value, float) else None
                        states[name, key] = torch.as_tensor(value, dtype=dtype)
                        continue
                    whole = states.setdefault((name, key), torch.zeros(len(weights[name]), dtype=value.dtype))
                    whole[part.start : part.stop] = value
    for name, values in weights.items():
        yield _part(settings, MODEL, name, values)
    for (name, key), values in states.items():
        yield _part(settings, OPTIMIZER, name, values, key=key)


def _fixed(settings: Settings, layouts: Sequence[ServerLayout], snapshots: Sequence[ServerSnapshot]) -> Iterator[Part]:
    """Frozen parameters and buffers, but for those that no checkpoint has."""
    held: dict[str, dict[int, Buffer]] = {one.name: {} for one in settings.fixed}
    for layout, snapshot in zip(layouts, snapshots, strict=True):
        for bucket, frames in zip(layout.fixed_buckets, snapshot.fixed, strict=True):
            for number, frame in zip(bucket, frames, strict=True):
                part = layout.fixed_parts[number]
                held[settings.fixed[part.tensor].name][part.start] = frame
    for one, dtype in zip(settings.fixed, settings.fixed_dtypes, strict=True):
        if one.name in settings.places:
            together = bytearray(b"".join(bytes(frame) for _, frame in sorted(held[one.name].items())))
            kind = getattr(torch, dtype)
            values = torch.frombuffer(together, dtype=kind) if together else torch.empty(0, dtype=kind)
            yield _part(settings, MODEL, one.name, values)


def _part(settings: Settings, kind: str, name: str, values: torch.Tensor, *, key: str = "") -> Part:
    """A tensor of the servers as a part of a whole one. `key`: which state of it that is."""
    if name not in settings.places:
        raise CheckpointError(f'the snapshots of servers do not say where "{name}" lies in the model')
    whole, shape, ranges = settings.places[name]
    stored = f"{whole}/{key}" if key else whole
    if values.dim() == 0:
        shape, ranges = [], []
    inside = [tuple((start, stop) for start, stop in dim) for dim in ranges]
    splits = tuple(Split(dim=dim, axis="server", parts=(part,)) for dim, part in enumerate(inside))
    layout = Layout(global_shape=tuple(shape), splits=splits)
    return Part(
        kind=kind,
        entry=Entry(name=stored, dtype=values.dtype, shape=tuple(shape)),
        tensor=values,
        span=(0, values.numel()),
        runs=tuple(layout.runs({"server": 1}, {"server": 0})) if values.numel() else (),
    )
