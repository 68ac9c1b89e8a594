"""NCCL's rules, for the calls of all ranks: what may run, what must agree, and who waits for whom.

Every communicator of a rank is a stream: its operations run in the order of calls, one at a time. A collective runs
when it is at the head on every rank; a message when both its ends are, because NCCL promises no room to keep it. The
messages of a batch are one operation, and may run in any order. There are no tags: messages match first in, first out,
per communicator and direction.

Time is given, replies are kept in a list, and tensors are bytes, so the rules need no processes to be tested.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

from strict_nccl.calls import Call, CommunicatorKey
from strict_nccl.mode import StrictMode

ALL_STUCK_S = 0.3
"""Seconds without progress after which the referee ends a run in which every rank waits."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Op:
    """A call in its stream."""

    call: Call
    place: int
    """Among the collectives of its communicator on this rank."""
    may_start_s: float | None = None
    """When its random delay ends; None until it is at the head."""
    is_open: bool
    received: list[Any]
    parts_left: int


@dataclass(slots=True, kw_only=True, eq=False)
class _Communicator:
    ranks: tuple[int, ...]
    seen: set[int] = field(default_factory=set)
    """Ranks that have called anything on it."""
    collectives: dict[int, dict[int, _Op]] = field(default_factory=dict)
    """By place and rank; those that are not over."""
    num_collectives: dict[int, int] = field(default_factory=dict)
    sends: dict[tuple[int, int], deque[tuple[_Op, int]]] = field(default_factory=dict)
    receives: dict[tuple[int, int], deque[tuple[_Op, int]]] = field(default_factory=dict)
    """By direction, in the order of calls: the operation, and which part of it; those that are not over."""
    used: set[tuple[int, int, int]] = field(default_factory=set)
    """Directions, and the rank that has called a message of it."""


