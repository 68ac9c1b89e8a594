"""The flat buffers that a plan implies: which parameters and which ranks share them, their formats, what they take.

This is the one account of them. The sync allocates these buffers (`sync/make.py`), the prediction of memory adds them
up (`planning/memory.py`), and so does a rank of a fake world (`training/meta_trainer.py`). Dtypes are names as torch
prints them ("bfloat16"), so that planning needs no torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from weft.plan.partition.replicas import one_replica, shares_batch, state_axes
from weft.plan.partition.wire import (
    CODEC_TAIL_WORDS,
    SHARDED_TAIL_ITEM_BYTES,
    SHARDED_TAIL_WORDS,
    Collective,
    Member,
    assign_buckets,
    sent_bytes,
)
from weft.plan.partition.zero import Flat
from weft.plan.plan import Plan

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""The dtypes of the plan's number formats."""

_PROMOTED = {"float64": "float64", "complex32": "complex64", "complex64": "complex64", "complex128": "complex128"}
"""The promotion of float32 and a dtype; float32 for dtypes that are not listed."""

MAX_IN_FLIGHT = 2
"""Reductions under way at once: enough to keep the wire busy, few enough to bound the memory of transient buffers."""

_STAGES = ("nothing", "optimizer", "gradients", "parameters")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSpec:
    """One parameter, as far as buffers depend on it; a tied one appears once, under its first name."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    """The model's own dtype."""
    block: int | None = None
    """Number of the block that alone uses it; None: it belongs to the root. Embeddings before the blocks may be a unit
    of their own, with the number -1, and linear layers after them, with the number of blocks (`is_outside_blocks`)."""
    is_outside_blocks: bool = False
    trainable: bool = True
    keeps_dtype: bool = False
    """Mixed precision leaves it as it is: a BatchNorm's, or not a floating-point number."""
    holders: str = ""
    """The ranks that hold it too, if its offset in common buffers would differ between them. Parameters with the same
    holders have buffers of their own, so that all holders keep the same part of each."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """The sharding of parameters and gradients under a plan."""

    stage: int
    """The stage of ZeRO, 0 to 3."""
    num_parts: int
    """Ranks that share one copy of the state."""
    num_replicas: int
    """Ranks that keep the same part."""
    stays_whole: bool
    """ZeRO-3: parameters and gradients are whole from a step's first microbatch to its last."""
    keeps_gradients: bool
    """The memory of whole gradients is kept from step to step."""
    every_microbatch: bool
    """Gradients are reduced after every microbatch, not after the last only."""

    @classmethod
    def of(cls, plan: Plan) -> Sharding:
        stage, axes = _STAGES.index(plan.data.shard), one_replica(plan)
        num_parts = axes.state if stage else 1
        stays_whole = stage == 3 and plan.data.reshard == "step" and plan.step.microbatches > 1
        # With one part the whole is the part: nothing is gained by giving it back.
        keeps_gradients = stage < 2 or num_parts == 1
        return cls(
            stage=stage,
            num_parts=num_parts,
            num_replicas=axes.replicate if stage else axes.state * axes.replicate,
            stays_whole=stays_whole,
            keeps_gradients=keeps_gradients,
            # Microbatches of a pipeline overlap: their gradients add up, and leave when the stage's are complete.
            every_microbatch=not keeps_gradients and not stays_whole and axes.pipeline == 1,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatBuffer:
    """Parameters that lie together: of one dtype, all trainable or all frozen."""

    flat: Flat
    """Each parameter's place in the buffer, and each rank's part of it."""
    names: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    """Each parameter's shape on this rank, before the buffer is cut into parts."""
    compute: str = "float32"
    """Dtype of the parameters as the model computes with them."""
    master: str = "float32"
    """Dtype of what the optimizer updates: another tensor where this differs."""
    accumulate: str = "float32"
    """Dtype in which gradients accumulate over microbatches."""
    reduce: str = "float32"
    """Dtype in which gradients are reduced over ranks."""
    trainable: bool = True
    block: int | None = None
    """The block that they are the unit of, under ZeRO-3; None for the root, and below ZeRO-3."""
    is_outside_blocks: bool = False
    """Its parameters are a unit of their own outside of blocks."""

    def whole_bytes(self, dtype: str) -> int:
        """Bytes of a buffer laid out like this one."""
        return self.flat.numel * item_bytes(dtype)

    def part_bytes(self, dtype: str) -> int:
        """Bytes of one rank's part of such a buffer."""
        return self.flat.part_numel * item_bytes(dtype)


def item_bytes(dtype: str) -> int:
    """Bytes per element; the number in a dtype's name is its bits."""
    bits = re.search(r"\d+", dtype)
    return 1 if bits is None else -(-int(bits[0]) // 8)


def compute_dtype(parameter: ParameterSpec, plan: Plan) -> str:
    """The dtype in which the model computes with a parameter."""
    return DTYPES[plan.precision.compute] if _is_cast(parameter, plan) else parameter.dtype


def offloads(plan: Plan, device: str) -> bool:
    """True if masters and moments are in host memory, and parameters are not."""
    return plan.data.offload and device != "cpu"


def needs_flats(plan: Plan, parameters: Iterable[ParameterSpec], *, device: str) -> bool:
    """True if parameters move into flat buffers, instead of staying the model's own tensors."""
    is_half = any(one.dtype in ("float16", "bfloat16") for one in parameters if one.trainable)
    is_summed = shares_batch(plan) or plan.step.microbatches > 1
    return (
        plan.data.shard != "nothing"
        or plan.precision.compute != "model"
        or (plan.precision.reduce, plan.precision.accumulate) != ("fp32", "fp32")
        or offloads(plan, device)
        or (is_half and is_summed)
    )


def flat_buffers(parameters: Sequence[ParameterSpec], plan: Plan) -> list[FlatBuffer]:
    """All flat buffers in the order of use: the root and then the blocks, or buckets from the first parameters on.

    ZeRO-3 has one unit per block, one for large embeddings before them and one for large linear layers after them, and
    the root for everything else: norms, tied weights, what blocks share. Stages of a pipeline are gathered as a whole,
    and a tensor axis may use layers in other ways, so there all that is outside blocks is in the root. Below ZeRO-3
    trainable parameters lie in buckets, frozen ones in no buffer. Parameters that differ in their formats or in their
    holders, and frozen and trainable ones, never share a buffer.
    """
    if plan.data.shard == "parameters":
        together: dict[tuple[object, ...], list[ParameterSpec]] = {}
        if plan.axes.pipeline * plan.axes.tensor > 1:
            parameters = [
                replace(one, block=None, is_outside_blocks=False) if one.is_outside_blocks else one
                for one in parameters
            ]
        for one in sorted(parameters, key=lambda one: -math.inf if one.block is None else one.block):
            together.setdefault((one.block, one.holders, *_formats(one, plan)), []).append(one)
        return [_buffer(inside, plan) for inside in together.values()]
    trainable: dict[str, list[ParameterSpec]] = {}
    for one in sorted(parameters, key=lambda one: one.holders, reverse=True):  # the first buffers' gradients leave last
        if one.trainable:
            trainable.setdefault(one.holders, []).append(one)
    return [buffer for same_holders in trainable.values() for buffer in _bucketed(same_holders, plan)]


def _bucketed(parameters: Sequence[ParameterSpec], plan: Plan) -> list[FlatBuffer]:
    """Buffers of trainable parameters below ZeRO-3."""
    members = [
        Member(numel=one.numel, item_bytes=item_bytes(compute_dtype(one, plan)), kind=str(_formats(one, plan)))
        for one in parameters
    ]
    buckets = reversed(shard_buckets(members, plan.comm.bucket_bytes))
    return [_buffer([parameters[index] for index in bucket], plan) for bucket in buckets]


def own_tensor(parameter: ParameterSpec, plan: Plan) -> FlatBuffer:
    """A parameter that is in no flat buffer, as one that has no padding and one part."""
    compute = compute_dtype(parameter, plan)
    return FlatBuffer(
        flat=Flat(numels=(parameter.numel,), num_parts=1, aligned_numel=1),
        names=(parameter.name,),
        shapes=(tuple(parameter.shape),),
        compute=compute,
        master=compute,
        accumulate=compute,
        reduce=compute,
        trainable=parameter.trainable,
    )


def shard_buckets(members: Sequence[Member], bucket_bytes: int) -> tuple[tuple[int, ...], ...]:
    """The trainable parameters, given in the order of registration, that share each flat buffer below ZeRO-3.

    Filled from the last parameter to the first, because that is roughly the order in which gradients come; `members`
    count the bytes of parameters, not of gradients. Each bucket lists its members in the order they have in the flat.
    """
    last = len(members) - 1
    buckets = assign_buckets(members[::-1], bucket_bytes)
    return tuple(tuple(last - index for index in bucket) for bucket in buckets)


def sharded_bytes(buffers: Sequence[FlatBuffer], plan: Plan, *, is_coded: bool = False) -> dict[str, int]:
    """Bytes a rank sends over each axis in one step in which parameters live in these flat buffers.

    With nothing sharded each buffer has one part: its gradient is all-reduced, and nothing is gathered. `is_coded`:
    what ranks that keep the same part exchange of gradients goes through a codec, and is left out here
    (`plan/exchange/gradient_exchange.py`).
    """
    axes = one_replica(plan)
    sharding, data, replicate = Sharding.of(plan), axes.state, axes.replicate
    num_flags = sum(len(one.flat.numels) for one in buffers if one.trainable)
    tail_words = SHARDED_TAIL_WORDS + data * replicate + num_flags + (CODEC_TAIL_WORDS if is_coded else 0)
    tail_bytes = tail_words * SHARDED_TAIL_ITEM_BYTES
    over_data = sent_bytes("all-reduce", tail_bytes, data)
    over_replicate = sent_bytes("all-reduce", tail_bytes, replicate)
    reduction: Collective = "all-reduce" if sharding.stage == 0 else "reduce-scatter"
    num_reductions = plan.step.microbatches if sharding.every_microbatch else 1
    for one in buffers:
        over_data += _num_gathers(one, plan, sharding) * sent_bytes("all-gather", one.whole_bytes(one.compute), data)
        if one.trainable and not (is_coded and sharding.stage == 0):
            over_data += num_reductions * sent_bytes(reduction, one.whole_bytes(one.reduce), data)
        if one.trainable and not is_coded:
            over_replicate += sent_bytes("all-reduce", one.part_bytes(one.reduce), replicate)
    return {state_axes(plan): over_data, "replicate": over_replicate}


def _num_gathers(one: FlatBuffer, plan: Plan, sharding: Sharding) -> int:
    """The number of times that a step gathers a flat buffer of parameters."""
    if sharding.stage < 3 or sharding.stays_whole:
        return min(sharding.stage, 1)
    # A block is freed and gathered again for the backward pass. The root stays whole, and so do layers after the last
    # block, whose backward pass comes next; that of an embedding needs no weights.
    return plan.step.microbatches * (1 if one.block is None or one.is_outside_blocks else 2)


def _is_cast(parameter: ParameterSpec, plan: Plan) -> bool:
    return plan.precision.compute != "model" and not parameter.keeps_dtype


def _formats(parameter: ParameterSpec, plan: Plan) -> tuple[str, str, bool]:
    """The facts that parameters of one buffer have in common: compute and master dtypes, trainable or frozen."""
    keeps_master = parameter.trainable and _is_cast(parameter, plan)
    master = _PROMOTED.get(parameter.dtype, "float32") if keeps_master else parameter.dtype
    return compute_dtype(parameter, plan), master, parameter.trainable


def _buffer(parameters: Sequence[ParameterSpec], plan: Plan) -> FlatBuffer:
    compute, master, trainable = _formats(parameters[0], plan)
    sharding = Sharding.of(plan)
    return FlatBuffer(
        flat=Flat(numels=tuple(parameter.numel for parameter in parameters), num_parts=sharding.num_parts),
        names=tuple(parameter.name for parameter in parameters),
        shapes=tuple(tuple(parameter.shape) for parameter in parameters),
        compute=compute,
        master=master,
        accumulate=_gradient_dtype(plan.precision.accumulate, compute),
        reduce=_gradient_dtype(plan.precision.reduce, compute),
        trainable=trainable,
        block=parameters[0].block if sharding.stage == 3 else None,
        is_outside_blocks=parameters[0].is_outside_blocks and sharding.stage == 3,
    )


def _gradient_dtype(planned: str, compute: str) -> str:
    """The dtype of gradients: "fp32" never narrows a wider parameter's, an explicit 16-bit format does what it says."""
    return _PROMOTED.get(compute, "float32") if planned == "fp32" else DTYPES[planned]
