"""Where servers listen for other hosts, and the key without which nobody reaches them there.

Nothing listens at an address of the network unless it was given, and never without a key.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

from weft.errors import LaunchError
from weft.server.protocol.keys import read_key, write_key

_ANY = ("", "*", "0.0.0.0", "::", "[::]")
_MOST_PORT = 65535


def read_address(text: str) -> tuple[str, int]:
    """Host (in numbers) and port of HOST or HOST:PORT; raises LaunchError."""
    host, _, port = text.removeprefix("tcp://").partition(":")
    if host in _ANY:
        raise LaunchError(
            f'servers listen at one address, and "{text}" stands for all of them; give the one at which other hosts '
            "reach this one"
        )
    if not (port.isdecimal() and int(port) <= _MOST_PORT) and port:
        raise LaunchError(f'"{text}" is no address to listen at; give HOST or HOST:PORT, a port up to {_MOST_PORT}')
    try:
        found = socket.getaddrinfo(host, None, family=socket.AF_INET, type=socket.SOCK_STREAM)
    except OSError as error:
        raise LaunchError(
            f'no IPv4 address is known of the host "{host}" to listen at ({error.strerror}); give the address at which '
            "other hosts reach this one"
        ) from None
    return str(found[0][4][0]), int(port or 0)


def key_missing(text: str) -> str:
    """What is wrong with listening at this address without a key."""
    return (
        f"whoever reaches servers at {text} needs the job's key: give --key FILE (WEFT_KEY) beside --listen "
        "(WEFT_LISTEN); the file is made if it is not there"
    )


def listen_at(text: str | None, key_file: Path | str | None) -> dict[str, Any]:
    """The options of `LocalServers` that listen at HOST or HOST:PORT, with the job's key in a file, which is made if it
    is not there; none, so that they are reached on this host alone, where no address is given."""
    if text is None:
        return {}
    if key_file is None:
        raise LaunchError(key_missing(text))
    path, (host, port) = Path(key_file), read_address(text)
    if path.exists():
        read_key(path)  # the servers do, too, after seconds
    else:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LaunchError(f"cannot make {path.parent}, the folder of the job's key: {error.strerror}") from None
        write_key(path)
    return {"tcp_host": host, "port": port, "key_file": path}
