"""Delays, rates and processor shares of an emulated network, measured inside it.

All hosts share one clock, so a delay is measured one way. Rates are counted by the receiving host's device, headers and
retransmissions included, while a warmed-up TCP stream keeps the lines busy: the bytes that TCP hands to its reader
arrive in bursts where a lost packet was sent again.
"""

from __future__ import annotations

import functools
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TextIO

from weft.lab.namespaces import DEVICE, EmulatedHost, run_normally, run_promptly

_STAMP = struct.Struct("d")
_BUFFER_BYTES = 1 << 20
_PRIORITY = 1
"""Below the switch, above everything else on the machine, so that other load is not measured."""


def measure_delays(
    source: EmulatedHost, destination: EmulatedHost, *, num_probes: int, spacing_s: float, timeout_s: float
) -> list[float]:
    """Delays in seconds of the small datagrams that arrive, sorted."""
    with _socket_in(destination, socket.SOCK_DGRAM) as receiver, _socket_in(source, socket.SOCK_DGRAM) as sender:
        receiver.bind((destination.address, 0))
        run_promptly(priority=_PRIORITY)
        try:
            return sorted(_probe(sender, receiver, num_probes, spacing_s, timeout_s))
        finally:
            run_normally()


def measure_rates(
    pairs: Sequence[tuple[EmulatedHost, EmulatedHost]], *, warm_up_s: float, window_s: float
) -> list[float]:
    """Bits per second that each pair's receiver gets while one TCP stream per pair runs, all at once."""
    with ExitStack() as opened:
        streams = [tuple(map(opened.enter_context, _stream(*pair))) for pair in pairs]
        counts = [opened.enter_context(_device_counts(destination)) for _, destination in pairs]
        begin_s = time.monotonic() + warm_up_s
        receivers = [
            _fork(functools.partial(_receive, count, accepted, begin_s, begin_s + window_s))
            for count, (_, accepted) in zip(counts, streams, strict=True)
        ]
        senders = [_fork(functools.partial(_send, stream)) for stream, _ in streams]
    rates = [_result(task) * 8 for task in receivers]
    for pid, read_fd in senders:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(read_fd)
    return rates


def measure_compute(hosts: Sequence[EmulatedHost], *, window_s: float) -> list[float]:
    """Processor time per second of wall time of one busy process in each host, all at once."""

    def work(host: EmulatedHost) -> float:
        host.enter()
        time.sleep(window_s / 4)  # until the throttle has seen it
        begin_s, used_s = time.monotonic(), time.process_time()
        while time.monotonic() < begin_s + window_s:
            pass
        return (time.process_time() - used_s) / (time.monotonic() - begin_s)

    return [_result(task) for task in [_fork(functools.partial(work, host)) for host in hosts]]


def _socket_in(host: EmulatedHost, kind: socket.SocketKind) -> socket.socket:
    with host.visited():
        return socket.socket(socket.AF_INET, kind)


def _stream(source: EmulatedHost, destination: EmulatedHost) -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection, the sender's first."""
    with _socket_in(destination, socket.SOCK_STREAM) as listener:
        listener.bind((destination.address, 0))
        listener.listen(1)
        stream = _socket_in(source, socket.SOCK_STREAM)
        # so that the kernel does not go on sending what it has buffered when the sender is killed
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        stream.connect(listener.getsockname())
        return stream, listener.accept()[0]


def _device_counts(host: EmulatedHost) -> TextIO:
    """The file with the traffic counts of a host's devices."""
    with host.visited():
        return open("/proc/self/net/dev")


def _probe(
    sender: socket.socket, receiver: socket.socket, num_probes: int, spacing_s: float, timeout_s: float
) -> list[float]:
    """The delay of each datagram that arrived; they are sent without waiting for one another."""
    taken: list[float] = []
    sent, next_s = 0, time.monotonic()
    deadline_s = next_s + num_probes * spacing_s + timeout_s
    while len(taken) < num_probes and (now_s := time.monotonic()) < deadline_s:
        if sent < num_probes and now_s >= next_s:
            sender.sendto(_STAMP.pack(time.monotonic()), receiver.getsockname())
            sent, next_s = sent + 1, next_s + spacing_s
        until_s = next_s if sent < num_probes else deadline_s
        if select.select([receiver], [], [], max(0.0, until_s - time.monotonic()))[0]:
            data = receiver.recv(_STAMP.size)
            taken.append(time.monotonic() - _STAMP.unpack(data)[0])
    return taken


def _receive(counts: TextIO, stream: socket.socket, begin_s: float, end_s: float) -> float:
    """Bytes per second that the host's device received between two moments, while the stream is read."""
    run_promptly(priority=_PRIORITY)
    buffer = bytearray(_BUFFER_BYTES)
    marks: list[tuple[float, int]] = []
    for until_s in (begin_s, end_s):
        while (left_s := until_s - time.monotonic()) > 0:
            if select.select([stream], [], [], left_s)[0]:
                stream.recv_into(buffer)
        marks.append((time.monotonic(), _received_bytes(counts)))
    (first_s, first_bytes), (last_s, last_bytes) = marks
    return (last_bytes - first_bytes) / (last_s - first_s)


def _received_bytes(counts: TextIO) -> int:
    """Bytes that a host has received over the emulated network."""
    counts.seek(0)
    (line,) = (line for line in counts.read().splitlines() if line.strip().startswith(f"{DEVICE}:"))
    return int(line.partition(":")[2].split()[0])


def _send(stream: socket.socket) -> float:
    """Send until killed."""
    run_promptly(priority=_PRIORITY)
    data = bytes(_BUFFER_BYTES)
    while True:
        stream.sendall(data)


def _fork(work: Callable[[], float]) -> tuple[int, int]:
    """Do some work in a process of its own; returns its id and the descriptor to read its result from."""
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(write_fd, _STAMP.pack(work()))
        finally:
            os._exit(0)
    os.close(write_fd)
    return pid, read_fd


def _result(task: tuple[int, int]) -> float:
    """The result of the process; 0 if it failed."""
    pid, read_fd = task
    data = os.read(read_fd, _STAMP.size)
    os.close(read_fd)
    os.waitpid(pid, 0)
    return float(_STAMP.unpack(data)[0]) if data else 0.0
