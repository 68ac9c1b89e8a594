"""An operation as one rank called it: what is compared with the other ranks' calls, and the bytes it brings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

CommunicatorKey: TypeAlias = tuple[str, tuple[int, ...]]
"""A group's name in the store, and the ranks of the communicator: the group's, or a pair of them."""


class StrictError(RuntimeError):
    """A breach of NCCL's rules."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One message of a call: a collective has none, a batch several."""

    source: int
    target: int
    """Global ranks."""
    content: str
    """Number of elements and dtype, which must be equal on both sides."""

    @property
    def direction(self) -> tuple[int, int]:
        return self.source, self.target


@dataclass(slots=True, kw_only=True, eq=False)
class Call:
    """One operation on one rank."""

    number: int
    """Counted per rank."""
    rank: int
    communicator: CommunicatorKey
    group_name: str
    text: str
    """The operation as people read it."""
    site: str
    """Where the program called it."""
    compared: tuple[object, ...] = ()
    """What must be equal on all ranks of a collective."""
    parts: tuple[Part, ...] = ()
    payload: list[bytes | tuple[bytes, ...]] = field(default_factory=list)
    """For every buffer, or part, its bytes; or those for each rank of the communicator."""
    expected_bytes: tuple[int, ...] | None = None
    """What each rank must have sent here, where that may differ."""
    blocks_host: bool = False
    """This rank's first use of the communicator, or of a direction of it: the call returns when the others have
    joined."""

    def describe(self) -> str:
        return f"{self.text} on {self.group_name!r} ({self.site})"
