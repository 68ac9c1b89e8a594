"""Trainers whose ranks are workers of parameter servers."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from oracle import SGD
from ranks import gathered
from torch import nn

import weft
from weft.plan.plan import Axes, Comm, Data, Plan, Server, Step
from weft.sync.served import ServedSync
from weft.training.trainer import Trainer


@contextmanager
def served(model: nn.Module, plan: Plan, **changes: Any) -> Iterator[Trainer]:
    given = {"loss": "cross-entropy", "optimizer": SGD, "device": "cpu", **changes}
    with weft.parallelize(model, plan, **given) as trainer:
        assert isinstance(trainer.sync, ServedSync)
        yield trainer


def leave_group() -> None:
    """End the process group of a test's ranks, which are then as a launcher starts them: workers make worlds of their
    own. For ranks that are not used again (`@ranks(4, fresh=True)`)."""
    rank, size = dist.get_rank(), dist.get_world_size()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = gathered(probe.getsockname()[1])[0]
    dist.destroy_process_group()
    os.environ |= dict(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def server_plan(
    workers: int, *, microbatches: int = 1, clip_norm: float = 0.0, bucket_bytes: int = 200, **server: Any
) -> Plan:
    return Plan(
        axes=Axes(data=workers),
        data=Data(sync="server"),
        server=Server(**server),
        step=Step(microbatches=microbatches, clip_norm=clip_norm),
        comm=Comm(bucket_bytes=bucket_bytes),
    )
