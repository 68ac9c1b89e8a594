"""The address that a rank offers to the others: of gloo's chosen interface, or the one the host's name resolves to.

A host whose name resolves to 127.0.0.1 offers an address that no other host can reach, and ranks cannot connect.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys

_GET_ADDRESS = 0x8915  # SIOCGIFADDR
_NAME_BYTES = 15


def addresses() -> dict[str, str]:
    """IPv4 address by interface, as far as this system tells."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex() if sys.platform == "linux" else ():
            request = struct.pack("256s", name.encode()[:_NAME_BYTES])
            try:
                answer = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, request)
            except OSError:  # it has none
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def offered() -> tuple[str, str]:
    """(interface, address) that gloo offers here; a question mark for an unknown one."""
    here = addresses()
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if chosen:
        return chosen, here.get(chosen, "?")
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        address = "127.0.0.1"  # as gloo does where the name does not resolve
    return next((name for name, its in here.items() if its == address), "?"), address


def advice() -> str:
    """Advice for ranks that do not find each other."""
    interface, address = offered()
    others = [name for name, its in addresses().items() if not its.startswith("127.") and name != interface]
    hint = f"; set GLOO_SOCKET_IFNAME to the interface that leads to the other hosts ({', '.join(others)})"
    return f"this rank offers {address} (interface {interface}){hint if others else ''}"
