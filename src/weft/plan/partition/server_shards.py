"""Which server holds which part of which tensor, with `[data] sync = "server"`.

Large tensors are cut into as many parts as there are servers, so that every layer arrives from all of them at once, in
the order of layers; small ones go whole to the server that has the fewest bytes so far. Where a codec compresses
tensors, or an optimizer treats rows as such, cuts fall between rows. Where a tensor must stay on one server
(LARS and LAMB need its norm), the largest are given out first, each to the server with the fewest bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from weft.errors import PlanError

LEAST_PART_BYTES = 65536
"""Parts are not smaller than this: a message of less costs its header rather than its bytes."""
MOST_PARTS_TOGETHER = 4096
"""Parts in one message, whose header counts 65,535 frames: weights, and some for what the optimizer keeps of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedTensor:
    """A tensor that servers hold, as its part on one rank of a worker."""

    name: str
    numel: int
    item_bytes: int
    """Of one element of the master weights."""
    row_numel: int = 1
    """Elements that stay on one server."""
    holders: tuple[int, ...] = (0,)
    """The ranks of a worker that have it; the first of them sends its gradient."""
    is_coded: bool = False
    """A codec compresses its gradient, each part by itself."""

    @property
    def num_bytes(self) -> int:
        return self.numel * self.item_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedPart:
    """Consecutive elements of a flattened tensor on one server."""

    tensor: int
    """The tensor's number, in the order of the forward pass."""
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


def assign_parts(
    tensors: Sequence[ServedTensor], num_servers: int, *, splits: bool = True, most_bytes: int | None = None
) -> tuple[tuple[ServedPart, ...], ...]:
    """The parts of each server, in the order of tensors; every element is on one server. A server may have none.

    `splits`: large tensors are on all servers. `most_bytes`: parts are cut into pieces of this size, or of one row, so
    that a large one leaves and arrives piece by piece."""
    if num_servers < 1:
        raise PlanError(f"{num_servers} servers hold nothing; set [server] shards to 1 or more")
    held: list[list[ServedPart]] = [[] for _ in range(num_servers)]
    num_bytes = [0] * num_servers
    whole: list[int] = []
    for number, one in enumerate(tensors):
        cuts = _cuts(one, num_servers) if splits else None
        if cuts is None:
            whole.append(number)
            continue
        # The first parts have a row more; which server gets these goes around.
        order = sorted(range(num_servers), key=lambda server: num_bytes[server])
        for server, (start, stop) in zip(order, cuts, strict=True):
            held[server].append(ServedPart(tensor=number, start=start, stop=stop))
            num_bytes[server] += (stop - start) * one.item_bytes
    for number in sorted(whole, key=lambda number: -tensors[number].num_bytes):
        if not tensors[number].numel:
            continue
        server = min(range(num_servers), key=lambda server: num_bytes[server])
        held[server].append(ServedPart(tensor=number, start=0, stop=tensors[number].numel))
        num_bytes[server] += tensors[number].num_bytes
    in_order = (sorted(parts, key=lambda part: part.tensor) for parts in held)
    if most_bytes is None:
        return tuple(tuple(parts) for parts in in_order)
    return tuple(tuple(piece for part in parts for piece in _pieces(part, tensors, most_bytes)) for parts in in_order)


def _pieces(part: ServedPart, tensors: Sequence[ServedTensor], most_bytes: int) -> Iterator[ServedPart]:
    one = tensors[part.tensor]
    rows = one.row_numel if part.numel % one.row_numel == 0 else part.numel
    each = max(most_bytes // (rows * one.item_bytes), 1) * rows
    for start in range(part.start, part.stop, each):
        yield ServedPart(tensor=part.tensor, start=start, stop=min(start + each, part.stop))


def assign_buckets(
    tensors: Sequence[ServedTensor], parts: Sequence[ServedPart], *, bucket_bytes: int
) -> tuple[tuple[int, ...], ...]:
    """The parts of a server that travel in one message, as their numbers: neighbours with the same holders, up to
    `bucket_bytes` of them (and `MOST_PARTS_TOGETHER`), one at least. Buckets are in the order of their first parts."""
    buckets: list[list[int]] = []
    is_open: dict[tuple[int, ...], tuple[int, int]] = {}
    for number, part in enumerate(parts):
        tensor = tensors[part.tensor]
        num_bytes = part.numel * tensor.item_bytes
        place, so_far = is_open.get(tensor.holders, (-1, 0))
        if place < 0 or so_far + num_bytes > bucket_bytes or len(buckets[place]) == MOST_PARTS_TOGETHER:
            place, so_far = len(buckets), 0
            buckets.append([])
        buckets[place].append(number)
        is_open[tensor.holders] = place, so_far + num_bytes
    return tuple(tuple(bucket) for bucket in buckets)


def _cuts(one: ServedTensor, num_servers: int) -> list[tuple[int, int]] | None:
    """Nearly equal ranges of whole rows, the longest first; None if the tensor is too small to be cut."""
    rows, rest = divmod(one.numel, one.row_numel)
    if num_servers == 1 or rest or rows < num_servers or one.num_bytes < num_servers * LEAST_PART_BYTES:
        return None
    each, more = divmod(rows, num_servers)
    stops = [one.row_numel * (each * (server + 1) + min(server + 1, more)) for server in range(num_servers)]
    return list(zip([0, *stops[:-1]], stops, strict=True))
