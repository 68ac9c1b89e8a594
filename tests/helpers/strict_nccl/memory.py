"""Memory that an operation holds from its call to its `wait`: outputs are poisoned, and nobody may touch any of it."""

from __future__ import annotations

import torch

from strict_nccl.calls import StrictError

_from_buffer = torch.frombuffer  # not watched by host_memory.py


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's memory. Through `.data`: as with NCCL, autograd does not see that it is written."""
    return tensor.data.reshape(-1).view(torch.uint8)


def content_of(tensor: torch.Tensor) -> bytes:
    """Of a copy, because storage that numpy has seen can never be resized again."""
    return as_bytes(tensor).clone().numpy().tobytes()


def from_bytes(content: bytes, dtype: torch.dtype) -> torch.Tensor:
    return _from_buffer(bytearray(content) or bytearray(8), dtype=dtype)[: len(content) // dtype.itemsize]


def poison(tensor: torch.Tensor) -> None:
    """NaN in every floating format, a large number in others."""
    as_bytes(tensor).fill_(0xFF if tensor.is_floating_point() else 0xA5)


class HeldMemory:
    """One tensor of an operation under way; made after outputs were poisoned."""

    def __init__(self, tensor: torch.Tensor, *, is_output: bool) -> None:
        self.tensor = tensor
        self.is_output = is_output
        self.start = tensor.data_ptr()
        self.end = self.start + tensor.nbytes
        self._storage_bytes = tensor.untyped_storage().nbytes()
        self._before = as_bytes(tensor).clone()

    def overlaps(self, other: HeldMemory) -> bool:
        return self.start < other.end and other.start < self.end

    def check(self, what: str) -> None:
        """Refuse what happened to it since the call."""
        role = "output" if self.is_output else "input"
        found = self.tensor.untyped_storage().nbytes()
        if found != self._storage_bytes or self.tensor.data_ptr() != self.start:
            raise StrictError(
                f"the memory of an {role} was freed or resized before wait, from {self._storage_bytes} to {found} "
                f"bytes: {what}"
            )
        if not torch.equal(as_bytes(self.tensor), self._before):
            raise StrictError(f"an {role} was changed between the call and wait: {what}")
