"""What workers and servers must agree on before anything is exchanged: the job, the model and how it is served.

The first rank that says hello decides; every other one, and every rank that comes later, must say the same, and is
refused with the first difference by name. So a join to another job, or with another model, plan or version of weft,
ends before a weight was read.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from weft.errors import LaunchError, PlanError
from weft.plan.partition.flat_buffers import item_bytes
from weft.plan.partition.server_shards import ServedTensor
from weft.plan.plan import Codec, updates_together
from weft.server.protocol.message import Kind, Malformed, Message, pack_object, read_object
from weft.server.protocol.optimizer_spec import Spec

MASTER = "master"
PULLS = (MASTER, "bfloat16", "float16")
DTYPES = ("float32", "float64", "bfloat16", "float16")
MOST_RANKS = 65536
MOST_SERVERS = 1024
MOST_PARTS = 1 << 20
"""Parts of tensors on all servers: what a hello claims takes no more memory than this many records."""
MOST_ELEMENTS = 1 << 50
_MASTER_BYTES, _FIXED_BYTES = (2, 4, 8), (1, 2, 4, 8, 16)
"""Of an element of what is trained, and of anything else: integers, truth values, complex numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What all ranks of a run with servers say alike."""

    job: str
    """Any text that no other job has."""
    weft: str
    mode: str
    num_servers: int
    num_workers: int
    """Workers with which the run begins."""
    num_ranks: int
    """Ranks of a worker."""
    staleness: int
    backups: int
    compensation: float
    lr_scaling: str
    clip_norm: float
    bucket_bytes: int
    pull: str
    """Format in which weights are sent: that of the master weights, or 16 bits."""
    codec: dict[str, Any]
    """The fields of the plan's section, where gradients travel compressed; else empty."""
    tensors: tuple[ServedTensor, ...]
    dtypes: tuple[str, ...]
    """Of the master weights, by tensor."""
    optimizer: Spec
    splits: bool
    """Tensors are cut over servers."""
    fixed: tuple[ServedTensor, ...] = ()
    """What is not trained: frozen parameters and buffers, which all workers begin with."""
    fixed_dtypes: tuple[str, ...] = ()
    """Of these, by tensor."""
    places: dict[str, Any] = field(default_factory=dict)
    """Of each that a checkpoint has, by name: where it lies in which whole tensor (`sync/served_tensors.py`). Servers
    keep it with their snapshots, and do not look at it."""

    @property
    def is_sync(self) -> bool:
        """Updates are made of all workers' gradients."""
        return updates_together(self.mode, self.staleness)

    @property
    def compression(self) -> Codec:
        """The plan's section."""
        return Codec(**self.codec)

    @property
    def digest(self) -> int:
        """A number that messages of this job carry."""
        return int.from_bytes(hashlib.sha256(json.dumps(self.as_object()).encode()).digest()[:8], "little")

    def as_object(self) -> dict[str, Any]:
        """Plain values, for HELLO."""
        rows = {name: [list(asdict(one).values()) for one in getattr(self, name)] for name in ("tensors", "fixed")}
        return {**asdict(self), **rows}


_FIELDS: dict[str, type | tuple[type, ...]] = {
    "job": str, "weft": str, "mode": str, "num_servers": int, "num_workers": int, "num_ranks": int, "staleness": int,
    "backups": int, "compensation": (int, float), "lr_scaling": str, "clip_norm": (int, float), "bucket_bytes": int,
    "pull": str, "codec": dict, "tensors": list, "dtypes": list, "optimizer": dict, "splits": bool,
    "fixed": list, "fixed_dtypes": list, "places": dict,
}  # fmt: skip
_COUNTS = ("num_servers", "num_workers", "num_ranks", "bucket_bytes")


