"""The optimizer's state of some parts of tensors, as frames of a message: names and formats in JSON, then raw bytes.

The state of a part is tensors of its length, or single elements (a number of steps), by name.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from weft.server.protocol.frames import frame_of, tensor_of
from weft.server.protocol.message import Buffer, Malformed, Message, pack_object, read_object
from weft.server.protocol.settings import DTYPES

PartState = dict[str, Any]
"""Flat tensors, tensors of no dims, or plain numbers."""
_ITEM_BYTES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}


def pack_states(states: Sequence[PartState]) -> list[Buffer]:
    """The frames of the states of some parts, in their order."""
    rows: list[list[Any]] = []
    frames: list[Buffer] = []
    for place, state in enumerate(states):
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                flat = value.detach().cpu().contiguous().view(-1)
                rows.append([place, name, str(flat.dtype).removeprefix("torch."), flat.numel(), value.dim() == 0])
                frames.append(frame_of(flat))
            elif value is not None:
                rows.append([place, name, "number", value, True])
    return [pack_object({"states": rows}), *frames]


def read_states(message: Message, numels: Sequence[int], *, skip: int = 0) -> list[PartState]:
    """The states of parts of these lengths, in memory of their own; raises Malformed. `skip`: frames before theirs."""
    frames = message.frames[skip:]
    rows = read_object(replace(message, frames=frames[:1]), {"states": list})["states"]
    found: list[PartState] = [{} for _ in numels]
    left = list(frames[1:])
    for row in rows:
        place, name, dtype, size, is_single = _row(row, len(numels))
        if dtype == "number":
            found[place][name] = size
            continue
        expected = 1 if is_single else numels[place]
        if dtype not in DTYPES or size != expected or not left or len(left[0]) != size * _ITEM_BYTES[dtype]:
            raise Malformed(f"state {name[:40]!r} of {size} elements of {dtype}")
        values = tensor_of(left.pop(0), dtype).clone()
        found[place][name] = values[0].clone() if is_single else values
    if left:
        raise Malformed(f"{len(left)} frames that no state has")
    return found


def _row(row: Any, num_parts: int) -> tuple[int, str, str, Any, bool]:
    if not isinstance(row, list) or len(row) != 5:
        raise Malformed("a state that is none")
    place, name, dtype, size, is_single = row
    is_place = isinstance(place, int) and not isinstance(place, bool) and 0 <= place < num_parts
    is_size = isinstance(size, int | float) and not isinstance(size, bool)
    if not (is_place and is_size and isinstance(name, str) and isinstance(dtype, str) and isinstance(is_single, bool)):
        raise Malformed(f"a state with {json.dumps(row)[:80]}")
    return place, name, dtype, size, is_single
