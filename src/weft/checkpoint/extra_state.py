"""State of the user's own in a checkpoint: `trainer.extra_state`, a dict of objects and plain values.

    trainer.extra_state["curriculum"] = curriculum      has state_dict() and load_state_dict(): both are called
    trainer.extra_state["best_loss"] = 0.71             a plain value: replaced by load()

Every rank registers the same names and holds the same state: rank 0's is saved, and every rank loads it, under any
plan; `state_dict()` is called on rank 0 alone, and must not wait for other ranks. Plain values are None, booleans,
numbers, texts, tensors, NumPy arrays, and lists, tuples and dicts of these. They are stored as JSON and safetensors,
never as pickles, which could run any code when they are read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from weft.checkpoint.files.safetensors import DTYPE_WORDS, TensorReader
from weft.comm.group import Group
from weft.comm.objects import gather_values
from weft.errors import CheckpointError

_PREFIX, _METADATA = "extra/", "extra_state"
_PLAIN = (bool, int, float, str, type(None))
_WAY_OUT = "register the same names before load(), or call load(directory, extra_state=False)"


def take_extra(registered: Mapping[str, Any], everyone: Group) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Rank 0's states, as tensors and metadata of its own file; nothing on other ranks. Collective."""
    names = [list(map(str, registered)), [str(name) for name in registered if not isinstance(name, str)]]
    seen = gather_values(names, everyone)
    problems = [f"trainer.extra_state: the name {name} is not a text; use texts" for name in seen[0][1]]
    problems += [
        f"trainer.extra_state has the names {_listed(theirs)} on rank {rank} and {_listed(seen[0][0])} on rank 0; "
        "register the same on all ranks"
        for rank, (theirs, _) in zip(everyone.ranks, seen, strict=True)
        if sorted(theirs) != sorted(seen[0][0])
    ]
    if problems:
        raise CheckpointError(problems)
    tensors: dict[str, torch.Tensor] = {}
    problems = []
    tree: dict[str, Any] = {}
    if everyone.index == 0:
        for name, value in registered.items():
            try:
                tree[name] = _encode(value.state_dict() if _has_state(value) else value, name, tensors)
            except _CannotSaveError as error:
                problems.append(str(error))
            except Exception as error:  # of the user's own code; the other ranks wait for this one
                problems.append(
                    f'trainer.extra_state: state_dict() of "{name}" raised {type(error).__name__} on rank 0: {error}'
                )
    problems = gather_values(problems, everyone)[0]
    if problems:
        raise CheckpointError(problems)
    named = {f"{_PREFIX}{name}": tensor for name, tensor in tensors.items()}
    return named, {_METADATA: json.dumps(tree)} if everyone.index == 0 else {}


def read_extra(directory: Path, file: str) -> dict[str, Any]:
    """The states in rank 0's file of a checkpoint, by name."""
    with TensorReader(directory, [file], torch.device("cpu")) as reader:
        tree = json.loads(reader.metadata[file].get(_METADATA, "{}"))
        return {name: _decode(value, reader) for name, value in tree.items()}


def refuse_other_names(registered: Mapping[str, Any], stored: Mapping[str, Any], directory: Path) -> None:
    """Refuse names that are registered and not in the checkpoint, or the reverse."""
    missing = [name for name in registered if name not in stored]
    unexpected = [name for name in stored if name not in registered]
    problems = []
    if missing:
        problems.append(f"{directory} holds no state for trainer.extra_state {_listed(missing)}; {_WAY_OUT}")
    if unexpected:
        problems.append(
            f"{directory} holds state that is not registered in trainer.extra_state: {_listed(unexpected)}; {_WAY_OUT}"
        )
    if problems:
        raise CheckpointError(problems)


def load_extra(registered: dict[str, Any], stored: Mapping[str, Any]) -> None:
    """Give every registered object its state, and replace plain values."""
    for name, value in stored.items():
        if _has_state(registered[name]):
            registered[name].load_state_dict(value)
        else:
            registered[name] = value


class _CannotSaveError(Exception):
    """A value that has no plain form."""


def _has_state(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _encode(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """A value as JSON, its tensors put into `tensors`. `name` says where it is."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, torch.Tensor | np.ndarray):
        tensor = torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value.detach()
        if tensor.dtype not in DTYPE_WORDS or tensor.is_sparse:
            raise _CannotSaveError(
                f"trainer.extra_state: {name} is a tensor of dtype {tensor.dtype}, which safetensors cannot hold"
            )
        while name in tensors:  # ["a.b"] and ["a"]["b"], or the keys 0 and "0"
            name += "'"
        tensors[name] = tensor.clone().contiguous()
        return {"array" if isinstance(value, np.ndarray) else "tensor": name}
    if isinstance(value, list | tuple):
        inside = [_encode(one, f"{name}.{number}", tensors) for number, one in enumerate(value)]
        return {"tuple": inside} if isinstance(value, tuple) else inside
    if isinstance(value, Mapping):
        if odd := [key for key in value if not isinstance(key, str | int) or isinstance(key, bool)]:
            raise _CannotSaveError(
                f"trainer.extra_state: {name} has a key of type {type(odd[0]).__name__}; use texts or whole numbers"
            )
        return {"dict": [[key, _encode(one, f"{name}.{key}", tensors)] for key, one in value.items()]}
    raise _CannotSaveError(
        f"trainer.extra_state: {name} is a {type(value).__name__}, which weft cannot save; give numbers, texts, "
        "tensors and lists, tuples or dicts of these, or an object with state_dict() and load_state_dict()"
    )


def _decode(value: Any, reader: TensorReader) -> Any:
    if isinstance(value, list):
        return [_decode(one, reader) for one in value]
    if not isinstance(value, dict):
        return value
    ((kind, inside),) = value.items()
    if kind == "tuple":
        return tuple(_decode(one, reader) for one in inside)
    if kind == "dict":
        return {key: _decode(one, reader) for key, one in inside}
    tensor = reader.read_whole(f"{_PREFIX}{inside}")
    return tensor.numpy() if kind == "array" else tensor


def _listed(names: list[str]) -> str:
    return ", ".join(f'"{name}"' for name in sorted(names)) or "none"
