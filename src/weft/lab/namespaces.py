"""The kernel's part of an emulated host: namespaces, a TUN device in each, and processes that die with their parent.

A host is a network namespace and a host name. Neither has a name in the file system, as `ip netns add` would give it:
they exist as long as a process has them open, so the kernel frees everything when the lab's processes end, however that
happens. Devices are set up by ioctl, because `ip` is missing on many machines.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import socket
import struct
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

DEVICE = "weft0"
"""The name of a host's device on the emulated network, in every host."""

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWPID, _CLONE_NEWNET = 0x00020000, 0x04000000, 0x20000000, 0x40000000
_PR_SET_PDEATHSIG, _PR_SET_TIMERSLACK = 1, 29
_MS_REC, _MS_PRIVATE, _MS_BIND = 0x4000, 0x40000, 0x1000
_CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}
_TUN = Path("/dev/net/tun")
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _SIOCSIFADDR, _SIOCSIFNETMASK, _SIOCSIFMTU = 0x8913, 0x8914, 0x8916, 0x891C, 0x8922
_IFF_UP = 0x1
_OWN_NAMESPACES = ("/proc/self/ns/net", "/proc/self/ns/uts")


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedHost:
    """An existing host: the file descriptors to enter it and to carry its packets."""

    name: str
    address: str
    net_fd: int
    """Its network namespace."""
    uts_fd: int
    """The namespace of its host name."""
    tun_fd: int
    """Packets it sends are read here, packets for it are written here."""

    def enter(self) -> None:
        """Make this process, and those it will start, processes of the host."""
        _call("setns", self.net_fd, _CLONE_NEWNET)
        _call("setns", self.uts_fd, _CLONE_NEWUTS)

    @contextmanager
    def visited(self) -> Iterator[None]:
        """Context inside the host: sockets and network files opened in it stay the host's."""
        with _back_home():
            self.enter()
            yield


