"""Groups of ranks: how they exchange, and the bytes they have sent so far.

Groups are made by `process_groups.py` only. Host tensors of ranks on one host go through its memory, the rest through
torch.distributed: NCCL for tensors on GPUs, gloo for those of the host.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import NoReturn, cast

import torch
import torch.distributed as dist

from weft.comm.failures.activity import ExchangeRecord
from weft.comm.shared_memory.connect import Connection
from weft.comm.shared_memory.transport import SharedTransport
from weft.comm.stream_waits import StreamWaits, WaitWindow
from weft.comm.two_level import TwoLevel


@dataclass(slots=True)
class Traffic:
    """Calls, bytes and blocked seconds of one axis so far."""

    num_calls: int = 0
    sent_bytes: int = 0
    wait_s: float = 0.0
    """Seconds this rank was blocked in exchanges; what computation hid is not in it. On a GPU they are added a step
    later."""
    window: WaitWindow | None = None
    """Whoever measures a spell of time has the waits of it added here too."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)
    _stream_waits: StreamWaits | None = field(default=None, repr=False, compare=False)

    def time_stream_wait(self) -> AbstractContextManager[None]:
        """Context in which a stream of a GPU waits; `collect_stream_waits` adds the seconds once the wait is over."""
        with self._lock:
            if self._stream_waits is None:
                self._stream_waits = StreamWaits()
        return self._stream_waits.measure(self.window)

    def collect_stream_waits(self) -> None:
        """Add the waits of streams that are over by now, without waiting for any."""
        if self._stream_waits is not None:
            finished_s = self._stream_waits.take_finished_s()  # which are in their windows already
            with self._lock:
                self.wait_s += finished_s

    def add(self, *, num_calls: int = 0, sent_bytes: int = 0, wait_s: float = 0.0) -> None:
        """Add to the totals; groups of several threads share the traffic of their axis."""
        with self._lock:
            self.num_calls += num_calls
            self.sent_bytes += sent_bytes
            self.wait_s += wait_s
            if self.window is not None:
                self.window.wait_s += wait_s


class _Closed:
    """Placeholder for a destroyed process group: every use raises."""

    def __getattr__(self, name: str) -> NoReturn:
        raise RuntimeError("this process group is gone: its mesh was closed; make a new one")

    def __hash__(self) -> NoReturn:  # torch looks handles up in a dict before anything else
        self.__getattr__("")


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class Group:
    """Ranks that exchange with each other along an axis, for one purpose."""

    axis: str
    purpose: str
    ranks: tuple[int, ...]
    """Global ranks, in the order of the axis."""
    index: int
    """This rank's place in `ranks`."""
    handle: dist.ProcessGroup | None
    """None in a group of one, and in a fake world."""
    traffic: Traffic
    device: torch.device = torch.device("cpu")
    """The device on which this group's tensors must lie."""
    backend: str = "gloo"
    """The c10d backend that moves them, unless they go through shared memory."""
    communicator_bytes: int = 0
    """Device memory that went when the group's communicator was made. The first one also loads NCCL's kernels, and on a
    GPU that ranks share it is that of all of them."""
    shared: SharedTransport | None = None
    """The transport through host memory, if all ranks are on one host and use it."""
    levels: TwoLevel | None = None
    """The hierarchical collectives, if ranks are on several hosts and some share one."""
    connection: Connection | None = None
    """The means by which ranks of this host get more shared memory."""
    through_host: bool = False
    """Messages of CUDA tensors pass through host memory, because gloo can send only from there."""
    record: ExchangeRecord = field(default_factory=ExchangeRecord)
    """What the watch over waiting ranks reads."""

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def alone(self) -> Group:
        """A group of this rank only."""
        return replace(self, ranks=(self.ranks[self.index],), index=0, handle=None, shared=None, levels=None)

    @property
    def is_stream_ordered(self) -> bool:
        """True if exchanges run in the order of calls, like kernels of a stream, as on NCCL. Then messages have no
        tags, and two ranks that both send first deadlock."""
        return self.backend != "gloo"

    @property
    def waits_on_stream(self) -> bool:
        """True if waiting for an exchange blocks a stream of a GPU instead of the host."""
        return self.backend == "nccl"

    def wire(self, tensor: torch.Tensor) -> SharedTransport | None:
        """The shared-memory transport, if this tensor can use it."""
        return self.shared if tensor.device.type == "cpu" else None

    def level_wire(self, tensor: torch.Tensor, *, is_even: bool = False) -> TwoLevel | None:
        """The hierarchical collectives, if this tensor can use them; `is_even`: if hosts are of equal size."""
        levels = self.levels if tensor.device.type == "cpu" else None
        return None if levels is None or (is_even and not levels.is_even) else levels

    @property
    def host_wire(self) -> SharedTransport | None:
        """The shared-memory transport between this rank and those of the group on its host."""
        return self.shared if self.levels is None else self.levels.wire

    def close(self) -> None:
        """Let every later exchange fail."""
        self.shared = self.levels = self.connection = None
        if self.handle is not None:
            self.handle = cast(dist.ProcessGroup, _Closed())

    def __deepcopy__(self, memo: object) -> Group:
        """A copied model keeps its groups."""
        return self
