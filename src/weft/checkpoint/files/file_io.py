"""Reads and writes parts of tensors directly at their offsets in files.

A contiguous tensor in host memory needs no copy. A tensor on a device, or of another dtype than the file's, goes
through a staging buffer of one chunk. Short runs that lie close together are read in one call, with the bytes between
them, because a system call costs as much as reading a few thousand bytes.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from weft.layout import Runs

CHUNK_BYTES = 16 << 20
"""Size of the staging buffer and of one write."""
_SHORT_BYTES = 8192
"""Runs shorter than this are read together with the bytes between them."""
_MOST_WASTE = 16
"""The limit of that: the most bytes read per byte needed."""
_WRITE_BACK = 2
"""Linux: SYNC_FILE_RANGE_WRITE, which starts writing to the disk without waiting."""


class Staging:
    """A host buffer, allocated on first use and reused; pinned if tensors come from a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.is_pinned = device.type == "cuda"
        self._memory: torch.Tensor | None = None

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        num_bytes = numel * dtype.itemsize
        if self._memory is None or self._memory.numel() < num_bytes:
            self._memory = None  # frees the old buffer before the new one is allocated
            self._memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self.is_pinned)
        return self._memory[:num_bytes].view(dtype)


def write_runs(file: int, start_byte: int, part: torch.Tensor, runs: Iterable[Runs], staging: Staging) -> None:
    """Write a part of a tensor to an open file in which the whole tensor starts at `start_byte`."""
    size, runs = part.element_size(), tuple(runs)
    is_direct = part.device.type == "cpu" and part.is_contiguous()
    numel = max(part.numel() if is_direct else CHUNK_BYTES // size, 1)
    for first in range(0, part.numel(), numel):
        last = min(first + numel, part.numel())
        values = flat_range(part, first, last)
        memory = bytes_of(values if is_direct else staging.take(last - first, part.dtype).copy_(values))
        for one in (inside for each in runs for inside in each.within(first, last)):
            for there, here in one.places():
                write_at(file, memory[here * size : (here + one.numel) * size], start_byte + there * size)


def read_runs(
    file: int, start_byte: int, dtype: torch.dtype, part: torch.Tensor, runs: Iterable[Runs], staging: Staging
) -> None:
    """Read a part of a tensor from an open file in which the whole tensor, of this dtype, starts at `start_byte`."""
    if not part.is_contiguous():
        packed = torch.empty(part.shape, dtype=part.dtype, device=part.device)
        read_runs(file, start_byte, dtype, packed, runs, staging)
        part.copy_(packed)
        return
    flat, size = part.view(-1), dtype.itemsize
    memory = bytes_of(part) if part.device.type == "cpu" and part.dtype == dtype else None
    for one in runs:
        if one.count > 1 and one.numel * size < _SHORT_BYTES and one.there_step <= _MOST_WASTE * one.numel:
            _read_between(file, start_byte, dtype, flat, one, staging)
            continue
        for there, here in one.places():
            if memory is not None:
                read_at(file, memory[here * size : (here + one.numel) * size], start_byte + there * size)
                continue
            for first in range(0, one.numel, CHUNK_BYTES // size):
                numel = min(CHUNK_BYTES // size, one.numel - first)
                staged = staging.take(numel, dtype)
                read_at(file, bytes_of(staged), start_byte + (there + first) * size)
                flat[here + first : here + first + numel].copy_(staged)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous host tensor."""
    array: Any = tensor.detach().view(-1).view(torch.uint8).numpy()
    return memoryview(array)


def flat_range(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """A range of the flattened tensor. If that is not contiguous, only the rows that hold the range are copied."""
    if tensor.is_contiguous():
        return tensor.view(-1)[start:stop]
    row = tensor.numel() // tensor.shape[0]
    first, last = start // row, -(-stop // row)
    return tensor[first:last].reshape(-1)[start - first * row : stop - first * row]


def write_at(file: int, data: memoryview, place: int) -> None:
    """Write everything chunk by chunk, and start writing each chunk to the disk."""
    for first in range(0, len(data), CHUNK_BYTES):
        chunk = data[first : first + CHUNK_BYTES]
        done = 0
        while done < len(chunk):
            done += os.pwrite(file, chunk[done:], place + first + done)
        if len(chunk) == CHUNK_BYTES:
            _find_write_back()(file, place + first, len(chunk))


def read_at(file: int, data: memoryview, place: int) -> None:
    """Read until `data` is full."""
    done = 0
    while done < len(data):
        num_read = os.preadv(file, [data[done:]], place + done)
        if num_read == 0:
            raise OSError(errno.EIO, f"it ends at byte {place + done}, {len(data) - done} bytes early")
        done += num_read


def force_to_disk(path: Path) -> None:
    """fsync a file, or a folder's list of names."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _read_between(
    file: int, start_byte: int, dtype: torch.dtype, flat: torch.Tensor, runs: Runs, staging: Staging
) -> None:
    """Read runs together with the bytes between them, as many per call as one chunk holds."""
    each = max(CHUNK_BYTES // (runs.there_step * dtype.itemsize), 1)
    for first in range(0, runs.count, each):
        num_runs = min(each, runs.count - first)
        staged = staging.take((num_runs - 1) * runs.there_step + runs.numel, dtype)
        read_at(file, bytes_of(staged), start_byte + (runs.there + first * runs.there_step) * dtype.itemsize)
        start = flat.storage_offset() + runs.here + first * runs.here_step
        into = flat.as_strided((num_runs, runs.numel), (runs.here_step, 1), start)
        into.copy_(staged.as_strided((num_runs, runs.numel), (runs.there_step, 1)))


@cache
def _find_write_back() -> Callable[[int, int, int], None]:
    """The call that starts writing to the disk, where the system has one, so that a later fsync waits less."""
    try:
        call = ctypes.CDLL(None).sync_file_range
    except AttributeError:
        return lambda file, place, num_bytes: None
    call.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return lambda file, place, num_bytes: call(file, place, num_bytes, _WRITE_BACK)
