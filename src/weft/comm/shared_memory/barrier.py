"""Barrier, agreement table and staging slots in shared memory, for the ranks of one group on one host.

Ranks wait for each other by counters (`counters.py`). In the table each describes the exchange it is about to do, and
all descriptions must agree. A slot, or a table, is written again only after a barrier later than the one that followed
its last use; hence there are two of each.
"""

from __future__ import annotations

import bisect
import operator
import weakref
from collections.abc import Sequence
from functools import partial

import torch

from weft.comm.shared_memory.arena import Arena, round_up
from weft.comm.shared_memory.counters import LINE_BYTES, Counter, Peer, Waiting
from weft.comm.shared_memory.segments import Segment

SLOT_BYTES = 2**22
_CACHED_BYTES = 2**20
"""The part of a slot used at a time where barriers are cheap: it stays in a core's own cache."""

_OPERATIONS = ("all-reduce", "broadcast", "all-gather", "reduce-scatter", "all-to-all")
_DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
DESCRIPTION_WORDS = 8
_NOWHERE = -1
_ADDRESS = operator.itemgetter(0)


def control_bytes(num_ranks: int) -> int:
    """Bytes of counters, descriptions, tables of splits and slots."""
    words = 2 * num_ranks * (DESCRIPTION_WORDS + num_ranks)
    return num_ranks * LINE_BYTES + round_up(8 * words) + 2 * num_ranks * SLOT_BYTES


