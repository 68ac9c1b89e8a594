"""The exchange of buckets through codecs: one fixed order of collectives on all ranks, whatever a codec sends.

A bucket goes through phases, each of which starts one collective and is over when that is:

    sum inside      where several ranks of one replica, or of one host, are summed as they are: each gets a slice
    message 0, ...  the codec's, between replicas or hosts; the next one is made when the one before is decoded
    gather inside   of the slices

To start a bucket is to bring every earlier one a phase forward first, oldest first:

    start 0    0: message 0
    start 1    0: message 1      1: message 0
    start 2    0: is over        1: message 1      2: message 0
    finish                                         ...

So the order depends on the number of buckets alone, exchanges overlap with what is computed between two starts, and no
collective starts from a callback of another. Inside a backward pass in which layers exchange too, waiting could
deadlock (`sync/zero.py`): there only first phases are started, and `finish` does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from weft.codecs.base import Bucket, Codec
from weft.codecs.make import make_codec
from weft.comm.collectives import Pending, all_gather, all_reduce, reduce_scatter
from weft.comm.group import Group
from weft.layout import Range
from weft.parallel.zero.grouping import torch_dtype
from weft.plan.exchange.coded_tensor import CodedTensor, slice_of
from weft.plan.exchange.messages import Message, num_messages
from weft.plan.partition.zero import BufferPool
from weft.plan.plan import Codec as CodecSection

Phases = Iterator[bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class CodedBucket:
    """A flat buffer of values that a codec compresses."""

    tensors: tuple[CodedTensor, ...]
    numel: int
    dtype: torch.dtype


class CompressedExchange:
    """The codecs of some buckets, and their exchanges."""

    def __init__(
        self,
        buckets: Sequence[CodedBucket],
        codec: CodecSection,
        *,
        inside: Group,
        across: Group,
        device: torch.device,
        can_fail: bool,
        scale: float = 1.0,
        waits: bool = True,
        place: tuple[int, int] | None = None,
    ) -> None:
        """`inside`: ranks that are summed as they are; `across`: those between which the codec acts. `can_fail`: an
        exchange may be without effect (`end`). `scale`: factor on the sums. `waits`: earlier buckets may be waited for
        when another starts. `place`: this replica's number, and that of all, where they are not ranks of `across`."""
        self._section, self._inside, self._across, self._device = codec, inside, across, device
        self._can_fail, self._scale, self._waits = can_fail, scale, waits
        self.replica, self.num_replicas = place or (across.index, across.size)
        self._pool: BufferPool[torch.Tensor] = BufferPool(torch.Tensor.numel)
        self._in_flight: list[Phases] = []
        self._step = 0
        self.keep: float | torch.Tensor = 1.0
        """Unit of what is kept, relative to that of the next exchange's values."""
        self.momenta: Callable[[Sequence[str]], list[tuple[float, bool]]] | None = None
        """Momentum, and whether it is Nesterov's, of tensors by name, for a codec that takes it over (`dgc`)."""
        self.not_finite = torch.zeros(1, dtype=torch.float32, device=device)
        """Grows in an exchange with values that are not finite."""
        self.elsewhere: tuple[str, ...] = ()
        """Tensors that are compressed and of which nothing is here."""
        self._is_open = False
        self.codecs: tuple[Codec, ...] = ()
        self.lay_out(buckets)

    def lay_out(self, buckets: Sequence[CodedBucket]) -> None:
        """Exchange these buckets from now on, without state."""
        self._buckets = tuple(buckets)
        self.codecs = ()  # before there are new ones: their state must not be held twice
        slices = [self._slice(bucket) for bucket in self._buckets]
        self.codecs = tuple(
            make_codec(
                Bucket(
                    codec=self._section,
                    tensors=tensors,
                    numel=numel,
                    dtype=bucket.dtype,
                    device=self._device,
                    replica=self.replica,
                    num_replicas=self.num_replicas,
                    can_fail=self._can_fail,
                )
            )
            for bucket, (numel, tensors) in zip(self._buckets, slices, strict=True)
        )

    @property
    def names(self) -> list[str]:
        """All tensors that are compressed, also those of which only other ranks have a part."""
        return [*(one.name for bucket in self._buckets for one in bucket.tensors), *self.elsewhere]

    def _slice(self, bucket: CodedBucket) -> tuple[int, tuple[CodedTensor, ...]]:
        """Length and tensors of what this rank gives to the codec."""
        if self._inside.size == 1:
            return bucket.numel, bucket.tensors
        numel = -(-bucket.numel // self._inside.size)
        return numel, slice_of(bucket.tensors, numel * self._inside.index, numel * (self._inside.index + 1))

    def begin(self, step: int) -> None:
        """An exchange of all buckets comes, in this step, counted from 0; one before that did not end is dropped."""
        self.finish()  # what an error left under way, which all ranks have started
        self.end(is_made=False)
        self._step, self._is_open = step, True
        self.not_finite.zero_()
        if self.momenta is not None:
            for codec, bucket in zip(self.codecs, self._buckets, strict=True):
                names = [one.name for one in self._slice(bucket)[1]]
                codec.momenta = self.momenta(names)  # type: ignore[attr-defined]

    def start(self, number: int, values: torch.Tensor, done: Callable[[], None] | None = None) -> None:
        """Begin to replace the tensors in a bucket's values by their sums; `done` is called when they are there."""
        if self._waits:
            self._advance()
        phases = self._phases(number, values, done)
        if self._is_under_way(phases):
            self._in_flight.append(phases)

    def encode_all(self) -> None:
        """Bring all buckets to their first message: `not_finite` is complete."""
        if self._inside.size > 1:
            self._advance()

    def finish(self) -> None:
        """Wait until all buckets have their sums."""
        while self._in_flight:
            self._advance()

    def end(self, *, is_made: bool | torch.Tensor, factor: float | torch.Tensor = 1.0) -> None:
        """The exchange counts, and its values are multiplied by `factor` before they are used; or nothing is left of
        it."""
        if not self._is_open:
            return
        self._is_open = False
        for codec in self.codecs:
            codec.end(is_made)
        if isinstance(is_made, torch.Tensor):
            self.keep = torch.where(is_made.bool(), factor, self.keep)
        elif is_made:
            self.keep = factor

    def tensors(self) -> dict[str, torch.Tensor]:
        """All codecs' state, by "KIND/NAME"."""
        return {name: tensor for codec in self.codecs for name, tensor in codec.tensors().items()}

    def ranges(self) -> dict[str, Range]:
        """The range of each flattened tensor of which this rank's codecs keep state."""
        slices = (self._slice(bucket)[1] for bucket in self._buckets)
        return {one.name: (one.start, one.start + one.numel) for tensors in slices for one in tensors}

    @torch.no_grad()
    def lay_out_again(self, buckets: Sequence[CodedBucket]) -> None:
        """Exchange the same tensors in other buckets, with the state that they have; not where ranks have slices."""
        kept = {name: tensor.clone() for name, tensor in self.tensors().items()}
        assert not kept or self._inside.size == 1, "other buckets are cut into other slices"
        self.lay_out(buckets)
        mine = self.tensors()
        for name, tensor in kept.items():
            mine[name].copy_(tensor)

    @torch.no_grad()
    def mean_(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace tensors, together a bucket of them, by their means over replicas; collective."""
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            alike = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = torch.cat([tensor.reshape(-1) for tensor in alike])
            all_reduce(flat, self._across)
            means = flat.div_(self.num_replicas).split([tensor.numel() for tensor in alike])
            torch._foreach_copy_(alike, [mean.view(one.shape) for mean, one in zip(means, alike, strict=True)])

    def restart(self) -> None:
        """Drop all state."""
        self.finish()
        self._is_open, self.keep = False, 1.0
        self.lay_out(self._buckets)

    def _advance(self) -> None:
        self._in_flight = [phases for phases in self._in_flight if self._is_under_way(phases)]

    @torch.no_grad()
    def _is_under_way(self, phases: Phases) -> bool:
        """Go to the next phase of a bucket; False if there is none."""
        return next(phases, False)

    def _phases(self, number: int, values: torch.Tensor, done: Callable[[], None] | None) -> Phases:
        """The phases of one bucket: yields when it has just started an exchange."""
        mine, inside = values, self._inside
        if inside.size > 1:
            size = -(-values.numel() // inside.size)
            whole = self.borrow(size * inside.size, values.dtype)
            whole[: values.numel()].copy_(values)
            whole[values.numel() :].zero_()
            mine = self.borrow(size, values.dtype)
            yield from self._wait_for(reduce_scatter(mine, whole, inside, wait=False))
        yield from self._coded_phases(number, mine)
        if inside.size > 1:
            yield from self._wait_for(all_gather(whole, mine, inside, wait=False))
            for one in self._buckets[number].tensors:  # what lies between them is exchanged by others
                place = slice(one.offset, one.offset + one.numel)
                values[place].copy_(whole[place])
            self.hand_back(whole, mine)
        if done is not None:
            done()

    def _coded_phases(self, number: int, values: torch.Tensor) -> Phases:
        codec = self.codecs[number]
        is_empty = not self._slice(self._buckets[number])[1]  # on the counterparts in other replicas too
        messages = () if is_empty else codec.begin(self._step, keep=self.keep)
        for place, message in enumerate(messages):
            received, sent = self._buffers(message)
            codec.encode(place, values, sent, self.not_finite)
            if message.adds_up:
                yield from self._wait_for(all_reduce(sent, self._across, wait=False))
            else:
                yield from self._wait_for(all_gather(received, sent, self._across, wait=False))
            taken = sent if message.adds_up else received.view(self._across.size, -1)
            codec.decode(place, taken, values, scale=self._scale)
            self.hand_back(received)
        if self._inside.size > 1:  # slices may differ in their messages, and what follows has one order inside
            yield from (True for _ in range(len(messages), num_messages(self._section, self._step)))

    def _wait_for(self, pending: Pending) -> Phases:
        yield True
        pending.wait()

    def _buffers(self, message: Message) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory for what is received, and this rank's own message, which is part of it."""
        dtype, across = torch_dtype(message.dtype), self._across
        if message.adds_up:
            sent = self.borrow(message.numel, dtype)
            return sent, sent
        received = self.borrow(across.size * message.numel, dtype)
        return received, received[across.index * message.numel : (across.index + 1) * message.numel]

    def borrow(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat buffer, not initialised, until it is handed back."""
        found = self._pool.borrow(numel, dtype)
        return torch.empty(numel, dtype=dtype, device=self._device) if found is None else found[:numel]

    def hand_back(self, *buffers: torch.Tensor) -> None:
        for buffer in buffers:
            self._pool.hand_back(buffer if buffer._base is None else buffer._base, buffer.dtype)
