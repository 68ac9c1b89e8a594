"""The time that a step of a job computes on one rank: real steps of its trainer, without any exchange.

Every rank trains the job's model on its share of the batch, as a replica that never meets the others: forward, backward
and update are those of a run, in the precision of the job's plan. All ranks do so at once, so those that share cores
are measured at the speed they will have in training. How the plan splits the model is left out: each rank has it whole.
"""

from __future__ import annotations

import statistics
import time
from contextlib import closing
from dataclasses import replace

import numpy as np
import torch

from weft.comm.objects import gather_values
from weft.errors import LaunchError
from weft.mesh import make_mesh
from weft.plan.plan import Axes, Comm, Data, Plan
from weft.training.data.datasets import fetch
from weft.training.parallelize import parallelize
from weft.training.run.components import prepare
from weft.training.run.job import Job
from weft.training.trainer import Trainer
from weft.world import World

_NEVER = 1 << 30
_FEWEST_STEPS, _MOST_STEPS = 3, 30


def measure_step(job: Job, world: World, *, num_samples: int, budget_s: float = 3.0) -> float:
    """Seconds of a step of `num_samples` on the slowest rank, in the median of several. Collective."""
    given = job.plan or Plan()
    plan = Plan(
        axes=Axes(data=world.size),
        data=Data(sync="local", every=_NEVER) if world.size > 1 else Data(),
        precision=replace(given.precision, reduce=Plan().precision.reduce),
        recompute=given.recompute,
        comm=Comm(transport="c10d"),
    )
    prepared = prepare(replace(job, plan=plan))
    try:
        trainer = parallelize(
            prepared.make_empty(),
            plan,
            loss=prepared.loss,
            optimizer=prepared.optimizer,
            schedule=prepared.schedule,
            groups=prepared.groups,
            global_batch=num_samples * world.size,
        )
        # Not closed as a whole, which would bring the replicas together over the network.
        with closing(trainer.mesh):
            inputs, targets = fetch(prepared.train_data, np.arange(num_samples) % len(prepared.train_data))

            def step() -> float:
                return _seconds(trainer, inputs, targets, world.device)

            step()  # the first one allocates
            num_steps = min(_MOST_STEPS, max(_FEWEST_STEPS, int(budget_s / _slowest(step(), world))))
            return _slowest(statistics.median([step() for _ in range(num_steps)]), world)
    except torch.OutOfMemoryError as error:
        raise LaunchError(
            f"a step of {num_samples} samples with the whole model does not fit into a rank's memory ({error}); give "
            "the time of a step with --step-time"
        ) from error


def _seconds(trainer: Trainer, inputs: object, targets: object, device: torch.device) -> float:
    started = time.perf_counter()
    trainer.step(inputs, targets)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def _slowest(seconds: float, world: World) -> float:
    if world.size == 1:
        return seconds
    plan = Plan(axes=Axes(data=world.size), comm=Comm(transport="c10d"))
    with make_mesh(plan, world, groups=[("world", "control")]) as mesh:
        return max(float(each) for each in gather_values(seconds, mesh.everyone("control")))
