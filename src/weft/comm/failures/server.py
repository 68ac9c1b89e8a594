"""The failure server: a thread of rank 0 to which every rank keeps a connection, and which tells all of a failure.

Connections instead of messages in the store, because the kernel closes them when a process ends, however it ends and
whatever its Python threads were doing; no heartbeat can be late. What a rank sends is one JSON object per line:

    {"token", "rank", "host", "host_name", "pid"}   first, once
    {"failure": {...}, "status": {...}}      an error is ending this rank
    {"stuck": {...}, "urgency": "late"}      this rank has waited for long (`inquiries.py`), and where it is
    {"status": {...}, "asked": "late"}       where this rank is, the answer to {"ask": "late"}
    {"went_on": seconds}                     a wait that was reported is over
    {"left": {...}}                          this rank ends normally; its connection will close

and what it receives is {"joined": token} first, then any of

    {"ask": "late"}                          where are you? "look": as far as can be said at once
    {"asked": true}                          all ranks were asked already about your wait
    {"stacks": reason}                       write the stacks of your threads to a file
    {"closed": true}                         rank 0 ends normally
    {"failure": {...}, "printed_by": [...]}  the first failure, and the ranks that have to print it, one per host

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
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch.distributed.distributed_c10d import Store

from weft.comm.failures.inquiries import Inquiries, RankProcess
from weft.comm.failures.limits import Limits
from weft.comm.failures.lines import as_line, keep_alive, print_line
from weft.comm.failures.rank_status import RankStatus
from weft.hosts import host_id

_DECISION_DELAY_S = 0.2
"""Seconds to wait after an error for the end of another process that may have caused it: both are noticed at about the
same time."""
_CONNECT_S = 5.0
_MOST_UNKNOWN_BYTES = 4096
"""Bytes taken from a connection that has not shown the token: any program may reach an open port."""
log = logging.getLogger("weft")


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a run ends."""

    rank: int
    host_name: str
    kind: str
    """The type of the error; empty if the process ended without one."""
    message: str
    prints_itself: bool
    """The rank that failed prints the message itself."""

    def __str__(self) -> str:
        what = f"{self.kind}: {self.message}" if self.kind else self.message
        return f"rank {self.rank} (on {self.host_name}) failed, and ends this run: {what}"


@dataclass(slots=True, kw_only=True)
class _Client:
    """A connected rank."""

    connection: socket.socket
    rank: int = -1
    host: str = ""
    host_name: str = ""
    pid: int = 0
    received: bytes = b""
    has_left: bool = False


