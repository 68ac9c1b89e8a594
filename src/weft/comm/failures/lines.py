"""Lines between ranks and the failure server, and lines to the terminal."""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress
from typing import Any

_TCP_SETTINGS = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 60_000}
"""A host that is gone is noticed after a minute, also if something was sent to it; a switch that restarts is not."""


def print_line(text: str | None) -> None:
    """Write a line to this process's stderr, whatever its other threads are printing."""
    if text:
        with suppress(OSError):
            os.write(2, f"weft: {text}\n".encode())


def as_line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def keep_alive(connection: socket.socket) -> None:
    """Let the kernel notice that the other host is gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _TCP_SETTINGS.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
