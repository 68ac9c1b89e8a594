"""The buffers in which parameters and gradients will lie under a plan: their sizes, as `sync/make.py` makes them.

Number formats are those of `parallel/zero/grouping.py`, the comings and goings of gradients those of
`sync/zero_gradients.py` and `sync/zero.py`; a test holds the two accounts against each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from weft.plan.partition.wire import Member, shard_buckets
from weft.plan.partition.zero import Flat, pick
from weft.plan.plan import Plan
from weft.profiles.model import ModelProfile, ParameterProfile

_MOST_IN_FLIGHT = 2
_Buffer = tuple[int, int]
_STAGES = ("nothing", "optimizer", "gradients", "parameters")
_KINDS = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """What a plan says of parameters and gradients."""

    stage: int
    """Of ZeRO: 0 to 3."""
    in_flats: bool
    """Parameters move into flat buffers; otherwise they stay the model's own tensors."""
    num_parts: int
    """Ranks that share one copy of the state."""
    num_replicas: int
    """Ranks that keep the same part."""
    stays_whole: bool
    """ZeRO-3: parameters and gradients are whole from a step's first microbatch to its last."""
    keeps_gradients: bool
    """The memory of whole gradients is kept from step to step."""
    num_rounds: int
    """Microbatches of a step that gradients leave after, as far as a second one needs other buffers than the first."""
    most_in_flight: int
    """Reductions under way at once."""
    on_host: bool
    """The ranks compute on CPUs."""
    shares_memory: bool
    """Ranks that share one copy of the state see each other's memory: what a reduction receives needs none, and there
    is one copy of whole parameters among them."""
    offloads: bool
    """Masters and moments are in host memory, and parameters are not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterFlat:
    """Parameters that lie together; all of one dtype, all trainable or all frozen."""

    numel: int
    """Elements, padding included."""
    part_numel: int
    """Elements that one rank's optimizer updates."""
    largest_numel: int
    """Elements of the largest tensor among those."""
    item_bytes: int
    """Bytes an element as the model computes with it; the following, the same for..."""
    master_bytes: int
    """what the optimizer updates: another tensor where this differs,"""
    accumulate_bytes: int
    """gradients as they add up over microbatches,"""
    reduce_bytes: int
    """gradients as they travel."""
    trainable: bool
    block: int | None
    """The block that they are the unit of, under ZeRO-3; else None."""


def find_sharding(plan: Plan, profile: ModelProfile, *, one_host: bool) -> Sharding:
    stage, data, precision = _STAGES.index(plan.data.shard), plan.axes.data, plan.precision
    is_half = any(parameter.kind in _KINDS.values() for parameter in profile.parameters if parameter.trainable)
    on_host = profile.device == "cpu"
    offloads = plan.data.offload and not on_host
    num_parts = data if stage else 1
    # A backward pass that waits for other ranks must not wait for reductions of its own.
    waits_in_backward = plan.data.buffers == "synchronise" and profile.batch_norms
    stays_whole = stage == 3 and plan.data.reshard == "step" and plan.step.microbatches > 1
    keeps_gradients = stage < 2 or num_parts == 1
    return Sharding(
        stage=stage,
        in_flats=stage > 0
        or precision.compute != "model"
        or (precision.reduce, precision.accumulate) != ("fp32", "fp32")
        or offloads
        or (is_half and (data * plan.axes.replicate > 1 or plan.step.microbatches > 1)),
        num_parts=num_parts,
        num_replicas=plan.axes.replicate if stage else data * plan.axes.replicate,
        stays_whole=stays_whole,
        keeps_gradients=keeps_gradients,
        num_rounds=1 if keeps_gradients or stays_whole else min(plan.step.microbatches, 2),
        most_in_flight=len(profile.parameters) if waits_in_backward else _MOST_IN_FLIGHT,
        on_host=on_host,
        shares_memory=on_host and one_host and plan.comm.transport != "c10d",
        offloads=offloads,
    )


def lay_out(plan: Plan, profile: ModelProfile, sharding: Sharding) -> list[ParameterFlat]:
    """All buffers in the order of use: the root and then the blocks, or buckets from the first parameters on."""
    if sharding.stage == 3:
        units = [profile.unit(block) for block in (None, *range(len(profile.blocks)))]
        return [_flat(plan, sharding, together) for unit in units for together in _by_kind(plan, unit)]
    if not sharding.in_flats:
        return [_own_tensor(plan, parameter) for parameter in profile.parameters]
    frozen = [_own_tensor(plan, parameter) for parameter in profile.parameters if not parameter.trainable]
    trainable = [parameter for parameter in profile.parameters if parameter.trainable]
    members = [
        Member(numel=parameter.numel, item_bytes=_item_bytes(plan, parameter), kind=_kind(plan, parameter))
        for parameter in trainable
    ]
    buckets = reversed(shard_buckets(members, plan.comm.bucket_bytes))
    return frozen + [_flat(plan, sharding, [trainable[index] for index in bucket]) for bucket in buckets]


def _by_kind(plan: Plan, unit: Sequence[ParameterProfile]) -> list[list[ParameterProfile]]:
    together: dict[tuple[str, bool], list[ParameterProfile]] = {}
    for parameter in unit:
        together.setdefault((_kind(plan, parameter), parameter.trainable), []).append(parameter)
    return list(together.values())


