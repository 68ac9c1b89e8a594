"""The answer a plan must give: the rule that it obeys, and the one process that computes by it.

A lossless plan is held to plain training in one process. A method that changes the maths obeys a rule of its own, and
is held to a process that computes by that rule: an `Oracle`. The effect of the change is measured separately
(`deviation.py`).
"""

from __future__ import annotations

from typing import Any

from weft.comm.objects import gather_values
from weft.plan.partition.one_worker import is_served
from weft.plan.pipeline.communication import FLUSH_FREE
from weft.plan.plan import Plan
from weft.training.trainer import Trainer
from weft.verification.compressed_batches import CompressedBatches
from weft.verification.compressed_replicas import CompressedReplicas
from weft.verification.compression.parts import find_coded_parts, num_coded_replicas
from weft.verification.delayed_weights import DelayedVersions
from weft.verification.one_process import OneProcess
from weft.verification.replicas import LocalReplicas
from weft.verification.served_batches import ServedBatches
from weft.verification.served_replay import ReplayedTraining
from weft.verification.served_workers import ask_workers

Rule = type[OneProcess] | type[DelayedVersions] | type[LocalReplicas] | type[ReplayedTraining]
Oracle = OneProcess | DelayedVersions | LocalReplicas | ReplayedTraining
"""One process that computes what a plan must. It lives on rank 0.

rule            its name in messages
is_exact        its answer is that of plain training
is_streamed     microbatches are in flight between steps, and the stages of a pipeline update independently
instead_of      plain training as messages name it, where that is another answer
step            trains on a whole global batch; returns a mean loss
returned        what the plan's last step must return, by replica; None where there is no loss (yet)
losses          mean loss of each batch, in the passes that computed it
whole_losses    loss of the last step's microbatches all at once, by replica; None where that is no other number, or
                not computed
num_targets     number of targets in the last step, by replica
backward_order  parameters in the order in which a backward pass finishes their gradients
tensors         what a rank may hold after the step; `is_drained`: no microbatch is in flight
previous        the same tensor one update earlier, if it is kept
at_exchange     where replicas exchange weights or compress: what an exchange that went wrong would give, by name
final_weights   those that a run would end with
"""


def rule_of(plan: Plan) -> Rule:
    if is_served(plan):
        if not plan.server.updates_together and plan.axes.data != 1:
            return ReplayedTraining
        return ServedBatches if plan.codec.name in ("none", "half") else CompressedBatches
    if plan.replica_axis is not None:
        return LocalReplicas
    if plan.codec.name != "none" and num_coded_replicas(plan) > 1:
        return CompressedReplicas
    is_delayed = plan.axes.pipeline > 1 and plan.pipeline.schedule in FLUSH_FREE
    return DelayedVersions if is_delayed else OneProcess


def ask_ranks(rule: Rule, trainer: Trainer) -> Any:
    """What an oracle must know of the ranks beside the plan; collective."""
    if rule is DelayedVersions:
        return find_stages(trainer)
    if rule is ServedBatches:
        return trainer.data_rank
    if rule is ReplayedTraining or rule is CompressedBatches:
        return ask_workers(trainer)
    return find_coded_parts(trainer)


def find_stages(trainer: Trainer) -> dict[str, int]:
    """The first pipeline stage that has each parameter, by name; collective."""
    mesh = trainer.mesh
    mine = [mesh.index("pipeline"), [name for name, _ in trainer.named_model.named_parameters()]]
    found: dict[str, int] = {}
    for stage, names in sorted(gather_values(mine, mesh.everyone("control"))):
        for name in names:
            found.setdefault(name, stage)
    return found