class FailureServer:
    """Accepts the ranks' connections and decides which failure was the first."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.stacks_folder = ""
        """Where ranks write their stacks, as messages say."""
        self.token = uuid.uuid4().hex
        is_dual = socket.has_dualstack_ipv6()
        self._listener = socket.create_server(
            ("", 0), family=socket.AF_INET6 if is_dual else socket.AF_INET, backlog=1024, dualstack_ipv6=is_dual
        )
        self.port: int = self._listener.getsockname()[1]
        self._wake_sender, self._wake_receiver = socket.socketpair()
        self._clients: dict[socket.socket, _Client] = {}
        self._reported: list[Failure] = []
        self._decide_at_s = 0.0
        self._inquiries = Inquiries(limits or Limits())
        self._is_decided = False
        self._thread = threading.Thread(target=self._run, name="weft-failure-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End normally: ranks that still run continue without a watch."""
        with suppress(OSError):
            self._wake_sender.send(b"x")
        self._thread.join(timeout=2.0)

    def close_sockets(self) -> None:
        """Close all connections; in a fork of rank 0, its copies of them."""
        for connection in (self._listener, self._wake_sender, self._wake_receiver, *self._clients):
            connection.close()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._wake_receiver, selectors.EVENT_READ)
            while True:
                is_busy = bool(self._reported or self._inquiries.is_open)
                for key, _ in selector.select(0.02 if is_busy else None):
                    if key.fileobj is self._wake_receiver:
                        self._send_all({"closed": True})
                        self.close_sockets()
                        return
                    if key.fileobj is self._listener:
                        self._accept(selector)
                    else:
                        self._read(selector, self._clients[key.fileobj])  # type: ignore[index]
                self._decide()

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            log.warning("the failure server accepts no more ranks (%s): failures of the others are noticed late", error)
            selector.unregister(self._listener)
            return
        keep_alive(connection)
        connection.settimeout(1.0)
        self._clients[connection] = _Client(connection=connection)
        selector.register(connection, selectors.EVENT_READ)

    def _read(self, selector: selectors.BaseSelector, client: _Client) -> None:
        problem = "its process ended without an error message (killed, or out of memory)"
        try:
            received = client.connection.recv(65536)
        except OSError as error:
            received = b""
            if error.errno == errno.ETIMEDOUT:
                problem = "its host has not answered for a minute"
        if not received:
            self._drop(selector, client)
            has_reported = any(one.rank == client.rank for one in self._reported)
            if client.rank >= 0 and not client.has_left and not has_reported:
                self._report(self._failure_of(client, "", problem))
            return
        *lines, client.received = (client.received + received).split(b"\n")
        for text in lines:
            try:
                self._handle(client, json.loads(text))
            except (ValueError, KeyError, TypeError, OSError):  # not one of our ranks, or gone already
                self._drop(selector, client)
                return
        if client.rank < 0 and len(client.received) > _MOST_UNKNOWN_BYTES:
            self._drop(selector, client)

    def _drop(self, selector: selectors.BaseSelector, client: _Client) -> None:
        selector.unregister(client.connection)
        del self._clients[client.connection]
        client.connection.close()

    def _handle(self, client: _Client, message: dict[str, Any]) -> None:
        if client.rank < 0:
            if message["token"] != self.token:
                raise ValueError
            client.connection.sendall(as_line({"joined": self.token}))
            client.rank, client.host, client.host_name = message["rank"], message["host"], message["host_name"]
            client.pid = message.get("pid", 0)
        elif "left" in message:
            client.has_left = True
            self._inquiries.leave(client.rank, RankStatus.from_json(message["left"]))
        elif "failure" in message:
            kind, text = message["failure"]["kind"], message["failure"]["message"]
            self._inquiries.leave(client.rank, RankStatus.from_json(message["status"]))
            self._report(self._failure_of(client, kind, text, prints_itself=True))
        elif "stuck" in message and not self._is_decided:
            if self._inquiries.begin(client.rank, RankStatus.from_json(message["stuck"]), message["urgency"]):
                self._send_all({"ask": self._inquiries.urgency})
            else:
                client.connection.sendall(as_line({"asked": True}))
        elif "status" in message:
            self._inquiries.answer(client.rank, RankStatus.from_json(message["status"]), message["asked"])
        elif "went_on" in message:
            print_line(self._inquiries.go_on(client.rank, message["went_on"]))

    def _failure_of(self, client: _Client, kind: str, message: str, *, prints_itself: bool = False) -> Failure:
        return Failure(
            rank=client.rank, host_name=client.host_name, kind=kind, message=message, prints_itself=prints_itself
        )

    def _report(self, failure: Failure) -> None:
        if not self._reported:
            self._decide_at_s = time.monotonic() + _DECISION_DELAY_S
        self._reported.append(failure)

    def _decide(self) -> None:
        """Tell all ranks of the first failure: a stuck exchange, else a process that ended, else the first error."""
        now = time.monotonic()
        if self._is_decided:
            self._reported.clear()
            return
        num_ranks = sum(one.rank >= 0 and not one.has_left for one in self._clients.values())
        found = self._inquiries.decide(self._processes()) if self._inquiries.may_decide(num_ranks) else None
        if found is not None:
            self._send_all({"stacks": found.text})
            text = f"{found.text}. Stacks of all ranks: {self.stacks_folder}"
            if not found.ends:
                print_line(f"{text}; the run keeps waiting")
                return
            host_name = next((one.host_name for one in self._clients.values() if one.rank == found.rank), "")
            first = Failure(rank=found.rank, host_name=host_name, kind="", message=text, prints_itself=False)
        elif self._reported and now >= self._decide_at_s and not self._inquiries.is_open:
            first = next((one for one in self._reported if not one.kind), self._reported[0])
            if why := self._inquiries.explain_error():
                first = replace(first, message=f"{first.message}; {why}")
        else:
            return
        self._is_decided = True
        self._reported.clear()
        self._send_all({"failure": asdict(first), "printed_by": self._printing_ranks(first)})

    def _processes(self) -> dict[int, RankProcess]:
        here = host_id()
        return {
            one.rank: RankProcess(host_name=one.host_name, pid=one.pid, is_here=one.host == here)
            for one in self._clients.values()
            if one.rank >= 0 and not one.has_left
        }

    def _printing_ranks(self, failure: Failure) -> list[int]:
        """The ranks that print a failure: the first one of each host, unless the failed rank does it there."""
        printed_on = {one.host for one in self._clients.values() if one.rank == failure.rank and failure.prints_itself}
        first: dict[str, int] = {}
        for client in sorted(self._clients.values(), key=lambda one: one.rank):
            if client.rank >= 0 and client.host not in printed_on:
                first.setdefault(client.host, client.rank)
        return list(first.values())

    def _send_all(self, message: dict[str, Any]) -> None:
        for client in self._clients.values():
            if client.rank >= 0:
                with suppress(OSError):
                    client.connection.sendall(as_line(message))


