"""One rank of the test pool: join the group, then run test bodies until the pipe closes.

A body arrives as a file, a name and pickled parameters, never as a closure: the rank imports the test file itself,
through pytest's assertion rewriter, so a failed `assert` shows its values here as it would in the parent.
`ranks.py` is the other end of the pipe. Nothing here decides what a failure means for the test.
"""

from __future__ import annotations

import ast
import faulthandler
import gc
import os
import pickle
import random
import re
import select
import signal
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from _pytest.assertion.rewrite import rewrite_asserts
from one_loop import share_loop
from transport import apply_transport

Filter = tuple[str, str, type[Warning], str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One body to run: its file, its name and its parameters."""

    file: str
    module: str
    function: str
    payload: bytes
    """Pickled (parameters, warning filters); unpickled after the test file is imported, whose classes it may name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The outcome of one body on one rank."""

    kind: str
    """passed, failed, skipped or died; a rank never reports `died` itself."""
    text: str = ""
    at_s: float = 0.0
    """Time of the error on the machine's monotonic clock: the earliest error is the likeliest cause."""


def warning_filters() -> list[Filter]:
    """The filters in force in this process, as plain values that can be pickled."""

    def plain(pattern: str | re.Pattern[str] | None) -> str:
        if isinstance(pattern, str):
            return re.escape(pattern) + r"\Z"
        return pattern.pattern if pattern else ""

    return [(a, plain(message), c, plain(module), line) for a, message, c, module, line in warnings.filters]


@contextmanager
def filtered_warnings(filters: list[Filter]) -> Iterator[None]:
    """Treat warnings as the parent does."""
    with warnings.catch_warnings():
        warnings.resetwarnings()
        for action, message, category, module, line in reversed(filters):
            warnings.filterwarnings(action, message, category, module, line)  # type: ignore[arg-type]
        yield


def load_module(file: str, name: str) -> types.ModuleType:
    """The test file under the name pytest gave it, its assertions rewritten; imported once per rank."""
    loaded = sys.modules.get(name)
    if loaded is not None and loaded.__file__ == file:
        return loaded
    source = Path(file).read_bytes()
    tree = ast.parse(source, filename=file)
    rewrite_asserts(tree, source, file)
    module = types.ModuleType(name)
    module.__file__ = file
    sys.modules[name] = module
    try:
        exec(compile(tree, file, "exec", dont_inherit=True), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def seed_everything() -> None:
    """Reset the random state, so that every body begins with the same one."""
    torch.manual_seed(0)
    numpy.random.seed(0)
    random.seed(0)


@contextmanager
def unchanged_process() -> Iterator[None]:
    """Undo a body's process-wide settings, and refuse a lost default group."""
    group, folder, environment = dist.group.WORLD, os.getcwd(), dict(os.environ)
    try:
        yield
    finally:
        # Cycles would keep a body's hooks and threads alive in the next one. With the imports frozen this takes 0.1 ms.
        gc.collect()
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision("highest")
        torch.set_grad_enabled(True)
        torch.autograd.set_detect_anomaly(False)
        torch.set_num_threads(1)
        os.chdir(folder)
        if dict(os.environ) != environment:
            os.environ.clear()
            os.environ.update(environment)
    if dist.group.WORLD is not group:
        raise RuntimeError("the body destroyed or replaced the default group, which later tests need: use fresh=True")


def failed(error: BaseException, file: str) -> Report:
    """The traceback from the test file onwards, as pytest prints it."""
    at_s = time.monotonic()
    info = pytest.ExceptionInfo.from_exception(error)
    info.traceback = info.traceback.cut(path=file)
    return Report(kind="failed", text=str(info.getrepr(style="short")), at_s=at_s)


def run_task(task: Task, *, fresh: bool) -> Report:
    """Run one body to its end. Everything a body can raise is caught: pytest's outcomes are not Exceptions."""
    try:
        module = load_module(task.file, task.module)
        parameters, filters = pickle.loads(task.payload)
        found = getattr(module, task.function)
        body: Callable[..., Any] = getattr(found, "body", found)  # ranks(2)(check) leaves the name undecorated
        with filtered_warnings(filters):
            seed_everything()
            if fresh:
                body(**parameters)
            else:
                with unchanged_process():
                    body(**parameters)
        report = Report(kind="passed")
    except pytest.skip.Exception as outcome:
        report = Report(kind="skipped", text=outcome.msg)
    except BaseException as error:
        report = failed(error, task.file)
    sys.stdout.flush()
    sys.stderr.flush()
    return report


def end_with_parent(pipe: Connection) -> None:
    """Kill this rank and its children once pytest is gone: stuck in a collective, it would stay for half an hour."""
    poll = select.poll()
    poll.register(pipe.fileno(), 0)
    poll.poll()
    os.killpg(0, signal.SIGKILL)


def prepare(rank: int, world: int, folder: Path, environment: dict[str, str]) -> None:
    """Make this process a rank: parent's environment, stacks on demand, one thread, a default group."""
    os.environ.clear()
    os.environ.update(environment)
    apply_transport()
    share_loop()
    stacks = (folder / f"stack-{rank}").open("w")
    faulthandler.enable(file=stacks)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    gc.freeze()


def rank_main(
    pipe: Connection, rank: int, world: int, folder: Path, environment: dict[str, str], *, fresh: bool
) -> None:
    """Main loop of a rank: report ready, then one report per task, until the parent closes the pipe."""
    os.setpgid(0, 0)
    threading.Thread(target=end_with_parent, args=(pipe,), name="end with parent", daemon=True).start()
    try:
        prepare(rank, world, folder, environment)
    except BaseException as error:
        pipe.send(failed(error, __file__))
        return
    pipe.send(Report(kind="passed"))
    with suppress(EOFError):
        while True:
            pipe.send(run_task(pipe.recv(), fresh=fresh))
    # Not an ordinary exit, which would wait for threads that a body left running.
    os._exit(0)
