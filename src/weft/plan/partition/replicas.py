"""Replicas whose weights differ between exchanges: which ranks make up one, and after which steps they exchange.

With `[data] sync = "all-reduce"` all ranks hold the same weights, and the whole run is one replica. Otherwise replicas
lie along one axis: `replicate` where state is sharded over `data`, else `data`. Inside a replica nothing changes: its
ranks share a batch, sum their gradients and split the model along all other axes.

    shard = "nothing", data 4, tensor 2        4 replicas of 2 ranks, which split the model
    shard = "parameters", replicate 2, data 4  2 replicas of 4 ranks, which share one copy of the state
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from weft.plan.in_process_refusals import (
    BALANCED_WORKERS,
    NOTHING_TO_MEASURE,
    REPLICAS_IN_SEVERAL_PROCESSES,
    REPLICAS_OF_SEVERAL_RANKS,
    REPLICAS_THAT_NEVER_DIFFER,
    SERVERS_IN_PROCESS,
    UNCOUNTED_REPLICAS,
)
from weft.plan.late_merges import merges_late
from weft.plan.partition.one_worker import is_served
from weft.plan.plan import ALL, AXES, Axes, Plan


def one_replica(plan: Plan) -> Axes:
    """The axes of one replica: the ranks of the others are left out."""
    if plan.replica_axis is None:
        return plan.axes
    return replace(plan.axes, **{plan.replica_axis: 1})  # type: ignore[arg-type]  # an axis's name


def shares_batch(plan: Plan) -> bool:
    """True if several ranks of a replica have the same parameters and different samples, or tokens of them."""
    axes = one_replica(plan)
    return axes.state * axes.replicate > 1


def state_axes(plan: Plan) -> str:
    """The joint name of the axes along which ranks of one replica have the same parameters, or share them."""
    return "ring+ulysses" if plan.replica_axis == "data" else plan.axes.state_axes


def batch_axes(plan: Plan) -> str:
    """The axes of the ranks that share one batch and have the same parameters."""
    axes, state = plan.axes, state_axes(plan)
    if axes.replicate == 1 or plan.replica_axis is not None:
        return state
    return f"replicate+{state}" if axes.state > 1 else "replicate"


def replica_axes(plan: Plan) -> str:
    """The joint name of the axes of all ranks of one replica, outermost first."""
    return "+".join(axis for axis in AXES if axis != plan.replica_axis)


def keeps_anchor(plan: Plan) -> bool:
    """True if replicas keep the weights of their last exchange: their change travels, not the weights."""
    if merges_late(plan):
        return True
    return plan.replica_axis is not None and (plan.data.outer == "nesterov" or plan.codec.name != "none")


def in_process_problems(plan: Plan, *, num_processes: int = 1) -> Iterator[str]:
    """Every reason why the replicas of this plan cannot run in one process, one after the other."""
    if num_processes > 1:
        yield REPLICAS_IN_SEVERAL_PROCESSES.message(num_processes=num_processes)
    if is_served(plan):
        yield SERVERS_IN_PROCESS.message(plan)
        return
    if plan.replica_axis is None and plan.codec.name == "none":
        if plan.axes.data == ALL or plan.axes.num_ranks > 1:
            many = "one per rank" if plan.axes.data == ALL else plan.axes.data_ranks * plan.step.microbatches
            yield REPLICAS_THAT_NEVER_DIFFER.message(plan, num_microbatches=many)
        return
    if plan.axes.data == ALL:
        yield UNCOUNTED_REPLICAS.message()
        return
    if plan.replica_axis is None and plan.data.balance:
        yield BALANCED_WORKERS.message(plan)
    if plan.data.delay == "auto":
        yield NOTHING_TO_MEASURE.message(plan)
    axis = "data" if plan.data.shard == "nothing" else "replicate"
    inside = {other: size for other, size in plan.axes.sizes.items() if other != axis and size > 1}
    if inside:
        axes = " and ".join(f"[axes] {axis} = {size}" for axis, size in inside.items())
        yield REPLICAS_OF_SEVERAL_RANKS.message(axes=axes, num_ranks=math.prod(inside.values()))
