"""`[axes] data = "all"`: the ranks that the other axes leave, as a number once it is known how many are running."""

from __future__ import annotations

from dataclasses import replace

from weft.plan.plan import ALL, Plan


def with_ranks(plan: Plan, num_ranks: int) -> Plan:
    """The plan with a number for `data = "all"`; one whose other axes do not divide the ranks stays as it is, and
    `check` refuses it."""
    if plan.axes.data != ALL or num_ranks % plan.axes.besides_data:
        return plan
    return replace(plan, axes=replace(plan.axes, data=num_ranks // plan.axes.besides_data))


def ranks_to_start(plan: Plan, default: int) -> int:
    """The ranks to start for `data = "all"`: those of this machine, or one along data where the others need more."""
    return max(default, plan.axes.besides_data)
