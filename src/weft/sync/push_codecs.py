"""What a worker of servers sends of its gradients through codecs, and what it keeps of them.

    bucket complete ── encode ── frames, kept until they are applied ──> server
    next weights here ── end ── the state that counts is the one before, or the new one

A bucket is encoded when it is pushed, into memory of its own: it may have to be sent again, and is not encoded anew
then. What is not sent stays here. A step of which no update is made (a gradient is not finite, the worker has no
targets, its gradients came too late) leaves codecs as they were: all of that step is lost, and nothing of earlier ones.

Gradients are sums over targets divided by a number that changes from step to step, and so is what is kept: `unit`
brings it from the last exchange of a bucket to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from weft.codecs.base import Bucket, Codec, splits
from weft.codecs.dgc import Dgc
from weft.codecs.make import make_codec
from weft.parallel.zero.grouping import torch_dtype
from weft.plan.exchange.codec_memory import NUM_KEPT
from weft.plan.exchange.push_format import CodedParts, PushFormat
from weft.plan.plan import Codec as CodecSection
from weft.server.protocol.frames import frame_of
from weft.server.protocol.message import Buffer
from weft.server.protocol.pushes import Push, pack_push
from weft.sync.push_when_complete import BucketKey

Momentum = Callable[[BucketKey, int], tuple[float, bool]]
"""Of a part in a bucket: the optimizer's momentum, and whether it is Nesterov's."""


class _Group:
    """Parts of a bucket that one codec compresses."""

    def __init__(self, key: BucketKey, parts: CodedParts, codec: Codec) -> None:
        self.key, self.parts, self.codec = key, parts, codec
        self.unit = 1.0
        """Of what is kept, relative to that of the next gradient."""
        self.lasting = (False,) * len(parts.members)
        """Something may be kept of a part, so that it is sent also where it has no gradient."""
        self.sent = self.lasting
        """Parts that were encoded in this step."""


class PushCodecs:
    """The codecs of the buckets that a rank pushes."""

    def __init__(
        self,
        codec: CodecSection,
        formats: Mapping[BucketKey, PushFormat],
        *,
        worker: int,
        device: torch.device,
        momentum: Momentum | None = None,
    ) -> None:
        """`worker`: its number, from which random numbers are drawn. `momentum`: for dgc, which takes it over."""
        self._codec, self._formats, self._device, self._momentum = codec, formats, device, momentum
        self._groups = {
            key: [_Group(key, parts, self._make_codec(parts, worker)) for parts in one.coded]
            for key, one in formats.items()
        }
        self._not_finite = torch.zeros(1, dtype=torch.float32, device=device)
        self._open: list[_Group] = []
        """Those that have encoded something of this step."""
        self.keeps = codec.name in NUM_KEPT
        """Something of gradients is kept from step to step."""
        numels: dict[str, int] = {}
        for group in (one for groups in self._groups.values() for one in groups):
            numels[group.parts.dtype] = max(numels.get(group.parts.dtype, 0), group.parts.numel)
        self._values = {
            dtype: torch.empty(numel, dtype=torch_dtype(dtype), device=device) for dtype, numel in numels.items()
        }
        """Where the values of one bucket after the other are made ready, by dtype."""

    def _make_codec(self, parts: CodedParts, worker: int) -> Codec:
        return make_codec(
            Bucket(
                codec=self._codec,
                tensors=parts.tensors,
                numel=parts.numel,
                dtype=torch_dtype(parts.dtype),
                device=self._device,
                replica=worker,
                num_replicas=1,
            )
        )

    def begin(self) -> None:
        """A step begins; what an error left of the one before is dropped."""
        self.end(is_made=False)
        self._not_finite.zero_()

    @property
    def is_finite(self) -> bool:
        """All gradients of this step that were encoded are finite; waits for a GPU."""
        return not float(self._not_finite)

    @torch.no_grad()
    def encode(self, key: BucketKey, gradients: Sequence[torch.Tensor | None], *, step: int) -> list[Buffer] | None:
        """The frames of a bucket in a step, counted from 0; None if there is nothing to send. `gradients`: flat, of its
        parts; None for a part without one."""
        push_format, are_there, messages = self._formats[key], [], []
        for group in self._groups[key]:
            mine = [gradients[place] for place in group.parts.members]
            there = tuple(one is not None or lasts for one, lasts in zip(mine, group.lasting, strict=True))
            are_there.append(there)
            messages.append(self._encode(group, mine, step) if any(there) else ())
            group.sent = there
        plain = [gradients[place] for place in push_format.plain]
        self._look_at([one for one in plain if one is not None])
        if not any(map(any, are_there)) and all(one is None for one in plain):
            return None
        # Of parts that are compressed together, and of which none is there, the messages are empty.
        numbers = map(len, push_format.messages(step)) if are_there else ()
        sent = [found or (b"",) * number for found, number in zip(messages, numbers, strict=True)]
        return pack_push(
            Push(
                step=step,
                are_there=tuple(are_there),
                messages=tuple(tuple(found) for found in sent),
                plain=tuple(b"" if one is None else frame_of(one.cpu()) for one in plain),
            )
        )

    def _encode(self, group: _Group, gradients: Sequence[torch.Tensor | None], step: int) -> tuple[Buffer, ...]:
        codec, parts = group.codec, group.parts
        values = self._values[parts.dtype][: parts.numel]
        for own, gradient in zip(splits(parts.tensors, values), gradients, strict=True):
            if gradient is None:
                own.zero_()
            else:
                own.copy_(gradient)
        if isinstance(codec, Dgc):
            assert self._momentum is not None, "dgc takes over momenta"
            codec.momenta = [self._momentum(group.key, place) for place in parts.members]
        frames = []
        self._open.append(group)
        for number, message in enumerate(codec.begin(step, keep=group.unit)):
            sent = torch.empty(message.numel, dtype=torch_dtype(message.dtype), device=self._device)
            codec.encode(number, values, sent, self._not_finite)
            if codec.learns_from_decoding:  # of one replica: what is received is what was sent
                codec.decode(number, sent, values)
            frames.append(frame_of(sent.cpu()))
        return tuple(frames)

    def _look_at(self, plain: Sequence[torch.Tensor]) -> None:
        """Gradients that travel as they are must be finite, too, for codecs to go on."""
        for one in plain:
            self._not_finite += (~torch.isfinite(one.sum())).float()

    def end(self, *, is_made: bool, unit: float = 1.0) -> None:
        """An update was made of what was encoded since `begin`, or nothing is left of it. `unit`: that of this step's
        gradients relative to the next one's."""
        for group in self._open:
            group.codec.end(is_made)
            if is_made:
                group.unit = 1.0
                group.lasting = group.sent if self.keeps else group.lasting
        self._open = []
        for groups in self._groups.values():
            for group in groups:
                group.unit *= unit

    def _named(self) -> Iterator[tuple[str, _Group]]:
        for (server, bucket), groups in self._groups.items():
            for number, group in enumerate(groups):
                yield f"{server}/{bucket}/{number}", group

    def tensors(self) -> dict[str, torch.Tensor]:
        """All that codecs keep between two steps, itself, by name."""
        return {f"{place}/{name}": one for place, group in self._named() for name, one in group.codec.tensors().items()}

    def values(self) -> dict[str, Any]:
        """Plain values that belong to it."""
        return {place: [group.unit, list(group.lasting)] for place, group in self._named()}

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any]) -> None:
        """Go on with what `tensors` and `values` gave under the same plan."""
        for name, one in self.tensors().items():
            one.copy_(tensors[name])
        for place, group in self._named():
            group.unit, group.lasting = float(values[place][0]), tuple(values[place][1])