def missing_here() -> list[str]:
    """Messages about what this machine or user lacks to emulate a network."""
    if sys.platform != "linux":
        return [
            f"the lab needs Linux's network namespaces, this is {sys.platform}; run it on Linux or in a virtual machine"
        ]
    status = Path("/proc/self/status").read_text()
    held = int(status.partition("CapEff:")[2].split()[0], 16)
    lacking = [name for name, bit in _CAPABILITIES.items() if not held >> bit & 1]
    problems = []
    if lacking:
        problems.append(
            f"the lab makes network namespaces and devices, which needs root, and this process lacks "
            f"{' and '.join(lacking)}; run it with sudo, or in a container started with --privileged"
        )
    if not _TUN.exists():
        problems.append(
            f"the lab needs {_TUN}, which is not there; load it with `modprobe tun`, or start the container with "
            f"--device {_TUN}"
        )
    return problems


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends; end now if it has ended already."""
    _call("prctl", _PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


def new_process_tree() -> None:
    """Put children of this process into a new process and mount namespace: when the first ends, all do."""
    _call("unshare", _CLONE_NEWPID | _CLONE_NEWNS)


def own_files(host_addresses: dict[str, str]) -> None:
    """Give this mount namespace a /proc of its process namespace, and an /etc/hosts that knows the emulated hosts."""
    _call("mount", b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
    # /proc is mounted over below: until then it can hold a file that is on no disk.
    _call("mount", b"tmpfs", b"/proc", b"tmpfs", 0, None)
    known = {"localhost": "127.0.0.1", **host_addresses}
    # twice, because torch's store looks its peers up under the IPv6 form of their IPv4 addresses
    names = "".join(f"{address} {name}\n::ffff:{address} {name}\n" for name, address in known.items())
    Path("/proc/hosts").write_text(f"::1 localhost\n{names}")
    if os.path.exists("/etc/hosts"):
        _call("mount", b"/proc/hosts", b"/etc/hosts", None, _MS_BIND, None)
    _call("umount2", b"/proc", 2)  # lazily: the file remains under /etc
    _call("mount", b"proc", b"/proc", b"proc", 0, None)


def make_host(name: str, address: str, *, netmask: str, mtu_bytes: int, tcp_buffer_bytes: int) -> EmulatedHost:
    """Make a host; this process does not stay in it."""
    with _back_home():
        _call("unshare", _CLONE_NEWNET | _CLONE_NEWUTS)
        socket.sethostname(name)
        tun_fd = _make_device(address, netmask=netmask, mtu_bytes=mtu_bytes)
        for setting in ("tcp_rmem", "tcp_wmem"):
            _set(f"net/ipv4/{setting}", f"4096 {tcp_buffer_bytes // 4} {tcp_buffer_bytes}")
        # The most common one, or the one every kernel allows here: with a machine's own default, labs would differ.
        _ = _set("net/ipv4/tcp_congestion_control", "cubic") or _set("net/ipv4/tcp_congestion_control", "reno")
        net_fd, uts_fd = (os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in _OWN_NAMESPACES)
    return EmulatedHost(name=name, address=address, net_fd=net_fd, uts_fd=uts_fd, tun_fd=tun_fd)


def _make_device(address: str, *, netmask: str, mtu_bytes: int) -> int:
    """Set up this namespace's loopback and its device on the emulated network; returns the device's descriptor."""
    tun_fd = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(tun_fd, _TUNSETIFF, struct.pack("16sH14x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for request, text in ((_SIOCSIFADDR, address), (_SIOCSIFNETMASK, netmask)):
            where = struct.pack("HH4s8x", socket.AF_INET, 0, socket.inet_aton(text))
            fcntl.ioctl(control, request, struct.pack("16s16s8x", DEVICE.encode(), where))
        fcntl.ioctl(control, _SIOCSIFMTU, struct.pack("16si20x", DEVICE.encode(), mtu_bytes))
        _set_up(control, "lo")
        _set("net/ipv6/conf/" + DEVICE + "/disable_ipv6", "1")  # the switch carries IPv4
        _set_up(control, DEVICE)
    return tun_fd


@contextmanager
def _back_home() -> Iterator[None]:
    """Context at whose end this process is in its present namespaces again: the lab's own processes are on no host."""
    home = [os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in _OWN_NAMESPACES]
    try:
        yield
    finally:
        for fd in home:
            _call("setns", fd, 0)
            os.close(fd)


def run_promptly(*, priority: int) -> None:
    """Give this process precedence over all that compute beside it."""
    _call("prctl", _PR_SET_TIMERSLACK, 1, 0, 0, 0)
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(priority))
    except OSError:  # some containers have no real-time share
        os.setpriority(os.PRIO_PROCESS, 0, -20)


def keep_cores_awake() -> None:
    """Keep idle cores from sleeping while this process lives: waking one up takes 0.1 ms in virtual machines."""
    with suppress(OSError):  # delays are a little longer then
        # The kernel drops the request when the file is closed, so it is left open.
        os.write(os.open("/dev/cpu_dma_latency", os.O_WRONLY | os.O_CLOEXEC), struct.pack("i", 0))


def run_normally() -> None:
    """Undo `run_promptly`."""
    _call("prctl", _PR_SET_TIMERSLACK, 0, 0, 0, 0)
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    os.setpriority(os.PRIO_PROCESS, 0, 0)


def _set_up(control: socket.socket, device: str) -> None:
    request = struct.pack("16sH22x", device.encode(), 0)
    (flags,) = struct.unpack_from("H", fcntl.ioctl(control, _SIOCGIFFLAGS, request), 16)
    fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sH22x", device.encode(), flags | _IFF_UP))


def _set(name: str, value: str) -> bool:
    """Set a kernel parameter of this namespace; returns False where the kernel lacks or protects it."""
    try:
        Path("/proc/sys", name).write_text(value)
    except (FileNotFoundError, PermissionError):
        return False
    return True


def _call(name: str, *arguments: int | bytes | None) -> None:
    """Call the C library; failure raises an OSError that names the function."""
    words: Sequence[object] = [ctypes.c_ulong(each) if isinstance(each, int) else each for each in arguments]
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*words) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)
