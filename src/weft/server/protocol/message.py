"""The messages between workers and servers: a header of fixed length, then raw bytes, and never a pickle.

A message is one ZeroMQ message of several frames: the header, and `num_frames` frames of payload. Tensors travel as
their bytes, a frame each, sent from where they lie; what is not a tensor is a small record of numbers (`Commit`), or
JSON of limited length (`pack_object`). All numbers are little-endian.

A header is believed in nothing: `read_message` checks what can be checked of a message alone, and the receiver compares
lengths with those of its own tensors. No memory is taken for what a header merely claims; ZeroMQ itself ends the
connection of a peer whose frame is longer than any that may come (`MAXMSGSIZE`).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

Buffer = bytes | bytearray | memoryview
MAGIC = b"WFT1"
OBJECT_BYTES = 16 << 20
"""The longest JSON: names and sizes of some 100,000 tensors."""
_HEADER = struct.Struct("<4sBxHQQIHHQQI4x")
HEADER_BYTES = _HEADER.size
_COMMIT = struct.Struct("<dddddQQIB3x")
_BEGIN = struct.Struct("<IIQddQQQQIBxHQ16I")
MOST_LOST = (1 << 16) - 1
"""Of lost gradients a beginning counts so many."""
_NUMBER = struct.Struct("<d")
NO_AGES = (0,) * 16
"""No updates of any age."""
_MOST_FRAMES = 65535


class Kind(IntEnum):
    """What a message is. Those of workers first."""

    HELLO = 1
    """I am a rank of a worker: JSON of the job, the model and the plan."""
    INITIAL = 2
    """First values of a bucket of weights."""
    PUSH = 3
    """A bucket of gradients of a clock."""
    COMMIT = 4
    """All buckets of this clock were sent; please send the next weights."""
    ALIVE = 5
    """A heartbeat, and its answer."""
    LEAVE = 6
    """This worker ends; its data goes to the others."""
    INITIAL_STATE = 7
    """The optimizer's first state of a bucket, where training goes on; before the bucket's first values."""
    ASK_STATE = 8
    """Send me the optimizer's state, and the weights it belongs to."""
    ASK_RUN = 9
    """Which run is this, where are its servers, and which worker may I be?"""
    SKIP = 10
    """Another server has let this worker begin a later clock: it goes on with that one here, too."""
    PUSH_SHARED = 11
    """A PUSH whose gradients are in memory that the rank and the server share; `version` is its token."""
    INITIAL_FIXED = 13
    """First values of a bucket of what is not trained; before any first weights."""
    ASK_FIXED = 14
    """Send me what is not trained: this start of a worker has not had it."""
    WELCOME = 16
    """The answer to HELLO: JSON of what the server has."""
    REFUSED = 17
    """The answer to HELLO: JSON of why not."""
    BEGIN = 18
    """A worker's next clock begins: its share of the data, and what is known of the last update."""
    WEIGHTS = 19
    """A bucket of weights for a clock."""
    GIVEN_UP = 20
    """A worker's session is over for this server: say hello anew, in that which `clock` names."""
    LATER = 21
    """The answer to HELLO: an earlier session is not over for all servers yet; say it again, in this session."""
    STATE = 22
    """A bucket of weights, with the optimizer's state."""
    RUN = 23
    """The answer to ASK_RUN: JSON."""
    WEIGHTS_SHARED = 24
    """WEIGHTS that are in memory which the rank may read."""
    FIXED = 26
    """A bucket of what is not trained."""
    SERVES = 32
    """I am a server. `place` is the number of the server that says this and what follows."""
    JOINED = 33
    """A worker, and the first weights, are here."""
    LEFT = 34
    """A worker is gone here."""
    READY = 35
    """All that a worker sent of a clock is here."""
    SQUARE = 36
    """The squared norm of this server's gradients."""
    DECIDED = 37
    """By the first server: the update that all make, and who is in the next round."""
    GONE = 38
    """By the first server: a worker is gone; its gradients of this round count all the same if `version` is 1."""
    NORM = 39
    """By the first server: the norm over all servers."""
    KNOWN = 40
    """By the first server, in answer to SERVES: what it has decided that the other one does not know."""
    ENDED = 41
    """A worker has said at this server, or at another one, that it ends."""


