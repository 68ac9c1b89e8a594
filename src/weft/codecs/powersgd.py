"""PowerSGD: the sum of all replicas' matrices is approximated by one product of thin factors, which themselves add up.

With M the matrix of a replica's values and of what it has not sent yet, all replicas do one step of a power iteration
on the sum of their matrices, from the same start Q:

    message 0      P = M Q              added up, then its columns are made orthonormal (`low_rank.py`)
    message 1      Q = M^T P            added up; it is the start of the next exchange
    the sum is     P Q^T                the nearest matrix to the sum whose columns P spans
    not sent       M - P Q^T / number of replicas

Only sums of M enter, so many replicas do what one would that is given their sum. Two details are weft's own. Columns of
the start are scaled by powers of two, which changes no direction, so that products neither overflow nor vanish however
large gradients are. And a column that caught nothing, because the matrix was zero or of a lower rank, starts again from
where it did: a start of zero, which the formulas give, would never send anything again.

Matrices of one shape that lie at equal distances in the bucket are multiplied in one call, where they lie.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from weft.codecs.base import Bucket, Codec, views
from weft.codecs.formats.random_bits import key_of, normals
from weft.codecs.kept import Kept
from weft.codecs.low_rank import TorchLowRank, add_kept, find_low_rank
from weft.plan.exchange.coded_tensor import CodedTensor
from weft.plan.exchange.low_rank import rank_of
from weft.plan.exchange.messages import Message, messages_of
from weft.plan.exchange.warm_up import is_dense


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrices:
    """Matrices of one shape, at equal distances in the flat buffer of values."""

    names: tuple[str, ...]
    rank: int
    num_rows: int
    num_columns: int
    offset: int
    """Of the first matrix in the values."""
    distance: int
    """From the beginning of one to that of the next."""
    left_offset: int
    """Of their left factors, [matrix, rank, row], in the first message."""
    right_offset: int
    """Of their right factors, [matrix, rank, column], in the second message."""

    @property
    def left_numel(self) -> int:
        return len(self.names) * self.rank * self.num_rows

    @property
    def right_numel(self) -> int:
        return len(self.names) * self.rank * self.num_columns

    def among(self, values: torch.Tensor) -> torch.Tensor:
        """[matrix, row, column], where they lie."""
        shape = (len(self.names), self.num_rows, self.num_columns)
        start = values.storage_offset() + self.offset
        return values.as_strided(shape, (self.distance, self.num_columns, 1), start)

    def left(self, message: torch.Tensor) -> torch.Tensor:
        """[matrix, rank, row], in a tensor like the first message."""
        part = message[self.left_offset : self.left_offset + self.left_numel]
        return part.view(len(self.names), self.rank, self.num_rows)

    def right(self, message: torch.Tensor) -> torch.Tensor:
        """[matrix, rank, column], in a tensor like the second message."""
        part = message[self.right_offset : self.right_offset + self.right_numel]
        return part.view(len(self.names), self.rank, self.num_columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Neighbouring elements of the values, and where they lie in a message."""

    offset: int
    message_offset: int
    numel: int

    def among(self, values: torch.Tensor) -> torch.Tensor:
        return values[self.offset : self.offset + self.numel]

    def inside(self, message: torch.Tensor) -> torch.Tensor:
        return message[self.message_offset : self.message_offset + self.numel]