def read_settings(message: Message) -> Settings:
    """The settings of a HELLO; raises Malformed."""
    found = read_object(message, _FIELDS)
    values = {name: found[name] for name in _FIELDS}
    for name in _COUNTS:
        if not 1 <= values[name] <= (1 << 40):
            raise Malformed(f"{name} is {values[name]}")
    if values["num_ranks"] > MOST_RANKS or values["num_workers"] > MOST_RANKS or values["num_servers"] > MOST_SERVERS:
        raise Malformed("more ranks than there can be")
    if message.place >= values["num_ranks"]:
        raise Malformed(f"rank {message.place} of a worker of {values['num_ranks']}")
    if values["mode"] not in ("sync", "async", "bounded") or values["staleness"] < 0 or values["backups"] < 0:
        raise Malformed("no such mode")
    if values["pull"] not in PULLS:
        raise Malformed("no such format of weights")
    tensors = tuple(_tensor(one, values["num_ranks"], _MASTER_BYTES) for one in values["tensors"])
    fixed = tuple(_tensor(one, values["num_ranks"], _FIXED_BYTES) for one in values["fixed"])
    together = (*tensors, *fixed)
    if len({one.name for one in together}) != len(together):
        raise Malformed("two tensors have one name")
    pieces = sum(one.num_bytes // max(values["bucket_bytes"], one.row_numel * one.item_bytes) for one in together)
    if pieces + len(together) * values["num_servers"] > MOST_PARTS:
        raise Malformed("more parts than there can be")
    if len(values["dtypes"]) != len(tensors) or not all(one in DTYPES for one in values["dtypes"]):
        raise Malformed("dtypes do not fit the tensors")
    for dtype, one in zip(values["dtypes"], tensors, strict=True):
        if item_bytes(dtype) != one.item_bytes:
            raise Malformed(f"tensor {one.name!r} has elements of {one.item_bytes} bytes and is {dtype}")
    fixed_dtypes = values["fixed_dtypes"]
    if len(fixed_dtypes) != len(fixed) or not all(isinstance(one, str) and len(one) < 32 for one in fixed_dtypes):
        raise Malformed("dtypes do not fit what is not trained")
    if any(one.is_coded or one.row_numel > 1 for one in fixed):
        raise Malformed("what is not trained is not compressed")
    if not set(values["places"]) <= {one.name for one in together} or not all(
        map(_is_place, values["places"].values())
    ):
        raise Malformed("places of other tensors, or none")
    for name in ("compensation", "clip_norm"):
        if not 0 <= values[name] < math.inf:
            raise Malformed(f"{name} is {values[name]}")
    _require_optimizer(values["optimizer"], {one.name for one in tensors})
    _require_codec(values["codec"], tensors)
    dtypes = {"dtypes": tuple(values["dtypes"]), "fixed_dtypes": tuple(fixed_dtypes)}
    return Settings(**{**values, **dtypes, "tensors": tensors, "fixed": fixed})


def settings_of_object(said: dict[str, Any]) -> Settings:
    """What `as_object` gave; raises Malformed."""
    return read_settings(Message(kind=Kind.HELLO, frames=(pack_object(said),)))


def require_readable(settings: Settings) -> None:
    """Raise LaunchError for what servers do not take: whoever said it would wait for an answer, and not know why none
    comes."""
    try:
        settings_of_object(settings.as_object())
    except Malformed as problem:
        num_tensors = len(settings.tensors) + len(settings.fixed)
        raise LaunchError(
            f"servers cannot read what a worker says of this model, of {num_tensors} tensors on {settings.num_servers} "
            f"servers: {problem}; use fewer [server] shards, fewer ranks in a worker, or a model of fewer tensors"
        ) from None


def _is_place(found: Any) -> bool:
    kinds = (str, list, list)
    return isinstance(found, list) and len(found) == len(kinds) and all(map(isinstance, found, kinds))


def _require_codec(found: dict[str, Any], tensors: Sequence[ServedTensor]) -> None:
    if found:
        if set(found) != {field.name for field in dataclasses.fields(Codec)}:
            raise Malformed("a codec with other fields")
        try:
            codec = Codec(**found)
        except PlanError as problem:
            raise Malformed(str(problem)) from None
    is_coding = bool(found) and codec.name != "none"
    for one in tensors:
        if one.is_coded and not (is_coding and (one.item_bytes > 2 or codec.name == "half")):
            raise Malformed(f"tensor {one.name!r}, of {one.item_bytes} bytes per element, cannot be compressed")


def _require_optimizer(spec: Any, names: set[str]) -> None:
    groups = spec.get("groups")
    if not isinstance(spec.get("class"), str) or not isinstance(groups, list) or not groups:
        raise Malformed("no optimizer")
    for group in groups:
        if not isinstance(group, dict) or set(group) != {"settings", "tensors"}:
            raise Malformed("a parameter group that is none")
        if not isinstance(group["settings"], dict) or not isinstance(group["tensors"], list):
            raise Malformed("a parameter group without settings or tensors")
        if "params" in group["settings"] or not isinstance(group["settings"].get("lr"), int | float):
            raise Malformed("a parameter group without a rate")
        for name in group["tensors"]:
            if not isinstance(name, str) or name not in names:
                raise Malformed("a parameter group with another model's tensor")
            names.discard(name)


def _tensor(value: Any, num_ranks: int, sizes: Sequence[int]) -> ServedTensor:
    if not isinstance(value, list) or len(value) != 6 or not isinstance(value[0], str):
        raise Malformed("a tensor that is none")
    name, numel, item_bytes, row_numel, holders, is_coded = value
    if not all(isinstance(one, int) and not isinstance(one, bool) for one in (numel, item_bytes, row_numel)):
        raise Malformed(f"tensor {name!r} has no size")
    if not 0 <= numel <= MOST_ELEMENTS or item_bytes not in sizes or not 1 <= row_numel <= max(numel, 1):
        raise Malformed(f"tensor {name!r} has {numel} elements of {item_bytes} bytes in rows of {row_numel}")
    is_list = isinstance(holders, list) and all(isinstance(one, int) and 0 <= one < num_ranks for one in holders)
    if not is_list or not holders or len(set(holders)) != len(holders):
        raise Malformed(f"tensor {name!r} has no holders")
    if not isinstance(is_coded, bool):
        raise Malformed(f"tensor {name!r} is compressed or not")
    return ServedTensor(
        name=name,
        numel=numel,
        item_bytes=item_bytes,
        row_numel=row_numel,
        holders=tuple(holders),
        is_coded=is_coded,
    )


def difference(ours: Settings, theirs: Settings) -> str | None:
    """Why a rank with other settings cannot take part, in words; None if they are the same."""
    if ours.job != theirs.job:
        return f'this server is of job "{ours.job}", not of "{theirs.job}"; give the address and key of your own job'
    if ours.weft != theirs.weft:
        return f"this server runs weft {ours.weft}, you run {theirs.weft}; install the same version everywhere"
    of_both = (ours.tensors, theirs.tensors, ours.dtypes, theirs.dtypes, "a trained parameter")
    fixed = (ours.fixed, theirs.fixed, ours.fixed_dtypes, theirs.fixed_dtypes, "a frozen parameter or buffer")
    if (one := _tensor_difference(*of_both) or _tensor_difference(*fixed)) is not None:
        return one
    a, b = ours.as_object(), theirs.as_object()
    for name in a:
        if name == "codec":
            for field in sorted({*ours.codec, *theirs.codec}):
                if ours.codec.get(field) != theirs.codec.get(field):
                    return _other(f"[codec] {field}", ours.codec.get(field), theirs.codec.get(field))
        elif name == "places" and a[name] != b[name]:
            other = next(one for one in {**a[name], **b[name]} if a[name].get(one) != b[name].get(one))
            shapes = [str(of.get(other, ["", None])[1]) for of in (b[name], a[name])]
            return (
                f'the model is another one: "{other}" has shape {shapes[0]} here and {shapes[1]} in the run that is to '
                "be joined (None: it is in no checkpoint)"
            )
        elif name == "optimizer" and a[name] != b[name]:
            return _optimizer_difference(ours.optimizer, theirs.optimizer)
        elif a[name] != b[name]:
            return _other(name, a[name], b[name])
    return None


def _optimizer_difference(ours: Spec, theirs: Spec) -> str:
    if ours["class"] != theirs["class"]:
        return _other("the optimizer", ours["class"], theirs["class"])
    for number, (one, other) in enumerate(zip(ours["groups"], theirs["groups"], strict=False)):
        for name in sorted({*one["settings"], *other["settings"]}):
            if (found := one["settings"].get(name)) != (value := other["settings"].get(name)):
                return _other(f"the optimizer's {name} (parameter group {number})", found, value)
    return "the optimizer's parameter groups hold other parameters here than in the run that is to be joined"


def _other(name: str, ours: object, theirs: object) -> str:
    return f"{name} is {theirs!r} here and {ours!r} in the run that is to be joined; start with the same plan and job"


def _tensor_difference(
    ours: Sequence[ServedTensor],
    theirs: Sequence[ServedTensor],
    our_dtypes: Sequence[str],
    their_dtypes: Sequence[str],
    what: str,
) -> str | None:
    known = {one.name: (one, dtype) for one, dtype in zip(ours, our_dtypes, strict=True)}
    for one, dtype in zip(theirs, their_dtypes, strict=True):
        if one.name not in known:
            return f'the model is another one: "{one.name}" is not {what} in the run that is to be joined'
        other, other_dtype = known[one.name]
        if (one.numel, dtype) != (other.numel, other_dtype):
            return (
                f'the model is another one: "{one.name}" has {one.numel} elements of {dtype} here and {other.numel} of '
                f"{other_dtype} in the run that is to be joined"
            )
    if len(ours) != len(theirs):
        missing = next(one.name for one in ours if one.name not in {other.name for other in theirs})
        return f'the model is another one: "{missing}" is {what} in the run that is to be joined, and not here'
    return None
