"""The switchboard: a thread of rank 0 that every rank keeps a connection to, and that passes a failure on to all.

Connections instead of messages in the store, because the kernel closes them when a process ends, however it ends and
whatever its Python threads were doing; no heartbeat can be late. What a rank sends is one JSON object per line:

    {"token", "rank", "host", "host_name"}   first, once
    {"failure": {...}}                       an error is ending this rank
    {"stuck": {...}}                         an exchange is about to time out, and where this rank is
    {"whereabouts": {...}}                   the answer to {"ask": true}
    {"left": true}                           this rank ends in order; its connection will close

and what it gets is {"joined": token} first, then {"ask": true}, {"closed": true} when rank 0 ends in order, or
{"failure": {...}, "tells": [ranks]}: the first failure, and on which ranks it has to be printed, one per host.

A connection counts only once it has answered with the token. Proxies of a service mesh accept every connection and
close it later, and another program may have the same port on another host: neither is the death of rank 0.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import selectors
import socket
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from torch.distributed.distributed_c10d import Store

from weft.comm.stuck_exchanges import Whereabouts, say_who_waits
from weft.hosts import host_id

_VERDICT_S = 0.2
"""Seconds to wait after an error for a peer's death that may have caused it: both arrive at almost the same time."""
_ANSWER_S = 2.0
"""Seconds to wait for the whereabouts of all ranks."""
_CONNECT_S = 5.0
_MOST_UNKNOWN_BYTES = 4096
"""Bytes taken from a connection that has not shown the token: any program may reach an open port."""
_KEEPALIVE_S = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 4}
"""A host that is gone is noticed after a minute; a switch that restarts is not."""

log = logging.getLogger("weft")


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a run ends."""

    rank: int
    host_name: str
    kind: str
    """The type of the error; empty if the process ended without one."""
    message: str
    is_told: bool
    """The rank prints it itself."""

    def __str__(self) -> str:
        what = f"{self.kind}: {self.message}" if self.kind else self.message
        return f"rank {self.rank} (on {self.host_name}) failed, and ends this run: {what}"


@dataclass(slots=True, kw_only=True)
class _Member:
    """A connected rank."""

    line: socket.socket
    rank: int = -1
    host: str = ""
    host_name: str = ""
    received: bytes = b""
    has_left: bool = False


@dataclass(slots=True, kw_only=True)
class _Inquiry:
    """A stuck exchange that ranks are asked about."""

    rank: int
    until_s: float
    told: dict[int, Whereabouts] = field(default_factory=dict)


class Switchboard:
    """Accepts the ranks' connections and decides which failure was the first."""

    def __init__(self) -> None:
        self.token = uuid.uuid4().hex
        is_dual = socket.has_dualstack_ipv6()
        self._server = socket.create_server(
            ("", 0), family=socket.AF_INET6 if is_dual else socket.AF_INET, backlog=1024, dualstack_ipv6=is_dual
        )
        self.port: int = self._server.getsockname()[1]
        self._wake, self._waked = socket.socketpair()
        self._members: dict[socket.socket, _Member] = {}
        self._reported: list[Failure] = []
        self._decide_at_s = 0.0
        self._inquiry: _Inquiry | None = None
        self._is_decided = False
        self._thread = threading.Thread(target=self._run, name="weft-switchboard", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End in order: ranks that are still there go on without a watch."""
        with suppress(OSError):
            self._wake.send(b"x")
        self._thread.join(timeout=2.0)

    def forget(self) -> None:
        """Close this process's copies of the connections, in a fork of rank 0."""
        for line in (self._server, self._wake, self._waked, *self._members):
            line.close()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._server, selectors.EVENT_READ)
            selector.register(self._waked, selectors.EVENT_READ)
            while True:
                is_busy = bool(self._reported or self._inquiry)
                for key, _ in selector.select(0.02 if is_busy else None):
                    if key.fileobj is self._waked:
                        self._send_all({"closed": True})
                        self.forget()
                        return
                    if key.fileobj is self._server:
                        self._accept(selector)
                    else:
                        self._read(selector, self._members[key.fileobj])  # type: ignore[index]
                self._decide()

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            line, _ = self._server.accept()
        except OSError as error:
            log.warning("the switchboard takes no more ranks (%s): the failures of others are noticed late", error)
            selector.unregister(self._server)
            return
        keep_alive(line)
        line.settimeout(1.0)
        self._members[line] = _Member(line=line)
        selector.register(line, selectors.EVENT_READ)

    def _read(self, selector: selectors.BaseSelector, member: _Member) -> None:
        problem = "its process ended without a word (killed, or out of memory)"
        try:
            received = member.line.recv(65536)
        except OSError as error:
            received = b""
            if error.errno == errno.ETIMEDOUT:
                problem = "its host has not answered for a minute"
        if not received:
            self._drop(selector, member)
            has_reported = any(one.rank == member.rank for one in self._reported)
            if member.rank >= 0 and not member.has_left and not has_reported:
                self._report(self._failure_of(member, "", problem))
            return
        *lines, member.received = (member.received + received).split(b"\n")
        for text in lines:
            try:
                self._take(member, json.loads(text))
            except (ValueError, KeyError, TypeError, OSError):  # not one of our ranks, or gone already
                self._drop(selector, member)
                return
        if member.rank < 0 and len(member.received) > _MOST_UNKNOWN_BYTES:
            self._drop(selector, member)

    def _drop(self, selector: selectors.BaseSelector, member: _Member) -> None:
        selector.unregister(member.line)
        del self._members[member.line]
        member.line.close()

    def _take(self, member: _Member, message: dict[str, Any]) -> None:
        if member.rank < 0:
            if message["token"] != self.token:
                raise ValueError
            member.line.sendall(as_line({"joined": self.token}))
            member.rank, member.host, member.host_name = message["rank"], message["host"], message["host_name"]
        elif "left" in message:
            member.has_left = True
        elif "failure" in message:
            self._report(self._failure_of(member, message["failure"]["kind"], message["failure"]["message"], told=True))
        elif "stuck" in message and self._inquiry is None and not self._is_decided:
            self._inquiry = _Inquiry(rank=member.rank, until_s=time.monotonic() + _ANSWER_S)
            self._inquiry.told[member.rank] = Whereabouts.from_json(message["stuck"])
            self._send_all({"ask": True})
        elif "whereabouts" in message and self._inquiry is not None:
            self._inquiry.told.setdefault(member.rank, Whereabouts.from_json(message["whereabouts"]))

    def _failure_of(self, member: _Member, kind: str, message: str, *, told: bool = False) -> Failure:
        return Failure(rank=member.rank, host_name=member.host_name, kind=kind, message=message, is_told=told)

    def _report(self, failure: Failure) -> None:
        if not self._reported:
            self._decide_at_s = time.monotonic() + _VERDICT_S
        self._reported.append(failure)

    def _decide(self) -> None:
        """Tell all ranks of the first failure: a stuck exchange, else a death, else the first error."""
        now = time.monotonic()
        if self._is_decided:
            self._reported.clear()
            return
        if self._inquiry is not None:
            if now < self._inquiry.until_s and len(self._inquiry.told) < len(self._members):
                return
            first = self._stuck(self._inquiry)
            self._inquiry = None
        elif self._reported and now >= self._decide_at_s:
            first = next((one for one in self._reported if not one.kind), self._reported[0])
        else:
            return
        self._is_decided = True
        self._reported.clear()
        self._send_all({"failure": asdict(first), "tells": self._tellers(first)})

    def _stuck(self, inquiry: _Inquiry) -> Failure:
        host_name = next((one.host_name for one in self._members.values() if one.rank == inquiry.rank), "")
        message = say_who_waits(inquiry.rank, inquiry.told)
        return Failure(rank=inquiry.rank, host_name=host_name, kind="", message=message, is_told=False)

    def _tellers(self, failure: Failure) -> list[int]:
        """The ranks that print a failure: the first one of each host, unless the failed rank does it there."""
        told_on = {one.host for one in self._members.values() if one.rank == failure.rank and failure.is_told}
        first: dict[str, int] = {}
        for member in sorted(self._members.values(), key=lambda one: one.rank):
            if member.rank >= 0 and member.host not in told_on:
                first.setdefault(member.host, member.rank)
        return list(first.values())

    def _send_all(self, message: dict[str, Any]) -> None:
        for member in self._members.values():
            if member.rank >= 0:
                with suppress(OSError):
                    member.line.sendall(as_line(message))


