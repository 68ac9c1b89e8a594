"""The switch: one process that reads packets from every host's device and writes them to another's when it is time.

The model is in `fabric.py`; this is the loop around the devices. It has precedence over the ranks (real-time priority
where the machine allows it), waits with microsecond timers, and counts deliveries and their lateness.
"""

from __future__ import annotations

import gc
import math
import os
import select
import time
from collections.abc import Sequence
from contextlib import suppress

from weft.lab.counters import LATE_S, Counters
from weft.lab.fabric import Fabric
from weft.lab.network import host_number

_MAX_PACKET_BYTES = 65536
_READS_AT_ONCE = 16
"""Packets read from one host before the others have their turn and due packets are delivered."""
_SPIN_S, _SPARSE_S = 0.00015, 0.001
"""Where packets are far apart, the end of each wait is spent spinning, because timers wake a process up late. Where
they are close together, that would cost a core for no benefit."""
_DESTINATION = slice(16, 20)  # of an IPv4 header
_IPV4, _TCP = 4, 6
_MAX_EMPTY_BYTES = 120
"""Largest packet without data: two headers with all their options."""
_ACK, _PUSH_ACK = 0x10, 0x18


def run_switch(fabric: Fabric, tun_fds: Sequence[int], counters: Counters) -> None:
    """Carry packets until this process is killed."""
    gc.disable()  # nothing here makes cycles, and a collection is a pause
    hosts = {fd: number for number, fd in enumerate(tun_fds)}
    table, own = counters.table, counters.switch_place
    last_s = -math.inf  # the last delivery
    while True:
        now_s = time.monotonic()
        for delivery in fabric.advance(now_s):
            place = counters.place(delivery.source, delivery.destination)
            if not _deliver(delivery.packet, tun_fds[delivery.destination]):
                table[place + 3] += 1
                continue
            table[place] += 1
            table[place + 1] += len(delivery.packet)
            table[own] += 1
            late_s = now_s - delivery.due_s
            if late_s > LATE_S:
                table[own + 1] += 1
                table[own + 2] = max(table[own + 2], int(late_s * 1e9))
            last_s = now_s
        due_s = fabric.next_s()
        wait_s = due_s - time.monotonic() - (_SPIN_S if due_s - last_s > _SPARSE_S else 0.0)
        ready, _, _ = select.select(tun_fds, [], [], None if math.isinf(wait_s) else max(0.0, wait_s))
        for fd in ready:
            for packet in _read(fd):
                destination = host_number(packet[_DESTINATION])
                if packet[0] >> 4 == _IPV4 and 0 <= destination < len(tun_fds) and destination != hosts[fd]:
                    urgent = len(packet) <= _MAX_EMPTY_BYTES and is_empty_acknowledgement(packet)
                    fabric.send(time.monotonic(), hosts[fd], destination, packet, urgent=urgent)
                else:
                    table[own + 3] += 1
        for drop in fabric.drops:
            table[counters.place(drop.source, drop.destination) + (2 if drop.by_chance else 3)] += 1
        fabric.drops.clear()


def is_empty_acknowledgement(packet: bytes) -> bool:
    """True for a plain TCP acknowledgement in IPv4: no data, no other flags."""
    header_bytes = (packet[0] & 0x0F) * 4
    if packet[9] != _TCP or len(packet) < header_bytes + 20:
        return False
    flags, tcp_header_bytes = packet[header_bytes + 13], (packet[header_bytes + 12] >> 4) * 4
    return flags in (_ACK, _PUSH_ACK) and len(packet) == header_bytes + tcp_header_bytes


def _read(fd: int) -> list[bytes]:
    """Packets waiting at a device, oldest first."""
    packets: list[bytes] = []
    with suppress(BlockingIOError):
        while len(packets) < _READS_AT_ONCE:
            packets.append(os.read(fd, _MAX_PACKET_BYTES))
    return packets


def _deliver(packet: bytes, fd: int) -> bool:
    """Returns False if the kernel had no room for the packet; TCP will send it again."""
    try:
        os.write(fd, packet)
    except OSError:
        return False
    return True
