"""Small plain values between ranks, for the control path. They travel as JSON, never as pickles, and hold no code."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from weft.comm.collectives import all_gather
from weft.comm.group import Group


def gather_values(value: Any, group: Group) -> list[Any]:
    """Every rank's value, in the order of the group, on every rank. Ranks of a fake world have this one's."""
    text = json.dumps(value)
    if group.handle is None:
        return [json.loads(text) for _ in group.ranks]
    message = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(group.device)
    lengths = torch.empty(group.size, dtype=torch.int64, device=group.device)
    all_gather(lengths, torch.tensor([message.numel()], device=group.device), group)
    longest = int(lengths.max())
    padded = torch.zeros(longest, dtype=torch.uint8, device=group.device)
    padded[: message.numel()] = message
    table = torch.empty(group.size * longest, dtype=torch.uint8, device=group.device)
    all_gather(table, padded, group)
    rows = table.view(group.size, longest).cpu()
    return [json.loads(row[:length].numpy().tobytes()) for row, length in zip(rows, lengths.tolist(), strict=True)]


def value_of_first(make: Callable[[], Any], group: Group) -> Any:
    """The value that the first rank of a group makes, on every rank. In a fake world every rank makes its own."""
    makes = group.index == 0 or group.handle is None
    return gather_values(make() if makes else None, group)[0]
