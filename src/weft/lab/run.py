"""Runs a command on the hosts of an emulated network, or measures that network, from any process."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from weft.errors import LaunchError
from weft.lab.network import Network
from weft.lab.supervise import Outcome, Request


def run_lab(network: Network, command: Sequence[str], *, per_host: bool = False) -> Outcome:
    """Run a command once per rank (or once per host) in the network; without a command, measure the network.

    Ctrl-C and SIGTERM are passed on to the command's processes; a second one ends them at once.
    """
    if command and shutil.which(command[0]) is None:
        raise LaunchError(f"{command[0]} is not a program that can be found here; give its path")
    read_fd, write_fd = os.pipe()
    request = Request(
        network=network, command=tuple(command), per_host=per_host, parent_pid=os.getpid(), result_fd=write_fd
    )
    keeper = subprocess.Popen(
        # -P: a file of the user's in this folder must not be taken for one of Python's own
        [sys.executable, "-P", "-c", "from weft.lab.supervise import main; main()"],
        stdin=subprocess.PIPE,
        pass_fds=[write_fd],
        start_new_session=True,
    )
    os.close(write_fd)
    with _interruptible(keeper) as was_interrupted, os.fdopen(read_fd, "rb") as results:
        assert keeper.stdin is not None
        with keeper.stdin:
            pickle.dump(request, keeper.stdin)
        written = results.read()
        code = keeper.wait()
    if not written and was_interrupted():
        raise KeyboardInterrupt
    if not written:
        raise LaunchError(f"the lab ended with code {code} before its command did; its processes are gone too")
    outcome: Outcome = pickle.loads(written)
    if outcome.problems:
        raise LaunchError(outcome.problems)
    return outcome


@contextmanager
def _interruptible(keeper: subprocess.Popen[bytes]) -> Iterator[Callable[[], bool]]:
    """Context that forwards signals; yields a function that returns True once there was one."""
    asked = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        del frame
        if not asked:
            print("\nending the command; Ctrl-C again to end it at once", file=sys.stderr, flush=True)
        asked = True
        keeper.send_signal(number)

    previous = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