def reach_switchboard(store: Store, rank: int) -> tuple[socket.socket, dict[str, Any], Switchboard | None] | None:
    """This rank's connection, the address, and on rank 0 the switchboard; None, with a warning, where it cannot be
    reached. Rank 0 gives the address in the store; collective."""
    switchboard, host = None, host_id()
    if rank == 0:
        try:
            switchboard = Switchboard()
            said = {"port": switchboard.port, "token": switchboard.token}
        except OSError as error:
            said = {"problem": str(error)}
        place = {"host": host, "host_name": socket.gethostname(), "ip": _own_ip()}
        store.set("address", json.dumps({**said, **place}))
    address = json.loads(store.get("address"))
    problem = address.get("problem")
    # torchrun's rendezvous may be on another host than rank 0, and a host's name known to that host only.
    outside = os.environ.get("MASTER_ADDR"), address["host_name"], address["ip"]
    names = ["127.0.0.1"] if address["host"] == host else list(dict.fromkeys(filter(None, outside)))
    who = {"token": address.get("token"), "rank": rank, "host": host, "host_name": socket.gethostname()}
    for name in names if problem is None else ():
        try:
            return _call(name, address, who), address, switchboard
        except OSError as error:
            problem = f"{name} port {address['port']}: {error}"
    level = logging.WARNING if os.environ.get("LOCAL_RANK", "0") == "0" else logging.INFO  # not once per rank
    text = "no watch over failed ranks (%s): over NCCL a dead rank is noticed only after the timeout"
    log.log(level, text, problem)
    if switchboard is not None:
        switchboard.close()
    return None


def _call(name: str, address: dict[str, Any], who: dict[str, Any]) -> socket.socket:
    """A connection to the switchboard; OSError if something else answers, or nothing."""
    line = socket.create_connection((name, address["port"]), timeout=_CONNECT_S)
    try:
        keep_alive(line)
        line.sendall(as_line(who))
        expected, answer = as_line({"joined": address["token"]}), b""
        while len(answer) < len(expected):  # not more: what follows is for the watch
            received = line.recv(len(expected) - len(answer))
            if not received:
                raise ConnectionError("closed without an answer")
            answer += received
        if answer != expected:
            raise ConnectionError("another program answers there")
    except OSError:
        line.close()
        raise
    return line


def _own_ip() -> str | None:
    """The address from which this host would reach others; nothing is sent."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # reserved for documentation: only the route matters
        return str(probe.getsockname()[0])
    return None


def as_line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def keep_alive(line: socket.socket) -> None:
    """Let the kernel notice that the other host is gone."""
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE_S.items():
        if hasattr(socket, name):
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
