"""Collectives through the memory of one host: every rank reads what it needs where the others have it.

    direct    tensors that lie in an arena (gradient buckets, parameters) are read and written in place
    slots     other tensors pass through two slots per rank, a slotful at a time, and so does everything small

    all-reduce, direct     1 barrier | 2 sum my slice of all rows, write it to all rows | 3 barrier
    all-reduce, slots      1 copy in, barrier | 2 sum my slice into my slot | 3 barrier, copy out | again, other slot
    small                  1 copy in, barrier | 2 every rank sums everything

An exchange in which peers read a rank's own tensors ends with a barrier (`barrier.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch

from weft.comm.shared_memory.barrier import DESCRIPTION_WORDS, Barrier
from weft.comm.shared_memory.counters import Waiting
from weft.comm.shared_memory.mailbox import Mailbox
from weft.comm.shared_memory.native import copy
from weft.comm.shared_memory.reduction import Reduction, add_into, reduce_into
from weft.comm.shared_memory.worker import CLOSE_TIMEOUT_S, Worker

SMALL_BYTES = 2**15
"""Up to this size every rank does all the work, and one barrier is enough."""


class SharedTransport:
    """One group's ranks, all on one host, exchanging through its memory."""

    def __init__(self, barrier: Barrier, mailbox: Mailbox, *, name: str) -> None:
        self.mailbox = mailbox
        self.barrier = barrier
        self.worker = Worker(name)
        """Runs every exchange, here or in the background."""
        self._index = barrier.index
        self.size = barrier.size

    def close(self) -> None:
        """Wait a while for exchanges under way, and end the thread. Memory is unmapped with the last reference."""
        self.worker.close()
        with suppress(RuntimeError):  # a peer that is gone, or is not going to receive
            self.mailbox.settle(CLOSE_TIMEOUT_S)

    def all_reduce(self, tensor: torch.Tensor, op: Reduction) -> None:
        """In place."""
        flat = tensor.view(-1)
        if not flat.numel():
            return
        if flat.nbytes <= SMALL_BYTES:
            self.barrier.copy_in(flat)
            self.barrier.wait_agreed("all-reduce", flat)
            reduce_into([flat], self.barrier.slot_rows(flat), op)
            self.barrier.turn += 1
            return
        rows = self.barrier.share_rows("all-reduce", flat)
        if rows is None:
            self._all_reduce_by_slots(flat, op)
            return
        part = self.barrier.slice_of(flat.numel())
        terms = [row[part] for row in rows]
        reduce_into(terms, terms, op)
        self.barrier.wait()

    def _all_reduce_by_slots(self, flat: torch.Tensor, op: Reduction) -> None:
        for number, chunk in enumerate(flat.split(self.barrier.chunk_numel(flat))):
            if number:
                self.barrier.copy_in(chunk)
                self.barrier.wait()
            rows = self.barrier.slot_rows(chunk)
            part = self.barrier.slice_of(chunk.numel())
            terms = [row[part] for row in rows]
            if terms[0].numel():
                reduce_into([terms[self._index]], terms, op)
            self.barrier.wait()
            for rank, row in enumerate(rows):
                part = self.barrier.slice_of(chunk.numel(), rank)
                chunk[part].copy_(row[part])
            self.barrier.turn += 1

    def reduce_slice(self, flat: torch.Tensor) -> torch.Tensor | None:
        """The first half of an all-reduce: this rank's slice of its own tensor ends as the sum of all ranks' slices.

        None, on all ranks alike, if tensors do not lie in arenas. `gather_slices` is the second half.
        """
        rows = self.barrier.share_rows("all-reduce", flat)
        if rows is None:
            return None
        part = self.barrier.slice_of(flat.numel())
        terms = [row[part] for row in rows]
        if terms[0].numel():
            reduce_into([terms[self._index]], terms, "sum")
        return flat[part]

    def gather_slices(self, flat: torch.Tensor) -> None:
        """Every rank's slice of its own tensor is copied to all."""
        rows = self.barrier.share_rows("all-reduce", flat)
        assert rows is not None
        for rank, row in enumerate(rows):
            part = self.barrier.slice_of(flat.numel(), rank)
            if rank != self._index:
                copy(flat[part], row[part])
        self.barrier.wait()

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        flat = tensor.view(-1)
        for number, chunk in enumerate(flat.split(self.barrier.chunk_numel(flat))):
            if self._index == root:
                self.barrier.copy_in(chunk)
            if number:
                self.barrier.wait()
            else:
                self.barrier.wait_agreed("broadcast", flat)
            if self._index != root:
                chunk.copy_(self.barrier.slot_rows(chunk)[root])
            self.barrier.turn += 1

    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        """Rank k's tensor is copied to the k-th output."""
        flat = tensor.view(-1)
        if not flat.numel():
            return
        targets = [output.view(-1) for output in outputs]
        if any(target.numel() != flat.numel() for target in targets):
            raise ValueError(f"all-gather: an output has not the {flat.numel()} elements of the tensor given")
        if flat.nbytes > SMALL_BYTES:
            rows = self.barrier.share_rows("all-gather", flat)
            if rows is not None:
                self._copy_out(targets, rows, flat)
                self.barrier.wait()
                return
        else:
            self.barrier.copy_in(flat)
            self.barrier.wait_agreed("all-gather", flat)
        width = self.barrier.chunk_numel(flat)
        for number, chunk in enumerate(flat.split(width)):
            if number:
                self.barrier.copy_in(chunk)
                self.barrier.wait()
            first = number * width
            here = [target[first : first + chunk.numel()] for target in targets]
            self._copy_out(here, self.barrier.slot_rows(chunk), chunk)
            self.barrier.turn += 1

    def _copy_out(self, targets: Sequence[torch.Tensor], rows: Sequence[torch.Tensor], own: torch.Tensor) -> None:
        for rank, target in enumerate(targets):
            source = own if rank == self._index else rows[rank]
            if target.data_ptr() != source.data_ptr():
                copy(target, source)

    def arrive(self) -> Waiting:
        """The all-gather of common memory: nothing moves, and the wait tells that all ranks are ready."""
        arrived: list[Waiting] = []
        self.worker.run(lambda: arrived.append(self.barrier.arrive()))
        return arrived[0]

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor, *, add: bool) -> None:
        """`output` ends as, or grows by, this rank's part of the sum of all tensors."""
        flat, target = tensor.view(-1), output.view(-1)
        length = target.numel()
        if flat.numel() != length * self.size:
            raise ValueError(f"reduce-scatter: {flat.numel()} elements are not {self.size} times the output's {length}")
        if not length:
            return
        is_small = flat.nbytes <= SMALL_BYTES
        rows = None if is_small else self.barrier.share_rows("reduce-scatter", flat, with_chunk=False)
        if rows is not None:
            mine = slice(self._index * length, (self._index + 1) * length)
            add_into(target, [row[mine] for row in rows], add=add)
            self.barrier.wait()
            return
        parts = flat.view(self.size, length)
        most = self.barrier.chunk_numel(flat) // self.size
        for first in range(0, length, most):
            pieces = parts[:, first : first + most]
            self.barrier.copy_in(pieces)
            if is_small and not first:
                self.barrier.wait_agreed("reduce-scatter", flat)
            else:
                self.barrier.wait()
            width = pieces.shape[1]
            within = slice(self._index * width, (self._index + 1) * width)
            terms = [slot[within] for slot in self.barrier.slots(flat.dtype)]
            add_into(target[first : first + width], terms, add=add)
            self.barrier.turn += 1

    def all_to_all(
        self, output: torch.Tensor, tensor: torch.Tensor, output_lengths: Sequence[int], input_lengths: Sequence[int]
    ) -> None:
        """Piece k of `tensor` goes to rank k; lengths are numbers of elements."""
        flat, target = tensor.view(-1), output.view(-1)
        tables = self.barrier.wait_agreed("all-to-all", flat, lengths=input_lengths)
        lengths = [table[DESCRIPTION_WORDS:].tolist() for table in tables]
        received = [row[self._index] for row in lengths]
        if received != list(output_lengths):
            raise RuntimeError(f"all-to-all: the others send {received} elements, {list(output_lengths)} are awaited")
        most = self.barrier.chunk_numel(flat) // self.size
        pieces, places = flat.split(list(input_lengths)), target.split(list(output_lengths))
        for first in range(0, max(max(row) for row in lengths), most):
            slots = self.barrier.slots(flat.dtype)
            for rank, piece in enumerate(pieces):
                part = piece[first : first + most]
                slots[self._index][rank * most : rank * most + part.numel()].copy_(part)
            self.barrier.wait()
            for rank, place in enumerate(places):
                part = place[first : first + most]
                begin = self._index * most
                part.copy_(slots[rank][begin : begin + part.numel()])
            self.barrier.turn += 1
