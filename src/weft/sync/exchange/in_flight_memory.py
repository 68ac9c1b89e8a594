"""Whether exchanges under way fit into memory, asked before the first step: they are allocated while training runs.

`[data] delay = "auto"` asks again before every decision.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.comm.group import Group
from weft.comm.objects import gather_values
from weft.errors import PlanError
from weft.host_memory import available_bytes, read_proc
from weft.plan.exchange.codec_memory import kept_bytes
from weft.plan.exchange.gradient_exchange import CodecGroups, CodedValues
from weft.plan.exchange.weight_exchange import ExchangeBucket, in_flight_bytes
from weft.plan.late_merges import FIRST_DELAY, max_in_flight, uses_delayed_averaging
from weft.plan.plan import Plan, said
from weft.units import format_bytes

USABLE = 0.8
"""Share of the free memory that exchanges under way may take; activations need some, too."""


def free_bytes(device: torch.device, *, num_sharing: int, at_peak: bool = False) -> int:
    """The memory on the device that this rank may still take, of what so many ranks share; `at_peak`: also when a step
    needs the most, as far as steps have shown."""
    if device.type == "cuda":
        used = torch.cuda.max_memory_allocated(device) if at_peak else torch.cuda.memory_allocated(device)
        cached = max(torch.cuda.memory_reserved(device) - used, 0)
        return torch.cuda.mem_get_info(device)[0] // num_sharing + cached
    at_peak_bytes = _peak_bytes() if at_peak else 0
    return max(available_bytes() // num_sharing - at_peak_bytes, 0)


def _peak_bytes() -> int:
    """The memory that this process has had beyond what it has now; 0 where the kernel does not tell."""
    peak, now = (read_proc("/proc/self/status", key).split() for key in ("VmHWM", "VmRSS"))  # like "123 kB"
    return max(1024 * (int(peak[0]) - int(now[0])), 0) if peak and now else 0


def require_memory(
    buckets: Sequence[ExchangeBucket], plan: Plan, free: int, everyone: Group, *, can_move: bool
) -> None:
    """Refuse on all ranks a plan whose exchanges under way do not fit on one; collective. `can_move`: host memory could
    keep them instead."""
    mine = (_needed_bytes(buckets, plan), int(USABLE * free))
    found = gather_values(mine, everyone)
    worst = max(range(len(found)), key=lambda rank: found[rank][0] - found[rank][1])
    needed, usable = found[worst]
    if needed <= usable:
        return
    number = max_in_flight(plan.data)
    exchanges = f"{number} exchange{'s' if number > 1 else ''}"
    raise PlanError(
        f"{said(plan, 'data.delay')} keeps {exchanges} under way, {format_bytes(needed)} on rank {worst}, and there "
        f"are {format_bytes(usable)} for them, {USABLE:.0%} of what is free; "
        f"{_remedy(plan, int(number * usable / needed), can_move=can_move)}"
    )


def _needed_bytes(buckets: Sequence[ExchangeBucket], plan: Plan) -> int:
    """Bytes of all exchanges under way at once, with the state that a codec keeps for each of them."""
    kept = 0
    if plan.codec.name == "powersgd" and uses_delayed_averaging(plan):
        values = [CodedValues(tensors=one.coded, numel=one.numel, dtype=one.dtype) for one in buckets if one.coded]
        kept = kept_bytes(values, plan.codec, CodecGroups(num_across=plan.num_replicas), num_copies=1)
    return in_flight_bytes(buckets, plan) + max_in_flight(plan.data) * kept


def _remedy(plan: Plan, num_fitting: int, *, can_move: bool) -> str:
    """What would help, where so many exchanges fit."""
    data = plan.data
    ways = ["offload = true"] if can_move else []
    if data.sync == "delayed" and num_fitting:
        delay = FIRST_DELAY if data.delay == "auto" else int(data.delay)
        ways.insert(0, f"every to {-(-delay // num_fitting)} or more")
        if data.delay != "auto":
            ways.insert(0, f"delay to {num_fitting * data.every} or less")
    elif data.sync == "local" and data.fragments < data.every:
        ways.insert(0, "fragments higher")
    return f"set [data] {', or '.join(ways)}" if ways else "share the weights among more ranks ([data] shard)"


def further_delay_that_fits(buckets: Sequence[ExchangeBucket], plan: Plan, free: int) -> int:
    """The steps of delay whose exchanges fit into what is free."""
    of_one = _needed_bytes(buckets, plan) / max_in_flight(plan.data)
    return int(USABLE * free / max(of_one, 1.0)) * plan.data.every