class Malformed(ValueError):
    """A message that no worker or server of weft sends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A header, and the frames behind it."""

    kind: Kind
    job: int = 0
    """The first 8 bytes of the digest of its settings: messages of another job are dropped."""
    session: int = 0
    """Number of a hello of the worker (`workers/members.py`)."""
    worker: int = 0
    place: int = 0
    """The sender's rank inside its worker."""
    server: int = 0
    clock: int = 0
    """The worker's step, from 0: that of a gradient, or the one for which weights are meant."""
    version: int = 0
    """Updates that the server had made of the weights which are sent, or from which a gradient was computed."""
    bucket: int = 0
    frames: tuple[Buffer, ...] = field(default=(), repr=False)
    is_shared: bool = field(default=False, compare=False)
    """The frames are where the receiver sees them, and do not travel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """What a worker says of a clock when all its gradients were sent."""

    count: float
    """Targets of its batch."""
    loss_sum: float
    scale: float
    """What its gradients are multiplied by to be sums over targets."""
    lr_factor: float
    """The schedule's factor on the learning rate in this clock."""
    compute_s: float
    num_buckets: int
    """Buckets that this rank pushed."""
    step: int = 0
    """Steps that are done with this one, over all starts of the run, for those who join later."""
    position: int = 0
    """Where the next batch begins in the data."""
    is_finite: bool = True
    """Its loss and all its gradients are finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """What a worker is told of the clock that it may begin."""

    index: int
    """Its place among the workers that share a batch."""
    num_workers: int
    ticket: int
    """Number of its batch among those of all workers, where workers do not share one."""
    loss_sum: float
    """Of the last update's batch; in an asynchronous run the worker's own."""
    count: float
    age: int
    """Updates that were made between the weights of its last gradient and that gradient."""
    step: int = 0
    """The furthest that any worker's commit said; 0 before the first."""
    position: int = 0
    saved: int = 0
    """This worker's clocks below this one are never asked for again."""
    is_skipped: bool = False
    """The last update was left out, because a gradient was not finite."""
    used: int = 0
    """The clock after this worker's last one that is in the weights: what it sent of others was dropped."""
    num_dropped: int = 0
    """Gradients of all workers so far that came too late for their version."""
    ages: tuple[int, ...] = NO_AGES
    """Updates so far by age, where each is made of one worker's gradient; the last number is of all older ones, too."""
    num_lost: int = 0
    """Gradients that were decided on and are not in this server's weights, as a worker and it died together."""


def pack_message(message: Message) -> list[Buffer]:
    """The frames of a message, as they travel."""
    frames = () if message.is_shared else message.frames
    header = _HEADER.pack(
        MAGIC,
        message.kind,
        len(frames),
        message.job,
        message.session,
        message.worker,
        message.place,
        message.server,
        message.clock,
        message.version,
        message.bucket,
    )
    return [header, *frames]


def read_message(frames: Sequence[Buffer]) -> Message:
    """A message from its frames; raises Malformed."""
    if not frames or len(frames) > 1 + _MOST_FRAMES:
        raise Malformed(f"{len(frames)} frames")
    header = frames[0]
    if len(header) != HEADER_BYTES:
        raise Malformed(f"a header of {len(header)} bytes instead of {HEADER_BYTES}")
    magic, kind, num_frames, job, session, worker, place, server, clock, version, bucket = _HEADER.unpack(header)
    if magic != MAGIC:
        raise Malformed(f"it begins with {magic!r} instead of {MAGIC!r}")
    if kind not in _KINDS:
        raise Malformed(f"no message is of kind {kind}")
    if num_frames != len(frames) - 1:
        raise Malformed(f"{len(frames) - 1} frames behind a header that says {num_frames}")
    return Message(
        kind=Kind(kind),
        job=job,
        session=session,
        worker=worker,
        place=place,
        server=server,
        clock=clock,
        version=version,
        bucket=bucket,
        frames=tuple(frames[1:]),
    )


_KINDS = frozenset(int(kind) for kind in Kind)
SERVER_KINDS = frozenset(kind for kind in Kind if kind > Kind.SERVES)
"""What servers say to each other."""