class Referee:
    """All calls of all ranks that are not complete."""

    def __init__(self, num_ranks: int, mode: StrictMode) -> None:
        self.mode = mode
        self.failure: str | None = None
        self.replies: list[tuple[int, tuple[Any, ...]]] = []
        """To which rank, and what: ("open", number), ("done", number, results), ("failed", text) or ("closed",)."""
        self._num_ranks = num_ranks
        self._communicators: dict[CommunicatorKey, _Communicator] = {}
        self._streams: dict[Hashable, deque[_Op]] = {}
        self._opening: list[_Op] = []
        self._waiting: dict[int, dict[int, _Op | None]] = {rank: {} for rank in range(num_ranks)}
        self._unfinished: dict[tuple[int, int], _Op] = {}
        self._last: dict[int, str] = {}
        self._left: set[int] = set()
        self._random = random.Random(mode.seed)
        self._moved_s = 0.0

    # Messages of ranks.

    def call(self, call: Call, now_s: float) -> None:
        self._moved_s = now_s
        found = self._communicators.setdefault(
            call.communicator, _Communicator(ranks=tuple(sorted(call.communicator[1])))
        )
        place = found.num_collectives.get(call.rank, 0)
        op = _Op(
            call=call,
            place=place,
            is_open=not call.blocks_host,
            received=[None] * len(call.parts),
            parts_left=len(call.parts),
        )
        found.seen.add(call.rank)
        self._last[call.rank] = call.describe()
        self._unfinished[call.rank, call.number] = op
        self._streams.setdefault(self._stream_of(call), deque()).append(op)
        if call.blocks_host:
            self._opening.append(op)
            self._waiting[call.rank][call.number] = op
        if call.parts:
            self._add_messages(found, op)
        else:
            found.num_collectives[call.rank] = place + 1
            others = found.collectives.setdefault(place, {})
            others[call.rank] = op
            if any(other.call.compared != call.compared for other in others.values()):
                self.fail(self._mismatch(found, others))

    def wait(self, rank: int, number: int, now_s: float) -> None:
        """A rank does nothing else until a call is over."""
        self._moved_s = now_s
        if (rank, number) in self._unfinished:
            self._waiting[rank][number] = self._unfinished[rank, number]

    def leave(self, rank: int, problem: str | None, now_s: float) -> None:
        """A rank makes no more calls."""
        self._moved_s = now_s
        self._left.add(rank)
        self._waiting[rank].clear()
        if problem is not None:
            self.fail(f"rank {rank} left: {problem}")
        if len(self._left) == self._num_ranks and self.failure is None:
            self.replies += [(one, ("closed",)) for one in range(self._num_ranks)]

    def has_left(self, rank: int) -> bool:
        return rank in self._left

    # Progress.

    def advance(self, now_s: float) -> None:
        """Run everything that can run now, and end the run if nothing has for too long."""
        while self.failure is None and (self._open_some() or self._run_some(now_s)):
            self._moved_s = now_s
        if self.failure is None and now_s >= self._stall_at_s(now_s):
            self.fail(self._stall_report(now_s))

    def sleep_s(self, now_s: float) -> float:
        """Seconds until something may happen without a message of a rank."""
        starts = [op.may_start_s for op in self._heads() if op.may_start_s is not None and op.may_start_s > now_s]
        return max(0.0, min([*starts, self._stall_at_s(now_s), now_s + 60.0]) - now_s)

    def fail(self, text: str) -> None:
        if self.failure is None:
            self.failure = text
            self.replies += [(rank, ("failed", text)) for rank in range(self._num_ranks)]

    def _stream_of(self, call: Call) -> Hashable:
        return call.rank if self.mode.one_stream else (call.rank, call.communicator)

    def _heads(self) -> Iterator[_Op]:
        return (stream[0] for stream in self._streams.values() if stream)

    def _add_messages(self, found: _Communicator, op: _Op) -> None:
        for number, part in enumerate(op.call.parts):
            found.used.add((*part.direction, op.call.rank))
            is_send = part.source == op.call.rank
            mine, theirs = (found.sends, found.receives) if is_send else (found.receives, found.sends)
            queue = mine.setdefault(part.direction, deque())
            queue.append((op, number))
            facing = theirs.get(part.direction, ())
            if len(facing) >= len(queue):  # matched pairs are removed together, so places agree
                other, its_number = facing[len(queue) - 1]
                if other.call.parts[its_number].content != part.content:
                    pair = {one.call.rank: one for one in (op, other)}
                    self.fail(f"message {part.source} -> {part.target}: {self._mismatch(found, pair)}")

    def _mismatch(self, found: _Communicator, ops: dict[int, _Op]) -> str:
        ranks = sorted({*ops} if any(op.call.parts for op in ops.values()) else {*found.ranks})
        lines = [f"  rank {rank}: {ops[rank].call.describe() if rank in ops else 'not yet'}" for rank in ranks]
        return "\n".join(["ranks called different operations where they must call the same", *lines])

    def _missing(self, op: _Op) -> list[int]:
        """Ranks without which this first use cannot be made."""
        found, call = self._communicators[op.call.communicator], op.call
        if not call.parts:
            return [rank for rank in found.ranks if not found.num_collectives.get(rank)]
        missing = set() if self.mode.is_eager else {*found.ranks} - found.seen
        for part in call.parts:
            missing |= {rank for rank in part.direction if (*part.direction, rank) not in found.used}
        return sorted(missing)

    def _open_some(self) -> bool:
        opened = [op for op in self._opening if not self._missing(op)]
        for op in opened:
            op.is_open = True
            self._opening.remove(op)
            self._waiting[op.call.rank].pop(op.call.number, None)
            self.replies.append((op.call.rank, ("open", op.call.number)))
        return bool(opened)

    def _may_run(self, op: _Op, now_s: float) -> bool:
        stream = self._streams.get(self._stream_of(op.call))
        if not op.is_open or not stream or stream[0] is not op:
            return False
        if op.may_start_s is None:
            op.may_start_s = now_s + self._random.uniform(0.0, self.mode.delay_ms / 1000.0)
        return now_s >= op.may_start_s

    def _run_some(self, now_s: float) -> bool:
        moved = False
        for op in list(self._heads()):
            if not self._may_run(op, now_s):
                continue
            found = self._communicators[op.call.communicator]
            if op.call.parts:
                moved |= self._run_messages(found, op, now_s)
                continue
            together = found.collectives.get(op.place, {})
            if len(together) == len(found.ranks) and all(self._may_run(one, now_s) for one in together.values()):
                del found.collectives[op.place]
                self._run_collective(found, together)
                moved = True
        return moved

    def _run_collective(self, found: _Communicator, ops: dict[int, _Op]) -> None:
        ranks = ops[found.ranks[0]].call.communicator[1]  # in the group's own order
        for place, rank in enumerate(ranks):
            pieces = [
                [buffer[place] if isinstance(buffer, tuple) else buffer for buffer in ops[other].call.payload]
                for other in ranks
            ]
            expected = ops[rank].call.expected_bytes
            if expected is not None and expected != tuple(len(one[0]) for one in pieces):
                self.fail(self._mismatch(found, ops))
                return
            self._finish(ops[rank], pieces)

    def _run_messages(self, found: _Communicator, op: _Op, now_s: float) -> bool:
        moved = False
        for direction in {part.direction for part in op.call.parts}:
            sends, receives = found.sends.get(direction), found.receives.get(direction)
            while sends and receives and all(self._may_run(queue[0][0], now_s) for queue in (sends, receives)):
                (sender, sent), (receiver, place) = sends.popleft(), receives.popleft()
                receiver.received[place] = sender.call.payload[sent]
                moved = True
                for one in (sender, receiver):
                    one.parts_left -= 1
                    if not one.parts_left:
                        self._finish(one, one.received)
        return moved

    def _finish(self, op: _Op, results: list[Any]) -> None:
        call, key = op.call, self._stream_of(op.call)
        self._streams[key].popleft()
        if not self._streams[key]:
            del self._streams[key]
        del self._unfinished[call.rank, call.number]
        self._waiting[call.rank].pop(call.number, None)
        self.replies.append((call.rank, ("done", call.number, results)))

    # Who waits for whom.

    def _stall_at_s(self, now_s: float) -> float:
        is_delayed = any(op.may_start_s is not None and op.may_start_s > now_s for op in self._heads())
        if self.failure is not None or is_delayed or not any(self._waiting.values()):
            return float("inf")
        is_stuck = all(self._waiting[rank] or rank in self._left for rank in range(self._num_ranks))
        return self._moved_s + (min(ALL_STUCK_S, self.mode.stall_s) if is_stuck else self.mode.stall_s)

    def _stall_report(self, now_s: float) -> str:
        lines = [f"nothing has moved for {now_s - self._moved_s:.1f} s"]
        for rank, waits in self._waiting.items():
            lines += [f"  rank {rank} waits for {op.call.describe()}, {self._why(op)}" for op in waits.values() if op]
            if not waits:
                doing = "has left" if rank in self._left else "does not wait"
                lines.append(f"  rank {rank} {doing}; its last call was {self._last.get(rank, 'none at all')}")
        return "\n".join(lines)

    def _why(self, op: _Op) -> str:
        found = self._communicators[op.call.communicator]
        if not op.is_open:
            names = " and ".join(f"rank {rank}" for rank in self._missing(op))
            what = "message of this direction" if op.call.parts else "collective of this communicator"
            return f"the first {what}, which blocks the host until {names} comes"
        head = self._streams[self._stream_of(op.call)][0]
        if head is not op:
            return f"which runs only after {head.call.describe()}, {self._why(head)}"
        if not op.call.parts:
            absent = [rank for rank in found.ranks if rank not in found.collectives[op.place]]
            if absent:
                return f"which rank {', '.join(map(str, absent))} has not called"
            return "which is not at the head of its stream on every rank"
        for part in op.call.parts:
            other = part.target if part.source == op.call.rank else part.source
            theirs = found.receives if part.source == op.call.rank else found.sends
            if not theirs.get(part.direction):
                return f"for which rank {other} has called no {'receive' if part.target == other else 'send'}"
        return "whose other side is not at the head of its stream"
