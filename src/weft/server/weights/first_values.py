"""The first values of a server, as they come bucket by bucket: weights, what is not trained, and the optimizer's state
where training goes on."""

from __future__ import annotations

import torch

from weft.server.protocol.frames import tensor_of
from weft.server.protocol.layout import ServerLayout
from weft.server.protocol.message import Buffer, Kind, Malformed, Message
from weft.server.protocol.optimizer_state import PartState, read_states
from weft.server.protocol.settings import MASTER
from weft.server.weights.store import PartStore


class FirstValues:
    """Collects them until all are there."""

    def __init__(self, layout: ServerLayout) -> None:
        self._layout = layout
        self._values: dict[int, torch.Tensor] = {}
        self._states: dict[int, PartState] = {}
        self._fixed: dict[int, tuple[Buffer, ...]] = {}

    @property
    def are_here(self) -> bool:
        """All weights have come, and all that is not trained. A bucket's state comes before it."""
        layout = self._layout
        return len(self._values) == len(layout.parts) and len(self._fixed) == len(layout.fixed_buckets)

    def take(self, message: Message) -> None:
        """Take a bucket of weights, of state, or of what is not trained; raises Malformed."""
        layout, bucket = self._layout, message.bucket
        if message.kind == Kind.INITIAL_FIXED:
            self._take_fixed(message)
            return
        if bucket >= len(layout.buckets) or layout.owners[bucket] != message.place:
            raise Malformed(f"bucket {bucket} of rank {message.place}")
        parts = layout.buckets[bucket]
        if message.kind == Kind.INITIAL_STATE:
            states = read_states(message, [layout.parts[part].numel for part in parts])
            self._states |= zip(parts, states, strict=True)
            return
        expected = list(layout.frame_bytes()[bucket])
        if [len(one) for one in message.frames] != expected:
            raise Malformed(f"bucket {bucket} of {[len(one) for one in message.frames]} bytes")
        for part, frame in zip(parts, message.frames, strict=True):
            self._values[part] = tensor_of(frame, layout.dtype(part)).clone()

    def _take_fixed(self, message: Message) -> None:
        layout, bucket = self._layout, message.bucket
        if bucket >= len(layout.fixed_buckets) or layout.fixed_holders(bucket)[0] != message.place:
            raise Malformed(f"bucket {bucket} of what rank {message.place} does not train")
        if (found := tuple(len(one) for one in message.frames)) != layout.fixed_bytes(bucket):
            raise Malformed(f"bucket {bucket} of what is not trained, of {found[:4]} bytes")
        self._fixed[bucket] = tuple(bytes(one) for one in message.frames)

    def make_store(self) -> PartStore:
        """The weights and the optimizer that begin with these values, which are then its own."""
        settings, values = self._layout.settings, self._values
        self._values = {}
        store = PartStore(
            settings.tensors,
            self._layout.parts,
            [values[part] for part in range(len(self._layout.parts))],
            settings.optimizer,
            compensation=settings.compensation,
            scales_by_staleness=settings.lr_scaling == "staleness",
            pull=None if settings.pull == MASTER else getattr(torch, settings.pull),
            past_momentum=self._past_momentum(),
            fixed=[self._fixed[bucket] for bucket in range(len(self._fixed))],
        )
        store.load_states(self._states)
        return store

    def _past_momentum(self) -> set[int]:
        """Parts whose momentum dgc has applied on workers."""
        settings, parts = self._layout.settings, self._layout.parts
        if settings.compression.name != "dgc":
            return set()
        return {number for number, part in enumerate(parts) if settings.tensors[part.tensor].is_coded}
