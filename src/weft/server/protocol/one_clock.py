"""The ranks of a worker begin one clock, all of them, or none.

    rank 0   begin 6 ─ here ─ posts 6 ──────────┐ unlike: all go back, in one new session
    rank 1   begin 6 ─ connection lost ─ begin 7 ─ here ─ posts 7 ──┘ ─ begin 7 ─ posts 7 ─ alike: compute

Each rank speaks for itself with all servers, and connections are lost, and servers die, at other moments for one than
for another. So ranks may have the weights of other clocks, or shares of other batches. Before they compute, and wait in
each other's collectives, they compare what servers said when the clock began. While a rank waits for the others' posts
it answers servers, and puts off what begins a later clock: a worker takes part only while all its ranks answer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol

from torch.distributed.distributed_c10d import _get_default_store

from weft.world import World


class Board(Protocol):
    """Where the ranks of a worker post what they have begun."""

    def write(self, number: int, text: str) -> None:
        """Post this rank's text of a round."""

    def read(self, number: int) -> Sequence[str] | None:
        """The texts of all ranks, None until all are there; returns at once."""


class StoreBoard:
    """A board in the store where the ranks of a worker have met."""

    def __init__(self, store: Any, name: str, *, rank: int, size: int) -> None:
        """`name`: of the worker's start, which no other one has."""
        self._store, self._name, self._rank, self._size = store, f"weft/one-clock/{name}", rank, size

    def write(self, number: int, text: str) -> None:
        self._store.set(self._key(number, self._rank), text)
        if number >= 2:  # all have read it, for they have written the one after it
            self._store.delete_key(self._key(number - 2, self._rank))

    def read(self, number: int) -> Sequence[str] | None:
        keys = [self._key(number, rank) for rank in range(self._size)]
        if not self._store.check(keys):
            return None
        can_get_all = self._store.has_extended_api()  # in one message, and not in one for each rank in every step
        found = self._store.multi_get(keys) if can_get_all else [self._store.get(key) for key in keys]
        return [text.decode() for text in found]

    def _key(self, number: int, rank: int) -> str:
        return f"{self._name}/{number}/{rank}"


def board_of(world: World, name: str) -> Board | None:
    """The board of a worker, whose ranks are a process group; None if it has one rank."""
    return None if world.size == 1 else StoreBoard(_get_default_store(), name, rank=world.rank, size=world.size)


class OneClock:
    """One rank's part in the comparison."""

    def __init__(self, board: Board) -> None:
        self._board, self._number = board, -1
        self._found: Sequence[str] | None = None

    def post(self, session: int, begun: Sequence[Any]) -> None:
        """Say in which session this rank has begun what."""
        self._number, self._found = self._number + 1, None
        self._board.write(self._number, json.dumps([session, begun]))

    @property
    def is_whole(self) -> bool:
        """All ranks have posted."""
        if self._found is None:
            self._found = self._board.read(self._number)
        return self._found is not None

    def next_session(self) -> int | None:
        """None if all have begun the same; else the session in which all begin again, the same on all ranks."""
        assert self._found is not None
        posts = [json.loads(text) for text in self._found]
        if all(begun == posts[0][1] for _, begun in posts):
            return None
        return max(int(session) for session, _ in posts) + 1
