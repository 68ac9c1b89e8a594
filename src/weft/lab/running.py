"""The command's processes, from their start to the end of the last; process 1 of the lab waits for them here.

A rank that fails ends the lab: the others get a few seconds to notice it themselves, then SIGTERM, then they are killed
with their process namespace. The user's first signal is forwarded; a second one kills.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence

from weft.errors import LaunchError
from weft.lab.namespaces import EmulatedHost
from weft.lab.ranks import PlannedProcess

FAILURE_GRACE_S = 5.0
"""Time for the other ranks when one has failed: they notice a lost connection themselves, and report it."""
INTERRUPT_GRACE_S = 30.0
"""Time for ranks to end after the user's first signal."""
_TERMINATE_GRACE_S = 2.0
WATCHED = (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that `wait` receives; the caller blocks them first."""


class Running:
    """The running processes of the command."""

    def __init__(
        self,
        hosts: Sequence[EmulatedHost],
        planned: Sequence[PlannedProcess],
        command: Sequence[str],
        *,
        own: dict[int, str],
    ) -> None:
        """`own` names the lab's own processes by id: their end, too, ends the lab."""
        self._own = own
        self._running: dict[int, str] = {}
        self._code = 0
        self._failure = ""
        self._deadline_s = float("inf")
        self._interrupted = self._terminated = False
        for each in planned:
            self._running[_start(hosts[each.host], each, command)] = each.name

    def wait(self) -> tuple[int, str]:
        """Exit code and name of the first that fails; the others are ended after the grace periods."""
        while self._running:
            self._reap()
            if not self._running:
                break
            left_s = self._deadline_s - time.monotonic()
            if left_s <= 0 and self._terminated:
                break  # they are killed with the namespace
            if left_s <= 0:
                self._send(signal.SIGTERM)
                self._terminated, self._deadline_s = True, time.monotonic() + _TERMINATE_GRACE_S
                continue
            received = signal.sigtimedwait(WATCHED, min(left_s, 1.0))
            if received is not None and received.si_signo != signal.SIGCHLD:
                self._interrupt(signal.Signals(received.si_signo))
        return self._code, self._failure

    def _reap(self) -> None:
        """Record all ended processes, including orphans of ranks, which process 1 inherits."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            name = self._running.pop(pid, self._own.get(pid))
            code = os.waitstatus_to_exitcode(status)
            if name is None or code == 0 or self._code:
                continue
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
            self._code, self._failure = (code if code > 0 else 128 - code), f"{name} {how}"
            self._deadline_s = min(self._deadline_s, time.monotonic() + FAILURE_GRACE_S)

    def _interrupt(self, number: signal.Signals) -> None:
        """Forward the user's signal; a second one ends the lab at once."""
        self._code = self._code or 128 + number
        self._deadline_s = 0.0 if self._interrupted else time.monotonic() + INTERRUPT_GRACE_S
        self._terminated = self._interrupted
        self._interrupted = True
        self._send(number)

    def _send(self, number: signal.Signals) -> None:
        for pid in self._running:
            os.kill(pid, number)


def _start(host: EmulatedHost, planned: PlannedProcess, command: Sequence[str]) -> int:
    def enter() -> None:
        host.enter()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)

    try:
        process = subprocess.Popen(command, env=planned.environment, stdin=subprocess.DEVNULL, preexec_fn=enter)
    except OSError as error:
        raise LaunchError(f"{command[0]} cannot be started: {error.strerror}") from error
    process.returncode = 0  # process 1 reaps all processes itself
    return process.pid
