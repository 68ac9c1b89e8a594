"""Every exchange, on a chosen transport, with tensors in chosen places, and its expected result.

Results through shared memory are known to the bit: terms are added in the order of ranks, 16-bit numbers in
float32 and rounded once. Over gloo they are the same to rounding, and the same from run to run.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from weft.comm import collectives
from weft.comm.exchange_buffers import BufferAllocator
from weft.comm.group import Group
from weft.comm.p2p import receive, send
from weft.comm.shared_memory.connect import WAYS, Connection
from weft.comm.shared_memory.segments import Way
from weft.mesh import Mesh, make_mesh
from weft.plan.partition.groups import GroupKey
from weft.plan.plan import Axes, Comm, Plan
from weft.world import World, join_world

HALVES = (torch.bfloat16, torch.float16)
GLOO_DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int8, torch.uint8,
)  # fmt: skip
"""Dtypes that gloo can sum too."""
DTYPES = (*GLOO_DTYPES, torch.int16, torch.complex64)
PLACES = ("slots", "arena", "mixed")
"""Places of a rank's tensors: ordinary memory, an arena, or mixed over the ranks."""
_ROOM_BYTES = 2**28


@functools.cache
def world() -> World:
    return join_world("cpu")


def new_mesh(transport: str, *keys: GroupKey) -> Mesh:
    plan = Plan(axes=Axes(data=world().size), comm=Comm(transport=transport))  # type: ignore[arg-type]
    return make_mesh(plan, world(), groups=keys)


def new_group(transport: str, purpose: str, *, ways: Sequence[Way] = WAYS) -> Group:
    """All ranks of the pool; collective."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("weft.comm.process_groups.Connection", functools.partial(Connection, ways=tuple(ways)))
        group = new_mesh(transport, ("data", purpose)).group("data", purpose)
    assert (group.shared is not None) == (transport == "shared")
    return group


@functools.cache
def kept_group(transport: str, ways: Sequence[Way] = WAYS) -> tuple[Group, BufferAllocator]:
    """A group and buffers for its tensors, made once per rank."""
    group = new_group(transport, "exchanges", ways=ways)
    return group, BufferAllocator(group, torch.device("cpu"), num_bytes=_ROOM_BYTES)


def values(rank: int, numel: int, dtype: torch.dtype, salt: int = 0) -> Tensor:
    """Values that differ per rank and vary widely in size, so that every order of additions rounds differently."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    if not dtype.is_floating_point and not dtype.is_complex:
        return torch.randint(-40 if dtype.is_signed else 0, 40, (numel,), generator=generator).to(dtype)
    spread = 10.0 ** torch.randint(-3, 4, (numel,), generator=generator)
    return (torch.randn(numel, generator=generator, dtype=torch.float64) * spread).to(dtype)


def true_sum(terms: Sequence[Tensor], wide: torch.dtype | None = None) -> Tensor:
    """Sum in the order of ranks, 16-bit numbers in float32, rounded once, to `wide` or to their own dtype."""
    own = terms[0].dtype
    finest = torch.promote_types(own, wide or own)
    total = terms[0].to(torch.float32 if finest in HALVES else finest)
    for term in terms[1:]:
        total = total + term
    return total.to(wide or own)


def placed(tensor: Tensor, group: Group, room: BufferAllocator, place: str, offset: int) -> Tensor:
    """A copy in a place, `offset` elements after the beginning of some memory."""
    in_arena = place == "arena" or (place == "mixed" and group.index % 2 == 1)
    numel = tensor.numel() + offset
    memory = room.empty(numel, tensor.dtype) if in_arena else torch.empty(numel, dtype=tensor.dtype)
    assert not in_arena or group.shared is None or group.shared.barrier._find(memory) is not None, "no room"
    return memory[offset:].copy_(tensor)