def connect_to_failure_server(
    store: Store, rank: int, limits: Limits | None = None
) -> tuple[socket.socket, dict[str, Any], FailureServer | None] | None:
    """This rank's connection, the address, and on rank 0 the server; None, with a warning, where it cannot be
    reached. Rank 0 gives the address in the store; collective."""
    server, host = None, host_id()
    if rank == 0:
        try:
            server = FailureServer(limits)
            said = {"port": server.port, "token": server.token}
        except OSError as error:
            said = {"problem": str(error)}
        place = {"host": host, "host_name": socket.gethostname(), "ip": _own_ip(), "pid": os.getpid()}
        store.set("address", json.dumps({**said, **place}))
    address = json.loads(store.get("address"))
    problem = address.get("problem")
    # torchrun's rendezvous may be on another host than rank 0, and a host's name known to that host only.
    outside = os.environ.get("MASTER_ADDR"), address["host_name"], address["ip"]
    names = ["127.0.0.1"] if address["host"] == host else list(dict.fromkeys(filter(None, outside)))
    who = {
        "token": address.get("token"),
        "rank": rank,
        "host": host,
        "host_name": socket.gethostname(),
        "pid": os.getpid(),
    }
    for name in names if problem is None else ():
        try:
            return _connect(name, address, who), address, server
        except OSError as error:
            problem = f"{name} port {address['port']}: {error}"
    level = logging.WARNING if os.environ.get("LOCAL_RANK", "0") == "0" else logging.INFO  # not once per rank
    text = "no watch over failed ranks (%s): over NCCL a dead rank is noticed only after the timeout"
    log.log(level, text, problem)
    if server is not None:
        server.close()
    return None


def _connect(name: str, address: dict[str, Any], who: dict[str, Any]) -> socket.socket:
    """A connection to the failure server; OSError if something else answers, or nothing."""
    connection = socket.create_connection((name, address["port"]), timeout=_CONNECT_S)
    try:
        keep_alive(connection)
        connection.sendall(as_line(who))
        expected, answer = as_line({"joined": address["token"]}), b""
        while len(answer) < len(expected):  # not more: what follows is for the watch
            received = connection.recv(len(expected) - len(answer))
            if not received:
                raise ConnectionError("closed without an answer")
            answer += received
        if answer != expected:
            raise ConnectionError("another program answers there")
    except OSError:
        connection.close()
        raise
    return connection


def _own_ip() -> str | None:
    """The address from which this host would reach others; nothing is sent."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # reserved for documentation: only the route matters
        return str(probe.getsockname()[0])
    return None
