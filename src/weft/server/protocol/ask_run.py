"""What a worker that joins a running job asks first, with nothing but the address of its first server."""

from __future__ import annotations

import secrets
import threading
import time
from dataclasses import dataclass
from typing import Any

from weft.errors import LaunchError
from weft.server.protocol.connection import ServerConnection
from weft.server.protocol.keys import JobKey
from weft.server.protocol.message import Kind, Message, read_object

ASK_EVERY_S = 0.5
HOLD_EVERY_S = 1.0
_SESSION_BITS = 63
_FIELDS: dict[str, type | tuple[type, ...]] = {
    "job": str, "addresses": list, "worker": int, "num_missing": int, "has_begun": bool, "is_settled": bool,
    "described": dict,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundRun:
    """A run that may be joined."""

    job: str
    addresses: tuple[str, ...]
    """Of all its servers, in their order."""
    worker: int
    """A number that no other worker has."""
    has_begun: bool
    """Its servers have weights."""
    asker: int
    """Who was given this number."""
    described: dict[str, Any]
    """What a worker of it must have alike (`plan/shared_fields.py`)."""


def ask_run(address: str, key: JobKey | None, *, timeout_s: float) -> FoundRun:
    """Ask the first server of a run; raises LaunchError if nobody answers, or not all servers are there in time."""
    connection, asker = ServerConnection([address], key), secrets.randbits(_SESSION_BITS)
    deadline = time.monotonic() + timeout_s
    try:
        while (said := _answer(connection, asker, deadline, timeout_s))["job"] == "":
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"the server at {address} waits for {said['num_missing']} more servers of its run (for "
                    f"{timeout_s:g} s by now); start these first"
                )
            time.sleep(ASK_EVERY_S)
    finally:
        connection.close()
    return FoundRun(
        job=said["job"],
        addresses=tuple(map(str, said["addresses"])),
        worker=said["worker"],
        has_begun=said["has_begun"],
        asker=asker,
        described=said["described"],
    )


def described_run(address: str, key: JobKey | None, *, timeout_s: float) -> dict[str, Any]:
    """What a run says of itself, as soon as its first server answers; raises LaunchError if it does not."""
    connection = ServerConnection([address], key)
    try:
        deadline = time.monotonic() + timeout_s
        found: dict[str, Any] = _answer(connection, secrets.randbits(_SESSION_BITS), deadline, timeout_s)["described"]
        return found
    finally:
        connection.close()


def _answer(connection: ServerConnection, asker: int, deadline_s: float, timeout_s: float) -> dict[str, Any]:
    while (said := _ask(connection, asker)) is None:
        if time.monotonic() > deadline_s:
            raise LaunchError(
                f"no server answers at {connection.addresses[0]} (waited {timeout_s:g} s): look whether the address is "
                "that of the first server, the port open, and the key that of the same job"
            )
    return said


class HeldNumber:
    """Keeps the number 0 for this process until it has joined, or ends, or lets go of it."""

    def __init__(self, address: str, key: JobKey | None, asker: int) -> None:
        self._ends = threading.Event()
        arguments = (address, key, asker, self._ends)  # not this object, which is gone when nobody needs the number
        threading.Thread(target=_hold, args=arguments, name="weft-number", daemon=True).start()

    def close(self) -> None:
        self._ends.set()

    def __del__(self) -> None:
        self.close()


def _hold(address: str, key: JobKey | None, asker: int, ends: threading.Event) -> None:
    connection = ServerConnection([address], key)
    while not ends.wait(HOLD_EVERY_S):
        said = _ask(connection, asker)
        if said is not None and (said["is_settled"] or said["worker"] != 0):
            break
    connection.close()


def _ask(connection: ServerConnection, asker: int) -> dict[str, Any] | None:
    connection.send(Message(kind=Kind.ASK_RUN, session=asker))
    found = connection.receive(ASK_EVERY_S)
    if not isinstance(found, Message) or found.kind != Kind.RUN:
        return None
    return read_object(found, _FIELDS)
