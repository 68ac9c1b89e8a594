"""Every process group of a plan, in one list: all ranks make them in this order when the mesh is made.

A group is named by its axes, joined by "+", and its purpose. Each purpose has a group of its own, because two threads,
or two exchanges whose order may differ between ranks, must never share one. Groups of one rank are not listed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from weft.plan.partition.host_levels import level_groups
from weft.plan.partition.replicas import batch_axes, replica_axes, state_axes
from weft.plan.plan import Axes, Plan

GroupKey = tuple[str, str]
"""Axes and purpose. "pipeline:0,3" are the ranks at these places along an axis."""

HOST_PURPOSES = ("control", "saving")
"""Purposes whose messages are small, and in host memory even if ranks compute on GPUs: NCCL's communicators take device
memory, and reading a value on the host makes it wait for the device."""

COMMUNICATOR_BYTES = 32 * 2**20
"""Device memory of a NCCL communicator. Measured: 16 to 26 MiB between 2 ranks through sockets; links inside a host
have more channels, and take several times as much. NCCL's own kernels, loaded with the first, are not in it."""

WORLD = "world"
"""The name under which exchanges between all ranks are counted; not an axis of the plan."""


def message_group(source: int, target: int, num_ranks: int) -> GroupKey:
    """The group of the messages from a stage to a neighbouring one: their two ranks, and one direction.

    NCCL matches the messages of a group in order, and a send may complete only when it is received. So messages that
    ranks wait for in different orders have different groups: one per neighbour and direction, and, with several chunks
    per rank, others for messages between the last rank and the first.
    """
    here, there, is_forward = source % num_ranks, target % num_ranks, target > source
    purpose = "activations" if is_forward else "gradients"
    goes_round = (there > here) != is_forward
    return f"pipeline:{min(here, there)},{max(here, there)}", f"{purpose} round" if goes_round else purpose


def plan_groups(plan: Plan, *, batch_norms: bool, hosts: Sequence[int] = ()) -> tuple[GroupKey, ...]:
    """The groups a plan uses; those of weights that several stages or tensor ranks hold depend on the model. `hosts`:
    the number of each rank's host, on which it depends whether a codec has levels."""
    state, batch = state_axes(plan), batch_axes(plan)
    keys = [(WORLD, "control"), (WORLD, "saving"), (batch, "control"), (state, "gradients")]
    if plan.data.shard != "nothing":
        keys.append((state, "parameters"))
        if plan.replica_axis is None:
            keys += [("replicate", "gradients"), ("replicate", "control")]
    if plan.codec.name != "none" and plan.replica_axis is None and plan.axes.sequence > 1:
        # The ranks of one replica are summed as they are, then its counterparts elsewhere through the codec.
        keys += [("ring+ulysses", "gradients"), ("data", "gradients")]
    if plan.replica_axis is not None:
        keys += [(plan.replica_axis, "weights"), (plan.replica_axis, "control"), (replica_axes(plan), "control")]
    if batch_norms and plan.data.buffers == "synchronise":
        keys.append((batch, "statistics"))
    keys += [("pipeline+ring+ulysses+tensor", "control"), ("tensor", "control"), ("tensor", "activations")]
    keys += [("ring+ulysses", "control"), ("ring+ulysses", "masks"), ("ring", "neighbours"), ("ulysses", "heads")]
    keys += [("pipeline", "control"), ("pipeline", "totals")]
    if plan.axes.pipeline > 1:
        boundaries = ((s, s + 1) for s in range(plan.axes.pipeline * plan.pipeline.chunks - 1))
        keys += dict.fromkeys(
            message_group(*ends, plan.axes.pipeline) for s, t in boundaries for ends in ((s, t), (t, s))
        )
    return (*(key for key in keys if num_ranks_along(plan.axes, key[0]) > 1), *level_groups(plan, hosts))


def num_communicators(plan: Plan, *, batch_norms: bool = False, hosts: Sequence[int] = ()) -> int:
    """The largest number of groups of device tensors that a rank is in; with NCCL each has a communicator."""
    counts = dict.fromkeys(range(plan.axes.pipeline), 0)
    for names, purpose in plan_groups(plan, batch_norms=batch_norms, hosts=hosts):
        if purpose not in HOST_PURPOSES:
            places = names.partition(":")[2]
            for stage in map(int, places.split(",")) if places else counts:
                counts[stage] += 1
    return max(counts.values())


def num_ranks_along(axes: Axes, names: str) -> int:
    """The size of a group of these axes."""
    if names == WORLD:
        return axes.num_ranks
    along, _, places = names.partition(":")
    if places:
        return len(places.split(","))
    return math.prod(axes.sizes[name] for name in along.split("+"))
