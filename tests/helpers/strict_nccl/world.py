"""`strict_world`: inside, groups of the backend "strict" can be made, and every one of NCCL's rules holds for them."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from strict_nccl.calls import StrictError
from strict_nccl.client import RefereeClient
from strict_nccl.group import StrictGroup
from strict_nccl.host_memory import watch_host_memory
from strict_nccl.mode import StrictMode, read_mode
from strict_nccl.work import StrictWork, refuse_lost


@dataclass(frozen=True, slots=True, kw_only=True)
class _Membership:
    """This rank's part in a strict world."""

    client: RefereeClient
    under_way: list[StrictWork]
    referee: subprocess.Popen[bytes] | None
    """On the first rank."""

    def leave(self, problem: str | None) -> None:
        try:
            self.client.leave(problem)
        finally:
            if self.referee is not None:
                self.referee.wait(timeout=30)


_current: list[_Membership] = []
_kept: dict[StrictMode, _Membership] = {}


@contextmanager
def strict_world(mode: StrictMode | None = None, *, keep: bool = False) -> Iterator[StrictMode]:
    """All ranks of the default group enter and leave; what breaks a rule raises on all of them.

    Leaving refuses operations that nobody waited for, and sends that nobody receives. `keep`: if all went well, groups
    stay, for the next `strict_world` of this mode.
    """
    _register()
    chosen = mode or read_mode()
    member = _kept.pop(chosen, None) if keep else None
    if member is None:
        member = _join(chosen)
    _current.append(member)
    batch = functools.partial(_batch, otherwise=dist.batch_isend_irecv)
    problem: str | None = None
    try:
        with watch_host_memory(), mock.patch.object(dist, "batch_isend_irecv", batch):
            yield chosen
        refuse_lost(member.under_way)
        for send in tuple(member.under_way):
            send.wait()
    except BaseException as error:
        problem = f"{type(error).__name__}: {error}"
        raise
    finally:
        _current.pop()
        if keep and problem is None:
            _kept[chosen] = member
        else:
            member.leave(problem)


def _join(mode: StrictMode) -> _Membership:
    """Meet the other ranks at a referee that the first rank starts; collective."""
    referee, name = None, [f"strict-nccl-{os.getpid()}-{time.monotonic_ns()}"]
    if dist.get_rank() == 0:
        command = [sys.executable, "-S", "-m", "strict_nccl.server", name[0], str(dist.get_world_size()), mode.text()]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
        referee = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
        assert referee.stdout is not None
        with referee.stdout as said:
            assert said.readline() == b"ready\n"
    dist.broadcast_object_list(name)
    return _Membership(client=RefereeClient(name[0], dist.get_rank(), mode), under_way=[], referee=referee)


def _make_group(options: Any, _: Any) -> StrictGroup:
    if not _current:
        raise StrictError('groups of the backend "strict" are made inside strict_world()')
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    return StrictGroup(_current[-1].client, options.group_id, ranks, _current[-1].under_way)


@functools.cache
def _register() -> None:
    dist.Backend.register_backend("strict", _make_group, extended_api=True, devices=["cpu"])


def _batch(messages: Sequence[dist.P2POp], *, otherwise: Any) -> list[Any]:
    """torch batches only for its own kinds of groups."""
    group = messages[0].group
    if not isinstance(group, StrictGroup):
        return otherwise(messages)
    return [group.batch([(one.op is dist.isend, one.tensor, one.group_peer) for one in messages])]
