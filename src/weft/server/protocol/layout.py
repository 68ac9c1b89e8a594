"""One server's side of the settings: its parts, the buckets they travel in, and how long every frame is."""

from __future__ import annotations

from dataclasses import dataclass, field

from weft.plan.exchange.push_format import PushFormat
from weft.plan.partition.flat_buffers import item_bytes
from weft.plan.partition.server_shards import ServedPart, assign_buckets, assign_parts
from weft.server.protocol.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLayout:
    """What one server holds, and the messages in which it comes and goes. Workers and the server compute it alike."""

    settings: Settings
    server: int
    parts: tuple[ServedPart, ...]
    buckets: tuple[tuple[int, ...], ...]
    """Numbers of the parts in each message, buckets in the order of the forward pass."""
    pushes: tuple[PushFormat, ...] = field(compare=False, repr=False)
    """How the gradients of each bucket travel."""
    fixed_parts: tuple[ServedPart, ...] = ()
    """Of what is not trained."""
    fixed_buckets: tuple[tuple[int, ...], ...] = ()
    """Numbers of these parts in each message."""

    @classmethod
    def of(cls, settings: Settings, server: int) -> ServerLayout:
        parts = assign_parts(
            settings.tensors, settings.num_servers, splits=settings.splits, most_bytes=settings.bucket_bytes
        )[server]
        buckets = assign_buckets(settings.tensors, parts, bucket_bytes=settings.bucket_bytes)
        codec, tensors, dtypes = settings.compression, settings.tensors, settings.dtypes
        pushes = tuple(PushFormat(codec, tensors, dtypes, [parts[one] for one in bucket]) for bucket in buckets)
        fixed = assign_parts(settings.fixed, settings.num_servers, most_bytes=settings.bucket_bytes)[server]
        return cls(
            settings=settings,
            server=server,
            parts=parts,
            buckets=buckets,
            pushes=pushes,
            fixed_parts=fixed,
            fixed_buckets=assign_buckets(settings.fixed, fixed, bucket_bytes=settings.bucket_bytes),
        )

    def fixed_holders(self, bucket: int) -> tuple[int, ...]:
        """The ranks of a worker that have a bucket of what is not trained; the first of them sends its values."""
        return self.settings.fixed[self.fixed_parts[self.fixed_buckets[bucket][0]].tensor].holders

    def fixed_bytes(self, bucket: int) -> tuple[int, ...]:
        """The lengths of the frames of a bucket of what is not trained."""
        parts = [self.fixed_parts[part] for part in self.fixed_buckets[bucket]]
        return tuple(part.numel * self.settings.fixed[part.tensor].item_bytes for part in parts)

    def holders(self, bucket: int) -> tuple[int, ...]:
        """The ranks of a worker that need a bucket; the first of them sends its gradients."""
        return self.settings.tensors[self.parts[self.buckets[bucket][0]].tensor].holders

    @property
    def owners(self) -> tuple[int, ...]:
        """The rank that sends each bucket."""
        return tuple(self.holders(bucket)[0] for bucket in range(len(self.buckets)))

    @property
    def longest_frame(self) -> int:
        """Bytes of the longest frame of tensors."""
        weights = [num_bytes for lengths in self.frame_bytes() for num_bytes in lengths]
        fixed = [num_bytes for bucket in range(len(self.fixed_buckets)) for num_bytes in self.fixed_bytes(bucket)]
        return max([*weights, *fixed, *(one.longest_frame for one in self.pushes)], default=0)

    def dtype(self, part: int) -> str:
        """Of the master weights."""
        return self.settings.dtypes[self.parts[part].tensor]

    def frame_bytes(self, dtype: str | None = None) -> tuple[tuple[int, ...], ...]:
        """The lengths of the frames of every bucket of weights, in the master's dtype or in another one."""
        return tuple(
            tuple(self.parts[part].numel * item_bytes(dtype or self.dtype(part)) for part in bucket)
            for bucket in self.buckets
        )
