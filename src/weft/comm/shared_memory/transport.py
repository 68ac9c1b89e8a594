"""Collectives through the memory of one host: every rank reads what it needs where the others have it.

    direct    tensors that lie in an arena (gradient buckets, parameters) are read and written in place
    slots     other tensors pass through two slots a rank, a slotful at a time, and so does everything small

    all-reduce, direct     1 meet | 2 sum my slice of all rows, write it to all rows | 3 meet
    all-reduce, slots      1 copy in, meet | 2 sum my slice into my slot | 3 meet, copy out | again with the other slot
    small                  1 copy in, meet | 2 everybody sums everything

An exchange in which peers read a rank's own tensors ends with a meeting (`barrier.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from weft.comm.shared_memory.arena import Arena
from weft.comm.shared_memory.barrier import DESCRIPTION_WORDS, Arrival, Barrier
from weft.comm.shared_memory.mailbox import Mailbox
from weft.comm.shared_memory.native import copy
from weft.comm.shared_memory.reduction import Reduction, add_into, reduce_into
from weft.comm.shared_memory.segments import Segment
from weft.comm.shared_memory.worker import CLOSE_TIMEOUT_S, Work, Worker

SMALL_BYTES = 2**15
"""Up to here everybody does all the work, and one meeting is enough."""


class SharedTransport:
    """One group's ranks, all on one host, exchanging through its memory."""

    def __init__(self, meeting: Barrier, mailbox: Mailbox, *, name: str) -> None:
        self.mailbox = mailbox
        self._meeting = meeting
        self._index = meeting.index
        self.size = meeting.size
        self._background = Worker(name)

    def add_arena(self, segment: Segment, *, is_common: bool) -> Arena:
        """Memory for tensors to be exchanged in place. Ranks add theirs together."""
        return self._meeting.add_arena(segment, is_common=is_common)

    def is_common(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is the same memory on all ranks."""
        return self._meeting.is_common(tensor)

    def run(self, task: Callable[[], None]) -> None:
        """Exchange now."""
        self._background.run(task)

    def start(self, task: Callable[[], None]) -> Work:
        """Exchange beside the caller."""
        return self._background.start(task)

    def close(self) -> None:
        """Wait a while for exchanges under way, and end the thread. Memory is unmapped with the last reference."""
        self._background.close()
        with suppress(RuntimeError):  # a peer that is gone, or is not going to receive
            self.mailbox.settle(CLOSE_TIMEOUT_S)

    def all_reduce(self, tensor: torch.Tensor, op: Reduction, root: int | None = None) -> None:
        """In place; with a root, only its tensor matters afterwards."""
        flat = tensor.view(-1)
        if not flat.numel():
            return
        if flat.nbytes <= SMALL_BYTES:
            self._meeting.copy_in(flat)
            self._meeting.meet_about("all-reduce", flat, None)
            reduce_into([flat], self._meeting.slot_rows(flat), op)
            self._meeting.turn += 1
            return
        rows = self._meeting.meet_directly("all-reduce", flat)
        if rows is None:
            self._all_reduce_by_slots(flat, op)
            return
        start, stop = self._meeting.slice_of(flat.numel())
        terms = [row[start:stop] for row in rows]
        reduce_into(terms if root is None else [terms[root]], terms, op)
        self._meeting.meet()

    def reduce_slice(self, flat: torch.Tensor) -> torch.Tensor | None:
        """The first half of an all-reduce: this rank's slice of its own tensor ends as the sum of all ranks' slices.

        None, on all ranks alike, if tensors do not lie in arenas. `gather_slices` is the second half.
        """
        rows = self._meeting.meet_directly("all-reduce", flat)
        if rows is None:
            return None
        start, stop = self._meeting.slice_of(flat.numel())
        terms = [row[start:stop] for row in rows]
        if start < stop:
            reduce_into([terms[self._index]], terms, "sum")
        return flat[start:stop]

    def gather_slices(self, flat: torch.Tensor) -> None:
        """Every rank's slice of its own tensor comes to all."""
        rows = self._meeting.meet_directly("all-reduce", flat)
        assert rows is not None
        for rank, row in enumerate(rows):
            start, stop = self._meeting.slice_of(flat.numel(), rank)
            if rank != self._index:
                copy(flat[start:stop], row[start:stop])
        self._meeting.meet()

    def _all_reduce_by_slots(self, flat: torch.Tensor, op: Reduction) -> None:
        room = self._meeting.chunk_bytes // flat.element_size()
        for number, chunk in enumerate(flat.split(room)):
            if number:
                self._meeting.copy_in(chunk)
                self._meeting.meet()
            rows = self._meeting.slot_rows(chunk)
            start, stop = self._meeting.slice_of(chunk.numel())
            if start < stop:
                terms = [row[start:stop] for row in rows]
                own = terms[self._index]
                reduce_into([own], terms, op)
            self._meeting.meet()
            for rank, row in enumerate(rows):
                start, stop = self._meeting.slice_of(chunk.numel(), rank)
                chunk[start:stop].copy_(row[start:stop])
            self._meeting.turn += 1

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        flat = tensor.view(-1)
        is_root = self._index == root
        room = self._meeting.chunk_bytes // flat.element_size()
        for number, chunk in enumerate(flat.split(room)):
            if is_root:
                self._meeting.copy_in(chunk)
            if number:
                self._meeting.meet()
            else:
                self._meeting.meet_about("broadcast", flat, None)
            if not is_root:
                chunk.copy_(self._meeting.slot_rows(chunk)[root])
            self._meeting.turn += 1

    def all_gather(self, outputs: Sequence[torch.Tensor] | None, tensor: torch.Tensor, *, name: str) -> None:
        """Rank k's tensor comes to the k-th output, here or, without outputs, elsewhere only."""
        flat = tensor.view(-1)
        if not flat.numel():
            return
        targets = [output.view(-1) for output in outputs] if outputs is not None else None
        if any(target.numel() != flat.numel() for target in targets or ()):
            raise ValueError(f"{name}: an output has not the {flat.numel()} elements of the tensor given")
        rows = None
        if flat.nbytes > SMALL_BYTES:
            rows = self._meeting.meet_directly(name, flat)
            if rows is not None:
                self._copy_out(targets, rows, flat)
                self._meeting.meet()
                return
        else:
            self._meeting.copy_in(flat)
            self._meeting.meet_about(name, flat, None)
        room = self._meeting.chunk_bytes // flat.element_size()
        for number, chunk in enumerate(flat.split(room)):
            if number:
                self._meeting.copy_in(chunk)
                self._meeting.meet()
            first = number * room
            here = [target[first : first + chunk.numel()] for target in targets] if targets is not None else None
            self._copy_out(here, self._meeting.slot_rows(chunk), chunk)
            self._meeting.turn += 1

    def _copy_out(
        self, targets: Sequence[torch.Tensor] | None, rows: Sequence[torch.Tensor], own: torch.Tensor
    ) -> None:
        for rank, target in enumerate(targets or ()):
            source = own if rank == self._index else rows[rank]
            if target.data_ptr() != source.data_ptr():
                copy(target, source)

    def arrive(self) -> Arrival:
        """The all-gather of memory that is everybody's: there is nothing to move, only to know that all are ready."""
        arrivals: list[Arrival] = []
        self.run(lambda: arrivals.append(self._meeting.arrive()))
        return arrivals[0]

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor, *, add: bool) -> None:
        """`output` ends as, or grows by, this rank's part of the sum of all tensors."""
        flat, target = tensor.view(-1), output.view(-1)
        length = target.numel()
        if flat.numel() != length * self.size:
            raise ValueError(f"reduce-scatter: {flat.numel()} elements are not {self.size} times the output's {length}")
        if not length:
            return
        mine = slice(self._index * length, (self._index + 1) * length)
        rows = None
        if flat.nbytes > SMALL_BYTES:
            rows = self._meeting.meet_directly("reduce-scatter", flat, with_chunk=False)
        if rows is not None:
            add_into(target, [row[mine] for row in rows], add=add)
            self._meeting.meet()
            return
        parts = flat.view(self.size, length)
        room = self._meeting.chunk_bytes // flat.element_size() // self.size
        for first in range(0, length, room):
            pieces = parts[:, first : first + room]
            self._meeting.copy_in(pieces)
            if first or flat.nbytes > SMALL_BYTES:
                self._meeting.meet()
            else:
                self._meeting.meet_about("reduce-scatter", flat, None)
            width = pieces.shape[1]
            within = slice(self._index * width, (self._index + 1) * width)
            terms = [slot[within] for slot in self._meeting.slots(flat.dtype)]
            add_into(target[first : first + width], terms, add=add)
            self._meeting.turn += 1

    def all_to_all(
        self, output: torch.Tensor, tensor: torch.Tensor, output_lengths: Sequence[int], input_lengths: Sequence[int]
    ) -> None:
        """Piece k of `tensor` goes to rank k; lengths are numbers of elements."""
        flat, target = tensor.view(-1), output.view(-1)
        tables = self._meeting.meet_about("all-to-all", flat, None, lengths=input_lengths)
        lengths = [table[DESCRIPTION_WORDS:].tolist() for table in tables]
        received = [row[self._index] for row in lengths]
        if received != list(output_lengths):
            raise RuntimeError(f"all-to-all: the others send {received} elements, {list(output_lengths)} are awaited")
        room = self._meeting.chunk_bytes // flat.element_size() // self.size
        pieces, places = flat.split(list(input_lengths)), target.split(list(output_lengths))
        for first in range(0, max(max(row) for row in lengths), room):
            slot = self._meeting.slots(flat.dtype)[self._index]
            for rank, piece in enumerate(pieces):
                part = piece[first : first + room]
                slot[rank * room : rank * room + part.numel()].copy_(part)
            self._meeting.meet()
            for rank, place in enumerate(places):
                part = place[first : first + room]
                begin = self._index * room
                part.copy_(self._meeting.slots(flat.dtype)[rank][begin : begin + part.numel()])
            self._meeting.turn += 1

    def scatter(self, output: torch.Tensor, parts: Sequence[torch.Tensor] | None, root: int) -> None:
        """Part k of the root's list goes to rank k."""
        target = output.view(-1)
        room = self._meeting.chunk_bytes // target.element_size() // self.size
        for first in range(0, target.numel(), room):
            place = target[first : first + room]
            if parts is not None:
                slot = self._meeting.slots(target.dtype)[self._index]
                for rank, part in enumerate(parts):
                    begin = rank * place.numel()
                    slot[begin : begin + place.numel()].copy_(part.reshape(-1)[first : first + room])
            if first:
                self._meeting.meet()
            else:
                self._meeting.meet_about("scatter", target, None)
            begin = self._index * place.numel()
            place.copy_(self._meeting.slots(target.dtype)[root][begin : begin + place.numel()])
            self._meeting.turn += 1