def results_of(
    transport: tuple[Group, BufferAllocator],
    numel: int,
    dtype: torch.dtype,
    *,
    place: str = "slots",
    offset: int = 0,
    wait: bool,
) -> dict[str, Tensor]:
    """The result of every exchange of tensors of this size on this rank, by name."""
    group, room = transport
    size, me, root = group.size, group.index, (numel + 1) % group.size
    mine = values(me, numel, dtype)
    long = values(me, numel * size, dtype, salt=1)
    found: dict[str, Tensor] = {}
    pending = []

    def put(tensor: Tensor) -> Tensor:
        return placed(tensor, group, room, place, offset)

    for op in ("sum", "max", "min") if not dtype.is_complex else ("sum",):
        found[op] = put(mine)
        pending.append(collectives.all_reduce(found[op], group, op=op, wait=wait))  # type: ignore[arg-type]
    found["broadcast"] = put(mine)
    pending.append(collectives.broadcast(found["broadcast"], group, root=root, wait=wait))
    found["all-gather"], found["in place"] = torch.empty(numel * size, dtype=dtype), put(torch.zeros_like(long))
    part = found["in place"].view(size, -1)[me].copy_(mine)
    pending.append(collectives.all_gather(found["all-gather"], put(mine), group, wait=wait))
    pending.append(collectives.all_gather(found["in place"], part, group, wait=wait))
    for name, add, wide in (("scattered", False, dtype), ("added", True, dtype), ("widened", True, _wider(dtype))):
        found[name] = torch.ones(numel, dtype=wide)
        pending.append(collectives.reduce_scatter(found[name], put(long), group, add=add, wait=wait))
    found["all-to-all"] = torch.empty(numel * size, dtype=dtype)
    pending.append(collectives.all_to_all(found["all-to-all"], put(long), group, wait=wait))
    found["message"] = put(torch.zeros_like(mine))
    pending += [send(put(mine), group, to=(me + 1) % size), receive(found["message"], group, source=(me - 1) % size)]
    for exchange in pending:
        exchange.wait()
    return found


def truths_of(size: int, me: int, numel: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Expected results, computed locally."""
    root = (numel + 1) % size
    table = [values(rank, numel, dtype) for rank in range(size)]
    longs = [values(rank, numel * size, dtype, salt=1) for rank in range(size)]
    own_parts = [long.view(size, -1)[me] for long in longs]
    true = {"sum": true_sum(table), "broadcast": table[root], "all-gather": torch.cat(table)}
    if not dtype.is_complex:
        true |= {"max": torch.stack(table).amax(0), "min": torch.stack(table).amin(0)}
    finest = torch.float32 if dtype in HALVES else dtype
    true |= {
        "in place": torch.cat(table),
        "scattered": true_sum(own_parts),
        "added": (torch.ones(numel, dtype=dtype) + true_sum(own_parts, finest)).to(dtype),
        "widened": torch.ones(numel, dtype=_wider(dtype)) + true_sum(own_parts, _wider(dtype)),
        "all-to-all": torch.cat(own_parts),
        "message": table[(me - 1) % size],
    }
    return true


def _wider(dtype: torch.dtype) -> torch.dtype:
    return {**dict.fromkeys(HALVES, torch.float32), torch.float32: torch.float64}.get(dtype, dtype)


def assert_same_bits(found: dict[str, Tensor], true: dict[str, Tensor]) -> None:
    assert found.keys() == true.keys()
    for name, tensor in true.items():
        assert found[name].dtype == tensor.dtype, name
        same = torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8))
        assert same, f"{name} of {tensor.dtype}: {int((found[name] != tensor).sum())} of {tensor.numel()} differ"


def assert_same_to_rounding(found: dict[str, Tensor], true: dict[str, Tensor], size: int) -> None:
    assert found.keys() == true.keys()
    for name, tensor in true.items():
        if not tensor.is_floating_point():
            assert torch.equal(found[name], tensor), name
            continue
        # A sum of n terms of at most this size is rounded at most n times, in the coarser of two dtypes.
        largest = max(4000.0 * size, 1.0)
        coarsest = max(torch.finfo(found[name].dtype).eps, torch.finfo(true["sum"].dtype).eps)
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=largest * size * coarsest, msg=name)
