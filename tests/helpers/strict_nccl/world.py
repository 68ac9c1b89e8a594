"""`strict_world`: inside, groups of the backend "strict" can be made, and every one of NCCL's rules holds for them."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from strict_nccl.calls import StrictError
from strict_nccl.group import StrictGroup
from strict_nccl.host_memory import watch_host_memory
from strict_nccl.link import Link
from strict_nccl.mode import Mode, read_mode
from strict_nccl.work import StrictWork, refuse_lost

_current: list[tuple[Link, list[StrictWork]]] = []


def _make_group(options: Any, _: Any) -> StrictGroup:
    if not _current:
        raise StrictError('groups of the backend "strict" are made inside strict_world()')
    link, under_way = _current[-1]
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    return StrictGroup(link, options.group_id, ranks, under_way)


@functools.cache
def _register() -> None:
    dist.Backend.register_backend("strict", _make_group, extended_api=True, devices=["cpu"])


def _batch(messages: Sequence[dist.P2POp], *, otherwise: Any) -> list[Any]:
    """torch batches only for its own kinds of groups."""
    group = messages[0].group
    if not isinstance(group, StrictGroup):
        return otherwise(messages)
    return [group.batch([(one.op is dist.isend, one.tensor, one.group_peer) for one in messages])]


@contextmanager
def strict_world(mode: Mode | None = None) -> Iterator[Mode]:
    """All ranks of the default group enter and leave; what breaks a rule raises on all of them.

    Leaving refuses operations that nobody waited for.
    """
    _register()
    chosen = mode or read_mode()
    with _referee(chosen) as address, watch_host_memory():
        link, under_way = Link(address, dist.get_rank(), chosen), []
        _current.append((link, under_way))
        batch = functools.partial(_batch, otherwise=dist.batch_isend_irecv)
        problem: str | None = "an error"
        try:
            with mock.patch.object(dist, "batch_isend_irecv", batch):
                yield chosen
            refuse_lost(under_way)
            problem = None
        except BaseException as error:
            problem = f"{type(error).__name__}: {error}"
            raise
        finally:
            _current.pop()
            link.leave(problem)


@contextmanager
def _referee(mode: Mode) -> Iterator[str]:
    """The address of a referee that the first rank starts."""
    process, folder = None, None
    address: list[str | None] = [None]
    if dist.get_rank() == 0:
        folder = tempfile.TemporaryDirectory(prefix="strict-nccl-")
        address = [str(Path(folder.name) / "referee")]
        command = [
            sys.executable,
            "-S",
            "-m",
            "strict_nccl.server",
            address[0],
            str(dist.get_world_size()),
            mode.text(),
        ]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    try:
        dist.broadcast_object_list(address)
        assert address[0] is not None
        yield address[0]
    finally:
        if process is not None and folder is not None:
            assert process.stdout is not None
            process.stdout.close()
            process.wait(timeout=30)
            folder.cleanup()