def pack_commit(commit: Commit) -> bytes:
    """The one frame of a COMMIT."""
    return _COMMIT.pack(
        commit.count,
        commit.loss_sum,
        commit.scale,
        commit.lr_factor,
        commit.compute_s,
        commit.step,
        commit.position,
        commit.num_buckets,
        commit.is_finite,
    )


def read_commit(message: Message) -> Commit:
    """Raises Malformed. A loss that is not finite is one; a count or factor that is not is refused."""
    if len(message.frames) != 1 or len(message.frames[0]) != _COMMIT.size:
        raise Malformed(f"a commit of {[len(one) for one in message.frames]} bytes instead of {_COMMIT.size}")
    unpacked = _COMMIT.unpack(message.frames[0])
    count, loss_sum, scale, lr_factor, compute_s, step, position, num_buckets, is_finite = unpacked
    if is_finite not in (0, 1):
        raise Malformed(f"is_finite is {is_finite}")
    numbers = {"count": count, "scale": scale, "lr_factor": lr_factor, "compute_s": compute_s}
    for name, value in numbers.items():
        if not 0 <= value < 1e300:  # also NaN
            raise Malformed(f"{name} is {value}")
    return Commit(
        count=count,
        loss_sum=loss_sum,
        scale=scale,
        lr_factor=lr_factor,
        compute_s=compute_s,
        num_buckets=num_buckets,
        step=step,
        position=position,
        is_finite=bool(is_finite),
    )


def pack_begin(begin: Begin) -> bytes:
    """The one frame of a BEGIN."""
    return _BEGIN.pack(
        begin.index,
        begin.num_workers,
        begin.ticket,
        begin.loss_sum,
        begin.count,
        begin.step,
        begin.position,
        begin.saved,
        begin.used,
        begin.age,
        begin.is_skipped,
        min(begin.num_lost, MOST_LOST),
        begin.num_dropped,
        *begin.ages,
    )


def read_begin(message: Message) -> Begin:
    """Raises Malformed."""
    if len(message.frames) != 1 or len(message.frames[0]) != _BEGIN.size:
        raise Malformed(f"a beginning of {[len(one) for one in message.frames]} bytes instead of {_BEGIN.size}")
    unpacked = _BEGIN.unpack(message.frames[0])
    index, num_workers, ticket, loss_sum, count, step, position, saved, used, age, is_skipped, *counts = unpacked
    num_lost, num_dropped, *ages = counts
    if index >= num_workers:
        raise Malformed(f"worker {index} of {num_workers}")
    return Begin(
        index=index,
        num_workers=num_workers,
        ticket=ticket,
        loss_sum=loss_sum,
        count=count,
        age=age,
        step=step,
        position=position,
        saved=saved,
        is_skipped=bool(is_skipped),
        used=used,
        num_lost=num_lost,
        num_dropped=num_dropped,
        ages=tuple(ages),
    )


def pack_number(value: float) -> bytes:
    """A number as the one frame of a message."""
    return _NUMBER.pack(value)


def read_number(message: Message) -> float:
    """Raises Malformed."""
    if len(message.frames) != 1 or len(message.frames[0]) != _NUMBER.size:
        raise Malformed(f"a number of {[len(one) for one in message.frames]} bytes instead of {_NUMBER.size}")
    return float(_NUMBER.unpack(message.frames[0])[0])


def pack_object(value: dict[str, Any]) -> bytes:
    """Plain values as the one frame of a message."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def read_object(message: Message, fields: dict[str, type | tuple[type, ...]]) -> dict[str, Any]:
    """The plain values of a message, which must be these fields of these types; raises Malformed."""
    if len(message.frames) != 1 or len(message.frames[0]) > OBJECT_BYTES:
        raise Malformed(f"an object of {[len(one) for one in message.frames]} bytes")
    try:
        value = json.loads(bytes(message.frames[0]))
    except (ValueError, RecursionError) as error:
        raise Malformed(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise Malformed(f"a {type(value).__name__} instead of an object")
    for name, kind in fields.items():
        found = value.get(name)
        if not isinstance(found, kind) or (isinstance(found, bool) and kind is not bool):
            raise Malformed(f'"{name}" is {type(found).__name__}')
    return value
