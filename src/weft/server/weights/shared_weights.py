"""Weights in memory that ranks of the server's host read, and cannot write.

Where an update may not write what somebody still reads, it is made on a copy, as elsewhere (`store.py`); the memory of
earlier versions is used again when nobody reads it any more: neither a tensor here, nor a rank to which it was lent. A
rank that was given up may read on, and finds afterwards that the generation of what it read has changed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from weft.comm.shared_memory.segments import SegmentHandle, SegmentOwner
from weft.server.protocol.frames import tensor_of
from weft.server.protocol.shared_places import GIVEN_UP, WeightPlaces, fence, words_of


class WeightMemory:
    """Memory for one version of all weights. OSError if there is none."""

    def __init__(self, places: WeightPlaces) -> None:
        self._places = places
        self._owner = SegmentOwner(places.num_bytes, "anonymous", sealed="reads")
        self._words = words_of(self._owner.segment.part(0, self._owner.segment.num_bytes))
        self._held: weakref.ref[memoryview] | None = None
        self.is_read: list[Callable[[], bool]] = []
        """Say whether what was lent has been read."""

    @property
    def handle(self) -> SegmentHandle:
        return self._owner.handle

    @property
    def generation(self) -> int:
        """A number of what is there."""
        return self._words[0]

    @property
    def is_free(self) -> bool:
        """Nobody reads it."""
        self.is_read = [one for one in self.is_read if not one()]
        return not self.is_read and (self._held is None or self._held() is None)

    def change(self) -> None:
        """What is there will be another thing."""
        self._words[0] = self.generation + 1
        fence()

    def give_up(self) -> None:
        """It is not used again: ranks that have opened it close it."""
        self._words[0] = GIVEN_UP

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All parts, in what was free until now."""
        self.change()
        held = self._owner.segment.part(0, self._places.num_bytes)
        self._held = weakref.ref(held)
        flat = torch.frombuffer(held, dtype=torch.uint8)
        found = []
        for start, length, dtype in zip(self._places.starts, self._places.lengths, self._places.dtypes, strict=True):
            found.append(flat[start : start + length].view(getattr(torch, dtype)) if length else tensor_of(b"", dtype))
        return tuple(found)


class SharedWeights:
    """The memory of as many versions as are read at one time, and of one more at most."""

    def __init__(self, places: WeightPlaces) -> None:
        self.places = places
        self._memories: list[WeightMemory] = []
        self.current: WeightMemory | None = None
        """That of the last version."""

    def move(self) -> tuple[torch.Tensor, ...]:
        """Memory for the weights that is read by nobody, from now on the current one. OSError if there is none."""
        free = [one for one in self._memories if one is not self.current and one.is_free]
        memory = free[0] if free else WeightMemory(self.places)
        for one in free[1:]:
            one.give_up()
        self._memories = [memory, *(one for one in self._memories if one not in free)]
        self.current = memory
        return memory.tensors()