class PowerSgd(Codec):
    """Low-rank factors of a bucket's matrices, with error feedback and a warm start."""

    learns_from_decoding = True

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._batches = tuple(_batches(bucket))
        num_left = sum(batch.left_numel for batch in self._batches)
        rests = [(one.offset + one.numel - one.num_rest, one.num_rest) for one in bucket.tensors]
        self._rests = _stretches(rests, num_left)
        self._tensors = _stretches([(one.offset, one.numel) for one in bucket.tensors], 0)
        kind = (bucket.dtype, bucket.device)
        self._residual = Kept(bucket.num_kept, *kind, can_fail=bucket.can_fail)
        self._start = Kept(sum(one.right_numel for one in self._batches), *kind, can_fail=bucket.can_fail)
        self._first = torch.empty(num_left + sum(one.numel for one in self._rests), dtype=kind[0], device=kind[1])
        """The sum of the first messages, with orthonormal factors."""
        self._arithmetic = find_low_rank(bucket.device, bucket.dtype)
        self._messages: dict[bool, tuple[Message, ...]] = {}
        """By whether values travel as they are."""
        self._has_begun = False
        self._set_first_start()

    def begin(self, step: int, *, keep: float | torch.Tensor = 1.0) -> tuple[Message, ...]:
        bucket = self._bucket
        self._has_begun, self._is_dense = True, is_dense(bucket.codec, step)
        self._keep = bucket.codec.memory * keep
        if self._is_dense not in self._messages:
            dtype, num_replicas = str(bucket.dtype).removeprefix("torch."), bucket.num_replicas
            found = messages_of(bucket.codec, bucket.tensors, dtype, num_replicas=num_replicas, step=step)
            self._messages[self._is_dense] = found
        return self._messages[self._is_dense]

    def encode(self, number: int, values: torch.Tensor, message: torch.Tensor, not_finite: torch.Tensor) -> None:
        if number > 0:
            for batch in self._batches:
                torch.bmm(batch.left(self._first), batch.among(self._residual.new), out=batch.right(message))
            return
        kept, wanted, start = self._residual.old, self._residual.new, self._start.old
        arithmetic = TorchLowRank() if isinstance(self._keep, torch.Tensor) else self._arithmetic
        for batch in () if self._is_dense else self._batches:
            arithmetic.encode(
                batch.among(values),
                batch.among(kept),
                self._keep,
                wanted=batch.among(wanted),
                right=batch.right(start),
                left=batch.left(message),
            )
        for stretch in self._tensors if self._is_dense else self._rests:
            add_kept(stretch.among(values), stretch.among(kept), self._keep, out=stretch.inside(message))
            stretch.among(wanted).zero_()
        if message.numel():
            # A value that is not finite makes its row's products so, even one with zero.
            not_finite += torch.linalg.vector_norm(message, torch.inf).isfinite().logical_not()
        self._orthonormalise_alone(message)

    def _orthonormalise_alone(self, message: torch.Tensor) -> None:
        """Of one replica the first message is the sum already. Its factors leave orthonormal, so that who decodes it on
        another machine, where rounding may differ, has the same ones: to make them so again changes next to nothing."""
        if self._bucket.num_replicas == 1 and not self._is_dense:
            for batch in self._batches:
                self._arithmetic.orthonormalise_(batch.left(message))

    def decode(self, number: int, received: torch.Tensor, values: torch.Tensor, *, scale: float = 1.0) -> None:
        if number == 0 and not self._is_dense:
            self._first.copy_(received)
            for batch in self._batches:
                self._arithmetic.orthonormalise_(batch.left(self._first))
            return
        as_they_are, plain = (self._tensors, received) if self._is_dense else (self._rests, self._first)
        for stretch in as_they_are:
            torch.mul(stretch.inside(plain), scale, out=stretch.among(values))
        if self._bucket.only_decodes:
            self._expand(received, values, scale)
            return
        for batch in () if self._is_dense else self._batches:
            self._arithmetic.decode(
                batch.left(self._first),
                batch.right(received),
                scale=scale,
                share=1 / self._bucket.num_replicas,
                values=batch.among(values),
                wanted=batch.among(self._residual.new),
            )
        if self._is_dense:
            self._start.write(self._start.old)
        else:
            self._set_next_start(received)

    def _expand(self, received: torch.Tensor, values: torch.Tensor, scale: float) -> None:
        """The products of both factors, where nothing is kept."""
        for batch in () if self._is_dense else self._batches:
            matrices = batch.among(values)
            torch.baddbmm(
                matrices, batch.left(self._first).mT, batch.right(received), beta=0, alpha=scale, out=matrices
            )

    def end(self, is_made: bool | torch.Tensor) -> None:
        if not self._has_begun:  # values travelled without the codec
            return
        self._has_begun = False
        for kept in (self._residual, self._start):
            if isinstance(is_made, bool):
                kept.end(is_made)
            else:  # products need to know where matrices lie, so on a GPU the copies keep their places
                torch.where(is_made.reshape(1).bool(), kept.new, kept.old, out=kept.old)

    def tensors(self) -> dict[str, torch.Tensor]:
        return views(self._bucket, self._residual.settle(), "residual") | self._starts(self._start.settle())

    def _set_next_start(self, received: torch.Tensor) -> None:
        for batch in self._batches:
            old, new = batch.right(self._start.old), batch.right(self._start.new)
            size = _start_size(batch.num_columns)
            self._arithmetic.next_start(batch.right(received), old, size=size, new=new)

    def _set_first_start(self) -> None:
        """Directions by chance, a function of the tensor's name."""
        starts = self._starts(self._start.pair[0])
        for batch in self._batches:
            for name in batch.names:
                part = starts[f"start/{name}"].view(batch.rank, batch.num_columns)
                drawn = normals(key_of(name, 0), part.numel(), part.dtype, part.device)
                part.copy_(drawn.view(batch.num_columns, batch.rank).mT * (_start_size(batch.num_columns) / 4))

    def _starts(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            f"start/{name}": part.reshape(-1)
            for batch in self._batches
            for name, part in zip(batch.names, batch.right(flat), strict=True)
        }


