"""Processes for one run of several workers, forked from one that has imported torch, which takes longer than a run."""

from __future__ import annotations

import logging
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

PRELOADED = ("weft.training.parallelize",)


def _be_worker(
    rank: int, num_workers: int, folder: str, work: Callable[..., Any], given: tuple[Any, ...], told: Connection
) -> None:
    torch.set_num_threads(1)
    logging.getLogger("weft").setLevel(logging.ERROR)
    try:
        store = dist.FileStore(f"{folder}/store", num_workers)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_workers)
        told.send((True, work(rank, *given)))
        dist.destroy_process_group()
    except BaseException:
        told.send((False, traceback.format_exc()))
        raise


def _hear(rank: int, told: Connection, limit_s: float) -> Any:
    if not told.poll(limit_s):
        raise TimeoutError(f"worker {rank} was not done after {limit_s:g} s")
    try:
        is_done, said = told.recv()
    except EOFError:
        raise RuntimeError(f"worker {rank} ended without a word; see its output") from None
    if not is_done:
        raise RuntimeError(f"worker {rank} failed:\n{said}")
    return said


def run_workers(num_workers: int, work: Callable[..., Any], *given: Any, limit_s: float) -> list[Any]:
    """What work(rank, *given) returns in each of so many processes of one thread, which have a process group."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([work.__module__, *PRELOADED])
    heard, processes = [], []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(num_workers):
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_be_worker, args=(rank, num_workers, folder, work, given, theirs))
            process.start()
            theirs.close()  # so that the end of a worker is heard
            heard.append(mine)
            processes.append(process)
        try:
            return [_hear(rank, one, limit_s) for rank, one in enumerate(heard)]
        except BaseException:
            for process in processes:
                process.terminate()
            raise
        finally:
            for process in processes:
                process.join()
