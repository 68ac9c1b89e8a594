"""A worker of a parameter server as a run of its own: the plan of its ranks, without the other workers."""

from __future__ import annotations

from dataclasses import replace

from weft.plan.plan import Plan, Server

WORKER = "WEFT_WORKER"
"""Environment of the ranks of a worker, where a launcher has started several: its number."""


def is_served(plan: Plan) -> bool:
    """True if workers exchange through servers."""
    return plan.data.sync == "server"


def one_worker(plan: Plan) -> Plan:
    """The plan of one worker's ranks. They know no other worker: what workers share is the servers' (`[server]`)."""
    return replace(plan, axes=replace(plan.axes, data=1), server=Server())