def _start_size(num_columns: int) -> float:
    """The size of the largest element of a start: so small that no sum of products is larger than the values."""
    return 2.0 ** -math.ceil(math.log2(num_columns))


def _batches(bucket: Bucket) -> Iterator[Matrices]:
    """The bucket's matrices, by shape and by distance from each other."""
    by_shape: dict[tuple[int, int, int], list[CodedTensor]] = {}
    for one in sorted(bucket.tensors, key=lambda one: one.offset):
        if rank := rank_of(bucket.codec, one):
            by_shape.setdefault((rank, one.num_rows, one.num_columns), []).append(one)
    left_offset = right_offset = 0
    for (rank, num_rows, num_columns), alike in by_shape.items():
        for members in _equally_far(alike):
            batch = Matrices(
                names=tuple(one.name for one in members),
                rank=rank,
                num_rows=num_rows,
                num_columns=num_columns,
                offset=members[0].offset,
                distance=members[1].offset - members[0].offset if len(members) > 1 else num_rows * num_columns,
                left_offset=left_offset,
                right_offset=right_offset,
            )
            yield batch
            left_offset += batch.left_numel
            right_offset += batch.right_numel


def _equally_far(tensors: Sequence[CodedTensor]) -> Iterator[list[CodedTensor]]:
    """Tensors in the order of their offsets, cut into parts in which each is as far from the one before as the next."""
    part: list[CodedTensor] = []
    for one in tensors:
        if len(part) > 1 and one.offset - part[-1].offset != part[1].offset - part[0].offset:
            yield part
            part = []
        part.append(one)
    if part:
        yield part


def _stretches(ranges: Sequence[tuple[int, int]], message_offset: int) -> list[Stretch]:
    """These ranges (offset, number of elements), one after the other from there in a message; neighbours are one."""
    found: list[Stretch] = []
    for offset, numel in ranges:
        last = found[-1] if found else None
        if last and last.offset + last.numel == offset:
            found[-1] = Stretch(offset=last.offset, message_offset=last.message_offset, numel=last.numel + numel)
        elif numel:
            found.append(Stretch(offset=offset, message_offset=message_offset, numel=numel))
        message_offset += numel
    return found
