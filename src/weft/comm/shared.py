"""Collectives through the memory of one host: every rank reads what it needs where the others have it.

    direct    tensors that lie in an arena (gradient buckets, parameters) are read and written in place
    slots     other tensors pass through two slots a rank, a slotful at a time, and so does everything small

    all-reduce, direct     1 meet | 2 sum my slice of all rows, write it to all rows | 3 meet
    all-reduce, slots      1 copy in, meet | 2 sum my slice into my slot | 3 meet, copy out | again with the other slot
    small                  1 copy in, meet | 2 everybody sums everything

Ranks *meet* by counters (`signals.py`). A slot is written again only after a meeting later than the one that followed
its last use, hence two of them. An exchange that peers read a rank's own tensors in ends with a meeting.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch

from weft.comm.arena import Arena, round_up
from weft.comm.background import Background, Work
from weft.comm.mailbox import Mailbox
from weft.comm.reduction import Reduction, add_into, reduce_into
from weft.comm.segments import Segment
from weft.comm.signals import LINE_BYTES, Counter, Peer

SLOT_BYTES = 2**20
SMALL_BYTES = 2**15
"""Up to here everybody does all the work, and one meeting is enough."""

_OPERATIONS = ("all-reduce", "broadcast", "all-gather", "reduce-scatter", "all-to-all", "gather", "scatter")
_DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
_DESCRIPTION_WORDS = 8
_NOWHERE = -1


def control_bytes(num_ranks: int) -> int:
    """Of counters, descriptions, tables of splits and slots."""
    words = 2 * num_ranks * (_DESCRIPTION_WORDS + num_ranks)
    return num_ranks * LINE_BYTES + round_up(8 * words) + 2 * num_ranks * SLOT_BYTES


class SharedWire:
    """One group's ranks, all on one host, exchanging through its memory."""

    def __init__(
        self,
        memory: memoryview,
        *,
        index: int,
        peers: Sequence[Peer],
        mailbox: Mailbox,
        timeout_s: float,
        spin: bool,
        name: str,
    ) -> None:
        """`memory`: control_bytes, zeroed, the same for all ranks; `peers` are all of them, this one included."""
        self.mailbox = mailbox
        self._index = index
        self.size = len(peers)
        lines = [memory[rank * LINE_BYTES : (rank + 1) * LINE_BYTES] for rank in range(self.size)]
        counters = [
            Counter(line, owner=peer, timeout_s=timeout_s, spin=spin) for line, peer in zip(lines, peers, strict=True)
        ]
        self._mine = counters[index]
        self._others = tuple(counter for rank, counter in enumerate(counters) if rank != index)
        words = memory[self.size * LINE_BYTES : -2 * self.size * SLOT_BYTES].cast("q")
        step = _DESCRIPTION_WORDS + self.size
        tables = [words[place * step : (place + 1) * step] for place in range(2 * self.size)]
        self._tables = (tables[: self.size], tables[self.size :])
        self._talk = 0
        self._slot_memory = torch.frombuffer(memory[-2 * self.size * SLOT_BYTES :], dtype=torch.uint8)
        self._slots: dict[torch.dtype, list[list[torch.Tensor]]] = {}
        self._turn = 0
        self._num_arenas = 0
        self._arenas: weakref.WeakValueDictionary[int, Arena] = weakref.WeakValueDictionary()
        self._background = Background(name)

    # ------------------------------------------------------------------ memory

    def add_arena(self, segment: Segment, *, is_common: bool) -> Arena:
        """Memory for tensors to be exchanged in place. Ranks add theirs together, so that its number is the same."""
        self._num_arenas += 1
        arena = Arena(segment, number=self._num_arenas, index=self._index, num_ranks=self.size, is_common=is_common)
        self._arenas[arena.number] = arena
        return arena

    # ------------------------------------------------------------------ when

    def run(self, task: Callable[[], None]) -> None:
        """Exchange now."""
        self._background.run(task)

    def start(self, task: Callable[[], None]) -> Work:
        """Exchange beside the caller."""
        return self._background.start(task)

    # ------------------------------------------------------------------ collectives

    def all_reduce(self, tensor: torch.Tensor, op: Reduction, root: int | None = None) -> None:
        """In place; with a root, only its tensor matters afterwards."""
        flat = tensor.view(-1)
        if not flat.numel():
            return
        if flat.nbytes <= SMALL_BYTES:
            self._copy_in(flat)
            self._meet_about("all-reduce", flat, None)
            reduce_into([flat], self._slot_rows(flat), op)
            self._turn += 1
            return
        rows = self._meet_directly("all-reduce", flat)
        if rows is None:
            self._all_reduce_by_slots(flat, op)
            return
        start, stop = self._slice(flat.numel())
        terms = [row[start:stop] for row in rows]
        reduce_into(terms if root is None else [terms[root]], terms, op)
        self._meet()

    def _all_reduce_by_slots(self, flat: torch.Tensor, op: Reduction) -> None:
        room = SLOT_BYTES // flat.element_size()
        for number, chunk in enumerate(flat.split(room)):
            if number:
                self._copy_in(chunk)
                self._meet()
            rows = self._slot_rows(chunk)
            start, stop = self._slice(chunk.numel())
            if start < stop:
                terms = [row[start:stop] for row in rows]
                own = terms[self._index]
                reduce_into([own], terms, op)
            self._meet()
            for rank, row in enumerate(rows):
                start, stop = self._slice(chunk.numel(), rank)
                chunk[start:stop].copy_(row[start:stop])
            self._turn += 1

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        flat = tensor.view(-1)
        is_root = self._index == root
        room = SLOT_BYTES // flat.element_size()
        for number, chunk in enumerate(flat.split(room)):
            if is_root:
                self._copy_in(chunk)
            if number:
                self._meet()
            else:
                self._meet_about("broadcast", flat, None)
            if not is_root:
                chunk.copy_(self._slot_rows(chunk)[root])
            self._turn += 1

    def all_gather(self, outputs: Sequence[torch.Tensor] | None, tensor: torch.Tensor, *, name: str) -> None:
        """Rank k's tensor comes to the k-th output, here or, without outputs, elsewhere only."""
        flat = tensor.view(-1)
        if not flat.numel():
            return
        targets = [output.view(-1) for output in outputs] if outputs is not None else None
        rows = None
        if flat.nbytes > SMALL_BYTES:
            rows = self._meet_directly(name, flat)
            if rows is not None:
                self._copy_out(targets, rows, flat)
                self._meet()
                return
        else:
            self._copy_in(flat)
            self._meet_about(name, flat, None)
        room = SLOT_BYTES // flat.element_size()
        for number, chunk in enumerate(flat.split(room)):
            if number:
                self._copy_in(chunk)
                self._meet()
            first = number * room
            here = [target[first : first + chunk.numel()] for target in targets] if targets is not None else None
            self._copy_out(here, self._slot_rows(chunk), chunk)
            self._turn += 1

    def _copy_out(
        self, targets: Sequence[torch.Tensor] | None, rows: Sequence[torch.Tensor], own: torch.Tensor
    ) -> None:
        for rank, target in enumerate(targets or ()):
            source = own if rank == self._index else rows[rank]
            if target.data_ptr() != source.data_ptr():
                target.copy_(source)

    def arrive(self) -> Arrival:
        """The all-gather of memory that is everybody's: there is nothing to move, only to know that all are ready."""
        arrivals: list[int] = []
        self.run(lambda: arrivals.append(self._mine.post()))
        return Arrival(self._others, arrivals[0])

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor, *, add: bool) -> None:
        """`output` ends as, or grows by, this rank's part of the sum of all tensors."""
        flat, target = tensor.view(-1), output.view(-1)
        length = target.numel()
        if not length:
            return
        mine = slice(self._index * length, (self._index + 1) * length)
        rows = self._meet_directly("reduce-scatter", flat) if flat.nbytes > SMALL_BYTES else None
        if rows is not None:
            add_into(target, [row[mine] for row in rows], add=add)
            self._meet()
            return
        parts = flat.view(self.size, length)
        room = SLOT_BYTES // flat.element_size() // self.size
        for first in range(0, length, room):
            pieces = parts[:, first : first + room]
            self._copy_in(pieces)
            if first or flat.nbytes > SMALL_BYTES:
                self._meet()
            else:
                self._meet_about("reduce-scatter", flat, None)
            width = pieces.shape[1]
            within = slice(self._index * width, (self._index + 1) * width)
            terms = [slot[within] for slot in self._all_slots(flat.dtype)]
            add_into(target[first : first + width], terms, add=add)
            self._turn += 1

    def all_to_all(
        self, output: torch.Tensor, tensor: torch.Tensor, output_lengths: Sequence[int], input_lengths: Sequence[int]
    ) -> None:
        """Piece k of `tensor` goes to rank k; lengths are numbers of elements."""
        flat, target = tensor.view(-1), output.view(-1)
        tables = self._meet_about("all-to-all", flat, None, lengths=input_lengths)
        lengths = [table[_DESCRIPTION_WORDS:].tolist() for table in tables]
        received = [row[self._index] for row in lengths]
        if received != list(output_lengths):
            raise RuntimeError(f"all-to-all: the others send {received} elements, {list(output_lengths)} are awaited")
        room = SLOT_BYTES // flat.element_size() // self.size
        pieces, places = flat.split(list(input_lengths)), target.split(list(output_lengths))
        for first in range(0, max(max(row) for row in lengths), room):
            slot = self._all_slots(flat.dtype)[self._index]
            for rank, piece in enumerate(pieces):
                part = piece[first : first + room]
                slot[rank * room : rank * room + part.numel()].copy_(part)
            self._meet()
            for rank, place in enumerate(places):
                part = place[first : first + room]
                begin = self._index * room
                part.copy_(self._all_slots(flat.dtype)[rank][begin : begin + part.numel()])
            self._turn += 1

    def scatter(self, output: torch.Tensor, parts: Sequence[torch.Tensor] | None, root: int) -> None:
        """Part k of the root's list goes to rank k."""
        target = output.view(-1)
        room = SLOT_BYTES // target.element_size() // self.size
        for first in range(0, target.numel(), room):
            place = target[first : first + room]
            if parts is not None:
                slot = self._all_slots(target.dtype)[self._index]
                for rank, part in enumerate(parts):
                    begin = rank * place.numel()
                    slot[begin : begin + place.numel()].copy_(part.reshape(-1)[first : first + room])
            if first:
                self._meet()
            else:
                self._meet_about("scatter", target, None)
            begin = self._index * place.numel()
            place.copy_(self._all_slots(target.dtype)[root][begin : begin + place.numel()])
            self._turn += 1

    # ------------------------------------------------------------------ meetings

    def _meet(self) -> None:
        """Until all ranks are here."""
        count = self._mine.post()
        for other in self._others:
            other.wait(count)

    def _meet_directly(self, operation: str, flat: torch.Tensor) -> list[torch.Tensor] | None:
        """Meet; the rows of all ranks if all tensors lie in arenas. If not, the first chunks are in slots."""
        found = self._find(flat)
        room = SLOT_BYTES // flat.element_size()
        by_chunks = operation != "reduce-scatter"  # its slots are filled otherwise
        if found is None and by_chunks:
            self._copy_in(flat[:room])
        places = [(table[2], table[3]) for table in self._meet_about(operation, flat, found)]
        if all(number != _NOWHERE for number, _ in places):
            return [
                self._arenas[number].view(rank, offset, flat.nbytes, flat.dtype)
                for rank, (number, offset) in enumerate(places)
            ]
        if any(number != _NOWHERE for number, _ in places):  # some of us thought otherwise
            if found is not None and by_chunks:
                self._copy_in(flat[:room])
            self._meet()
        return None

    def _meet_about(
        self,
        operation: str,
        flat: torch.Tensor,
        found: tuple[int, int] | None,
        *,
        lengths: Sequence[int] | None = None,
    ) -> list[memoryview]:
        """Meet, having told the others what this is about; they must think the same. What all told is returned."""
        self._talk ^= 1  # like a slot, a table is written again only after the meeting after next
        tables = self._tables[self._talk]
        mine = tables[self._index]
        subject = _OPERATIONS.index(operation) * 256 + (_DTYPES.index(flat.dtype) if flat.dtype in _DTYPES else 255)
        num_bytes = 0 if lengths else flat.nbytes
        mine[0], mine[1] = subject, num_bytes
        mine[2], mine[3] = found or (_NOWHERE, 0)
        for rank, length in enumerate(lengths or ()):
            mine[_DESCRIPTION_WORDS + rank] = length
        self._meet()
        for rank, table in enumerate(tables):
            if table[0] != subject or table[1] != num_bytes:
                raise RuntimeError(
                    f"ranks disagree about an exchange: {_describe(subject, num_bytes)} on rank {self._index} of the "
                    f"group, {_describe(table[0], table[1])} on rank {rank}"
                )
        return tables

    def _find(self, flat: torch.Tensor) -> tuple[int, int] | None:
        """The arena a tensor lies in, and where in this rank's row."""
        for number, arena in self._arenas.items():
            offset = None if arena.is_common else arena.offset_of(flat)
            if offset is not None:
                return number, offset
        return None

    def is_common(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is the same memory on all ranks."""
        return any(arena.is_common and arena.offset_of(tensor) is not None for arena in self._arenas.values())

    # ------------------------------------------------------------------ slots

    def _slice(self, numel: int, rank: int | None = None) -> tuple[int, int]:
        """The part of a tensor that a rank reduces, in whole cache lines where that is possible."""
        rank = self._index if rank is None else rank
        width = -(-numel // (self.size * 64)) * 64
        return min(rank * width, numel), min((rank + 1) * width, numel)

    def _all_slots(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """Every rank's slot of this turn."""
        slots = self._slots.get(dtype)
        if slots is None:
            table = self._slot_memory.view(dtype).view(2, self.size, -1)
            slots = self._slots[dtype] = [list(half.unbind()) for half in table.unbind()]
        return slots[self._turn % 2]

    def _slot_rows(self, chunk: torch.Tensor) -> list[torch.Tensor]:
        numel = chunk.numel()
        return [slot[:numel] for slot in self._all_slots(chunk.dtype)]

    def _copy_in(self, chunk: torch.Tensor) -> None:
        self._all_slots(chunk.dtype)[self._index][: chunk.numel()].view(chunk.shape).copy_(chunk)


class Arrival:
    """A meeting this rank has come to and need not wait for at once."""

    __slots__ = ("_count", "_others")

    def __init__(self, others: Sequence[Counter], count: int) -> None:
        self._others = others
        self._count = count

    def wait(self) -> None:
        for other in self._others:
            other.wait(self._count)


def _describe(subject: int, num_bytes: int) -> str:
    operation, dtype = divmod(subject, 256)
    if not 0 <= operation < len(_OPERATIONS):
        return "something else"
    size = f" of {num_bytes} bytes" if num_bytes else ""
    return f"{_OPERATIONS[operation]}{size} of {_DTYPES[dtype] if dtype < len(_DTYPES) else 'another dtype'}"