def _flat(plan: Plan, sharding: Sharding, parameters: Sequence[ParameterProfile]) -> ParameterFlat:
    flat = Flat(numels=tuple(parameter.numel for parameter in parameters), num_parts=sharding.num_parts)
    first, largest = parameters[0], max(flat.numels)
    item_bytes = _item_bytes(plan, first)
    return ParameterFlat(
        numel=flat.numel,
        part_numel=flat.part_numel,
        largest_numel=min(largest, flat.part_numel),
        item_bytes=item_bytes,
        master_bytes=max(first.item_bytes, 4) if _is_cast(plan, first) and first.trainable else item_bytes,
        accumulate_bytes=_at_least(plan.precision.accumulate, item_bytes),
        reduce_bytes=_at_least(plan.precision.reduce, item_bytes),
        trainable=first.trainable,
        block=first.block if sharding.stage == 3 else None,
    )


def _own_tensor(plan: Plan, parameter: ParameterProfile) -> ParameterFlat:
    item_bytes = _item_bytes(plan, parameter)
    return ParameterFlat(
        numel=parameter.numel,
        part_numel=parameter.numel,
        largest_numel=parameter.numel,
        item_bytes=item_bytes,
        master_bytes=item_bytes,
        accumulate_bytes=item_bytes,
        reduce_bytes=item_bytes,
        trainable=parameter.trainable,
        block=None,
    )


def _is_cast(plan: Plan, parameter: ParameterProfile) -> bool:
    return plan.precision.compute != "model" and not parameter.keeps_dtype


def _item_bytes(plan: Plan, parameter: ParameterProfile) -> int:
    return 2 if _is_cast(plan, parameter) else parameter.item_bytes


def _kind(plan: Plan, parameter: ParameterProfile) -> str:
    """What must be equal in one buffer: the dtype in the model, and that of the master where there is one."""
    if _is_cast(plan, parameter):
        return f"{_KINDS[plan.precision.compute]} of {max(parameter.item_bytes, 4)}"
    return parameter.kind


def _at_least(planned: str, item_bytes: int) -> int:
    """ "fp32" never narrows a wider parameter's gradient; a 16-bit format does what it says."""
    return max(item_bytes, 4) if planned == "fp32" else 2


def travelling_bytes(sharding: Sharding, flats: Sequence[ParameterFlat]) -> int:
    """Bytes of the buffers in which gradients travel. They come from a pool, which keeps them for the next step."""
    if not sharding.in_flats:
        return 0
    trainable = [flat for flat in reversed(flats) if flat.trainable]
    narrowed = 0
    if sharding.num_replicas > 1:
        differing = (flat for flat in trainable if flat.reduce_bytes != flat.accumulate_bytes)
        narrowed = sum(flat.part_numel * flat.reduce_bytes for flat in differing)
    return narrowed + _pool_bytes(sharding, trainable)


def _pool_bytes(sharding: Sharding, flats: Sequence[ParameterFlat]) -> int:
    """What the pool holds after a step in which gradients of these flats left in this order."""
    if sharding.num_parts == 1:
        return 0
    pool, in_flight = _Pool(), deque[list[_Buffer]]()
    for number in range(2 * sharding.num_rounds):  # two steps: the second finds what the first has made
        if number == sharding.num_rounds:
            while in_flight:
                pool.take_back(in_flight.popleft())
        # Gradients of the root (stage 3) come from the start of the backward pass to its end.
        early = {
            turn: pool.borrow(flat.numel, _whole_bytes(sharding, flat))
            for turn, flat in enumerate(flats)
            if sharding.stays_whole or (sharding.stage == 3 and flat.block is None)
        }
        for turn, flat in enumerate(flats):
            borrowed = [early[turn]] if turn in early else []
            if not sharding.keeps_gradients and turn not in early:
                borrowed.append(pool.borrow(flat.numel, _whole_bytes(sharding, flat)))
            if len(in_flight) == sharding.most_in_flight:
                pool.take_back(in_flight.popleft())
            if flat.reduce_bytes != _whole_bytes(sharding, flat):
                borrowed.append(pool.borrow(flat.numel, flat.reduce_bytes))
            if sharding.on_host and not sharding.shares_memory:
                borrowed.append(pool.borrow(flat.numel, flat.reduce_bytes))
            in_flight.append(borrowed)
    return pool.num_bytes


def _whole_bytes(sharding: Sharding, flat: ParameterFlat) -> int:
    """Bytes an element of whole gradients, which need not add up where they leave after every microbatch."""
    adds_up = sharding.keeps_gradients or sharding.stays_whole
    return flat.accumulate_bytes if adds_up else flat.reduce_bytes


class _Pool:
    """Buffers, each of a number of elements and bytes an element, that are borrowed and handed back."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._free: list[_Buffer] = []

    def borrow(self, numel: int, item_bytes: int) -> _Buffer:
        fitting = [buffer for buffer in self._free if buffer[1] == item_bytes]
        place = pick([free for free, _ in fitting], numel)
        if place is not None:
            found = fitting[place]
            self._free.remove(found)
            if found[0] >= numel:
                return found
            self.num_bytes -= found[0] * item_bytes
        self.num_bytes += numel * item_bytes
        return numel, item_bytes

    def take_back(self, buffers: Sequence[_Buffer]) -> None:
        self._free.extend(buffers)
