"""How the gradients of one bucket travel from a worker to its server: the messages of codecs, and what goes as it is.

A tensor is compressed by itself, as the part of it that a server holds, by a codec made for one replica: a server
decodes what one worker sends without the others. So results depend on how servers cut tensors (`[server] shards`, and
`[comm] bucket_bytes` for a tensor that is larger), and not on what else a bucket has. Codecs that see rows, powersgd
and onebit, are given whole ones.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from weft.plan.exchange.coded_tensor import CodedTensor
from weft.plan.exchange.messages import Message, messages_of
from weft.plan.exchange.warm_up import density, is_dense
from weft.plan.partition.flat_buffers import item_bytes
from weft.plan.partition.server_shards import ServedPart, ServedTensor
from weft.plan.plan import Codec

STEP_BYTES = 8
"""In front of what is compressed: the step that it was compressed in, then a byte per compressed part."""
_SEE_ROWS = ("onebit", "powersgd")


@dataclass(frozen=True, slots=True, kw_only=True)
class CodedParts:
    """The parts in a bucket that one codec compresses, one after the other in its flat buffer of values."""

    dtype: str
    """Of the master weights, and of the values."""
    members: tuple[int, ...]
    """Their places in the bucket."""
    tensors: tuple[CodedTensor, ...]

    @property
    def numel(self) -> int:
        return sum(one.numel for one in self.tensors)


class PushFormat:
    """The frames of one bucket's gradients."""

    def __init__(
        self, codec: Codec, tensors: Sequence[ServedTensor], dtypes: Sequence[str], parts: Sequence[ServedPart]
    ) -> None:
        """`parts`: those of the bucket, in its order; `dtypes`: of all tensors."""
        self.codec = codec
        by_dtype: dict[str, list[int]] = {}
        for place, part in enumerate(parts):
            if tensors[part.tensor].is_coded:
                by_dtype.setdefault(dtypes[part.tensor], []).append(place)
        self.coded = tuple(
            CodedParts(dtype=dtype, members=tuple(places), tensors=_coded_tensors(tensors, [parts[n] for n in places]))
            for dtype, places in by_dtype.items()
        )
        """Parts that a codec compresses, by dtype."""
        inside = {place for one in self.coded for place in one.members}
        self.plain = tuple(place for place in range(len(parts)) if place not in inside)
        """Places in the bucket of parts that travel as they are."""
        self.plain_bytes = tuple(parts[place].numel * item_bytes(dtypes[parts[place].tensor]) for place in self.plain)
        self._messages: dict[tuple[bool, float], tuple[tuple[Message, ...], ...]] = {}
        """By what they depend on."""

    def messages(self, step: int) -> tuple[tuple[Message, ...], ...]:
        """The messages of each of the coded parts together, in a step counted from 0."""
        stage = is_dense(self.codec, step), density(self.codec, step)
        if stage not in self._messages:
            self._messages[stage] = tuple(
                messages_of(self.codec, one.tensors, one.dtype, num_replicas=1, step=step) for one in self.coded
            )
        return self._messages[stage]

    @property
    def head_bytes(self) -> int:
        """Length of the frame in front of messages."""
        return STEP_BYTES + sum(len(one.members) for one in self.coded)

    def frame_bytes(self, step: int) -> tuple[int, ...]:
        """The lengths of all frames in a step counted from 0, where every part has a gradient."""
        if not self.coded:
            return self.plain_bytes
        coded = [message.num_bytes for messages in self.messages(step) for message in messages]
        return (self.head_bytes, *coded, *self.plain_bytes)

    @property
    def longest_frame(self) -> int:
        """In any step: warm-ups send more at first."""
        return max((*self.frame_bytes(0), *self.frame_bytes(self.codec.warmup_steps)), default=0)


def rows_together(codec: Codec, shape: Sequence[int]) -> int:
    """Elements of a tensor that is compressed, of which servers hold all or none: a row of it for codecs that see rows,
    else one."""
    return math.prod(shape[1:]) if codec.name in _SEE_ROWS else 1


def _coded_tensors(tensors: Sequence[ServedTensor], parts: Sequence[ServedPart]) -> tuple[CodedTensor, ...]:
    offsets = itertools.accumulate((part.numel for part in parts), initial=0)
    return tuple(_coded(tensors[part.tensor], part, offset) for part, offset in zip(parts, offsets, strict=False))


def _coded(tensor: ServedTensor, part: ServedPart, offset: int) -> CodedTensor:
    """A part by its own name: codecs keep state, and draw random numbers, by name."""
    is_whole = part.numel == tensor.numel
    return CodedTensor(
        name=tensor.name if is_whole else f"{tensor.name}[{part.start}:{part.stop}]",
        shape=(tensor.numel // tensor.row_numel, tensor.row_numel),
        offset=offset,
        numel=part.numel,
        start=part.start,
    )
