"""Inside the lab: the process that makes the hosts, starts the switch and the ranks, and ends all of them with itself.

    weft lab              the user's process
    └─ keeper             leads a session of its own, so that Ctrl-C reaches the user's process alone
       └─ init            process 1 of a process namespace: when it ends, the kernel kills all below
          ├─ switch       carries the packets
          ├─ throttle     where hosts are slow
          └─ ranks        each in its host's namespaces

Keeper and init have the kernel kill them when their parent ends, so a kill -9 of any of them, at any moment, ends all
of them, and with the last process namespaces and devices disappear. The keeper exists because only a process that gives
up its own namespaces can make process 1, and the user's process should keep them.
"""

from __future__ import annotations

import math
import os
import pickle
import select
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

from weft.errors import LaunchError, WeftError
from weft.hosts import num_cores
from weft.lab.check import Finding, check_network, measure_capacity, measure_latency
from weft.lab.counters import VARIABLE, Counters, SwitchCount, make_table
from weft.lab.fabric import Fabric
from weft.lab.namespaces import (
    EmulatedHost,
    die_with_parent,
    keep_cores_awake,
    make_host,
    new_process_tree,
    own_files,
    run_promptly,
)
from weft.lab.network import NETMASK, Network, host_address, host_name, problems_of_machine, unlimited
from weft.lab.ranks import processes
from weft.lab.running import WATCHED, Running
from weft.lab.switch import run_switch
from weft.lab.throttle import run_throttle

_TRIALS = 3
_TRIAL_DELAY_S = 0.002
_MAX_CORRECTION_S = 0.0005
"""Largest correction of delays: a longer latency is that of a busy machine, and may be short-lived."""
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The work of a lab."""

    network: Network
    command: tuple[str, ...]
    """Empty: measure the network instead."""
    per_host: bool
    parent_pid: int
    result_fd: int
    """File descriptor to which the pickled outcome is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a lab."""

    code: int = 0
    """Exit code of the first process that failed, 0 if none did."""
    failure: str = ""
    """The process that failed, and how."""
    findings: tuple[Finding, ...] = ()
    counters: str = ""
    """Traffic through the switch, as JSON."""
    switch: SwitchCount | None = None
    problems: tuple[str, ...] = ()
    """Reasons why nothing was started."""


def main() -> NoReturn:
    """The keeper. The request comes on standard input."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    request: Request = pickle.load(sys.stdin.buffer)
    die_with_parent(request.parent_pid)
    alive_fd, held_fd = os.pipe()
    try:
        new_process_tree()
    except OSError as error:
        _write_denied(request.result_fd, error)
        sys.exit(2)
    init = os.fork()
    if init == 0:
        os.close(held_fd)
        _run_init(request, alive_fd)
    for number in _ENDING:
        signal.signal(number, lambda number, _: os.kill(init, number))
    _, status = os.waitpid(init, 0)
    code = os.waitstatus_to_exitcode(status)
    sys.exit(code if code >= 0 else 128 - code)


def _run_init(request: Request, alive_fd: int) -> NoReturn:
    """Process 1: when it ends, everything in the lab does."""
    code = 1
    try:
        die_with_parent(0)  # the id of a parent outside the namespace
        if select.select([alive_fd], [], [], 0)[0]:  # its end was closed: the keeper died before the line above
            os._exit(1)
        for number in _ENDING:  # without a handler, process 1 would ignore them
            signal.signal(number, lambda number, _: os._exit(128 + number))
        outcome = _run(request)
        code = outcome.code
        _write(request.result_fd, outcome)
    except WeftError as error:
        _write(request.result_fd, Outcome(problems=error.problems))
    except OSError as error:
        _write_denied(request.result_fd, error)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(request: Request) -> Outcome:
    network = request.network
    names = {host_name(number): host_address(number) for number in range(len(network.hosts))}
    own_files(names)
    keep_cores_awake()
    sizes = {"mtu_bytes": network.mtu_bytes, "tcp_buffer_bytes": network.tcp_buffer_bytes()}
    hosts = [make_host(name, address, netmask=NETMASK, **sizes) for name, address in names.items()]
    latency_s = _require_machine(network, hosts)
    table_fd = make_table(len(hosts))
    counters = Counters(table_fd, num_hosts=len(hosts))
    switch = _start_switch(hosts, Fabric(network, latency_s=min(latency_s, _MAX_CORRECTION_S)), table_fd)
    own = {switch: "the switch"}
    if shares := {
        os.fstat(made.net_fd).st_ino: host.compute
        for made, host in zip(hosts, network.hosts, strict=True)
        if host.compute
    }:
        own[_fork(lambda: run_throttle(shares))] = "the throttle"
    if not request.command:
        findings = tuple(check_network(hosts, network))
        return Outcome(findings=findings, counters=counters.to_json(), switch=counters.switch())
    variables = {VARIABLE: f"/proc/1/fd/{table_fd} {len(hosts)}"}
    planned = processes(network, per_host=request.per_host, variables=variables)
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)  # from here on, `wait` takes them
    code, failure = Running(hosts, planned, request.command, own=own).wait()
    return Outcome(code=code, failure=failure, counters=counters.to_json(), switch=counters.switch())


@contextmanager
def _trial(hosts: Sequence[EmulatedHost], network: Network) -> Iterator[None]:
    """Context with a switch for another network between the same hosts."""
    pid = _start_switch(hosts, Fabric(network), make_table(len(hosts)))
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _require_machine(network: Network, hosts: Sequence[EmulatedHost]) -> float:
    """The switch's latency here; a network that this machine cannot emulate is refused.

    Load of other processes or a hypervisor may be short-lived, so a bad trial is repeated.
    """
    bits_per_s, latency_s = 0.0, 0.0 if len(hosts) == 1 else math.inf
    for _ in range(_TRIALS):
        if len(hosts) > 1:
            with _trial(hosts, unlimited(len(hosts), delay_s=0.0, mtu_bytes=network.mtu_bytes)):
                bits_per_s = max(bits_per_s, measure_capacity(hosts))
            with _trial(hosts, unlimited(len(hosts), delay_s=_TRIAL_DELAY_S, mtu_bytes=network.mtu_bytes)):
                latency_s = min(latency_s, measure_latency(hosts, _TRIAL_DELAY_S))
        problems = problems_of_machine(network, num_cores=num_cores(), bits_per_s=bits_per_s, latency_s=latency_s)
        if not problems:
            return latency_s
    raise LaunchError(problems)


def _start_switch(hosts: Sequence[EmulatedHost], fabric: Fabric, table_fd: int) -> int:
    counters = Counters(table_fd, num_hosts=len(hosts), writable=True)
    return _fork(lambda: run_switch(fabric, [host.tun_fd for host in hosts], counters))


def _fork(work: Callable[[], None]) -> int:
    """Start a process of the lab's own, with precedence over the ranks."""
    pid = os.fork()
    if pid == 0:
        try:
            run_promptly(priority=2)
            work()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return pid


def _write_denied(fd: int, error: OSError) -> None:
    why = f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    text = f"the kernel refused to make the emulated network: {why}; run as root, outside of sandboxes"
    _write(fd, Outcome(problems=(text,)))


def _write(fd: int, outcome: Outcome) -> None:
    with os.fdopen(fd, "wb") as file:
        pickle.dump(outcome, file)