class Barrier:
    """One group's ranks, all on one host, seen from one of them."""

    def __init__(self, memory: memoryview, *, index: int, peers: Sequence[Peer], timeout_s: float, spin: bool) -> None:
        """`memory`: control_bytes, zeroed, the same for all ranks; `peers` are all of them, this one included."""
        self.index = index
        self.size = len(peers)
        lines = [memory[rank * LINE_BYTES : (rank + 1) * LINE_BYTES] for rank in range(self.size)]
        counters = [
            Counter(line, owner=peer, timeout_s=timeout_s, spin=spin) for line, peer in zip(lines, peers, strict=True)
        ]
        self._mine = counters[index]
        self._others = tuple(counter for rank, counter in enumerate(counters) if rank != index)
        words = memory[self.size * LINE_BYTES : -2 * self.size * SLOT_BYTES].cast("q")
        step = DESCRIPTION_WORDS + self.size
        tables = [words[place * step : (place + 1) * step] for place in range(2 * self.size)]
        self._tables = (tables[: self.size], tables[self.size :])
        self._current_table = 0
        self._slot_memory = torch.frombuffer(memory[-2 * self.size * SLOT_BYTES :], dtype=torch.uint8)
        self._typed_slots: dict[torch.dtype, list[list[torch.Tensor]]] = {}
        self.turn = 0
        """Slotfuls exchanged so far."""
        self._chunk_bytes = min(_CACHED_BYTES, SLOT_BYTES) if spin else SLOT_BYTES
        self._num_arenas = 0
        self._arenas: tuple[tuple[int, weakref.ref[Arena]], ...] = ()
        """By address."""

    def add_arena(self, segment: Segment, *, is_common: bool) -> Arena:
        """Memory for tensors to be exchanged in place. Ranks add theirs together, so that its number is the same."""
        self._num_arenas += 1
        arena = Arena(segment, number=self._num_arenas, index=self.index, num_ranks=self.size, is_common=is_common)
        alive = [each for each in self._arenas if each[1]() is not None]
        alive.append((arena.address, weakref.ref(arena)))
        self._arenas = tuple(sorted(alive, key=_ADDRESS))  # a new tuple: another thread may be looking
        return arena

    def _arena_of(self, tensor: torch.Tensor) -> Arena | None:
        """The arena in which a tensor lies."""
        arenas = self._arenas
        place = bisect.bisect_right(arenas, tensor.data_ptr(), key=_ADDRESS) - 1
        arena = arenas[place][1]() if place >= 0 else None
        return arena if arena is not None and arena.offset_of(tensor) is not None else None

    def wait(self) -> None:
        """Block until all ranks are here."""
        self._wait_for(self._mine.post())

    def arrive(self) -> Waiting:
        """Enter the barrier without waiting for the others."""
        return Waiting(partial(self._wait_for, self._mine.post()))

    def _wait_for(self, count: int) -> None:
        for other in self._others:
            other.wait(count)

    def share_rows(self, operation: str, flat: torch.Tensor, *, with_chunk: bool = True) -> list[torch.Tensor] | None:
        """A barrier, and all ranks' tensors if they all lie in arenas. If not, their first chunks are in the slots."""
        found = self._find(flat)
        chunk = flat[: self.chunk_numel(flat)]
        if found is None and with_chunk:
            self.copy_in(chunk)
        places = [(table[2], table[3]) for table in self.wait_agreed(operation, flat, found)]
        if all(number != _NOWHERE for number, _ in places):
            arenas = {arena.number: arena for _, known in self._arenas if (arena := known()) is not None}
            return [
                arenas[number].view(rank, offset, flat.nbytes, flat.dtype)
                for rank, (number, offset) in enumerate(places)
            ]
        if any(number != _NOWHERE for number, _ in places):  # some ranks have not filled their slots
            if found is not None and with_chunk:
                self.copy_in(chunk)
            self.wait()
        return None

    def wait_agreed(
        self,
        operation: str,
        flat: torch.Tensor,
        found: tuple[int, int] | None = None,
        *,
        lengths: Sequence[int] | None = None,
    ) -> list[memoryview]:
        """A barrier in which ranks must describe the same exchange; returns all descriptions."""
        self._current_table ^= 1  # like a slot, a table is written again only after the next barrier but one
        tables = self._tables[self._current_table]
        mine = tables[self.index]
        subject = _OPERATIONS.index(operation) * 256 + (_DTYPES.index(flat.dtype) if flat.dtype in _DTYPES else 255)
        num_bytes = 0 if lengths else flat.nbytes
        mine[0], mine[1] = subject, num_bytes
        mine[2], mine[3] = found or (_NOWHERE, 0)
        for rank, length in enumerate(lengths or ()):
            mine[DESCRIPTION_WORDS + rank] = length
        self.wait()
        for rank, table in enumerate(tables):
            if table[0] != subject or table[1] != num_bytes:
                raise RuntimeError(
                    f"ranks disagree about an exchange: {_describe(subject, num_bytes)} on rank {self.index} of the "
                    f"group, {_describe(table[0], table[1])} on rank {rank}"
                )
        return tables

    def _find(self, flat: torch.Tensor) -> tuple[int, int] | None:
        """The number of the arena a tensor lies in, and its offset in this rank's row."""
        arena = self._arena_of(flat) if flat.is_contiguous() else None
        offset = None if arena is None or arena.is_common else arena.offset_of(flat)
        return None if arena is None or offset is None else (arena.number, offset)

    def is_common(self, tensor: torch.Tensor) -> bool:
        """True if the tensor is the same memory on all ranks."""
        arena = self._arena_of(tensor)
        return arena is not None and arena.is_common

    def slice_of(self, numel: int, rank: int | None = None) -> slice:
        """The part of a tensor that a rank reduces, in whole cache lines where that is possible."""
        rank = self.index if rank is None else rank
        width = -(-numel // (self.size * 64)) * 64
        return slice(min(rank * width, numel), min((rank + 1) * width, numel))

    def chunk_numel(self, flat: torch.Tensor) -> int:
        """Elements of a tensor that pass through a slot at a time."""
        return self._chunk_bytes // flat.element_size()

    def slots(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """Every rank's slot of this turn."""
        slots = self._typed_slots.get(dtype)
        if slots is None:
            with torch.inference_mode(False):  # kept tensors that were made in that mode are of no use outside of it
                table = self._slot_memory.view(dtype).view(2, self.size, -1)
                slots = self._typed_slots[dtype] = [list(half.unbind()) for half in table.unbind()]
        return slots[self.turn % 2]

    def slot_rows(self, chunk: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's chunk of this turn."""
        return [slot[: chunk.numel()] for slot in self.slots(chunk.dtype)]

    def copy_in(self, chunk: torch.Tensor) -> None:
        """Put a chunk into this rank's slot."""
        self.slots(chunk.dtype)[self.index][: chunk.numel()].view(chunk.shape).copy_(chunk)


def _describe(subject: int, num_bytes: int) -> str:
    operation, dtype = divmod(subject, 256)
    if not 0 <= operation < len(_OPERATIONS):
        return "something else"
    size = f" of {num_bytes} bytes" if num_bytes else ""
    return f"{_OPERATIONS[operation]}{size} of {_DTYPES[dtype] if dtype < len(_DTYPES) else 'another dtype'}"
