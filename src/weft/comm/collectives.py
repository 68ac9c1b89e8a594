"""Collectives on a group of ranks, with bytes and blocked seconds counted by axis.

Each call works in place or into tensors the caller owns, so that buffers can be kept from step to step. With
`wait=False` it returns a `Pending` at once, and the caller must wait for it. A group of one rank exchanges nothing.
Roots are places in the group, not global ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from weft.comm.failures.activity import ExchangeRecord, What
from weft.comm.gloo import parts_to_add, start_all_gather, start_reduce_scatter
from weft.comm.group import Group, Traffic
from weft.comm.pairwise import WaitAll
from weft.comm.shared_memory.reduction import REDUCE_OPS, Reduction, add_into
from weft.comm.shared_memory.transport import SharedTransport
from weft.comm.two_level import TwoLevel
from weft.plan.partition.wire import Collective, sent_bytes

# torch 2.13 renamed the flat forms and warns about the old names, which are the only ones 2.11 has.
_all_gather_flat: Callable[..., _Work | None] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter_flat: Callable[..., _Work | None] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


_NOTHING = nullcontext()


def hide_from_modes() -> AbstractContextManager[object]:
    """Context in which no TorchDispatchMode sees operators. A policy of recomputation expects the same ones in a second
    run, and a transport that keeps a view of its memory has fewer then."""
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else _NOTHING


class _Work(Protocol):
    def wait(self) -> object: ...


@dataclass(slots=True, eq=False)
class Pending:
    """An exchange under way. `wait` blocks until it is done (on CUDA: until the stream may go on) and is timed."""

    _work: _Work | None
    _traffic: Traffic
    _after: Callable[[], object] | None = None
    _waits_on_stream: bool = False
    """`wait` makes a stream of a GPU wait, not the host."""
    _record: ExchangeRecord | None = None
    """Where it is noted that this rank waits, and for what."""
    _what: What | None = None

    @property
    def is_over(self) -> bool:
        """True if `wait` is known not to block."""
        work = self._work
        return work is None or (isinstance(work, dist.Work | WaitAll) and work.is_completed())

    def wait(self, *, since: float | None = None) -> None:
        """`since`: when the caller began to wait, if that was before."""
        if self._work is None:
            return
        started = time.perf_counter() if since is None else since
        record = self._record
        if record is not None:
            record.since_s, record.waiting = started, self._what
        try:
            with hide_from_modes(), self._traffic.time_stream_wait() if self._waits_on_stream else _NOTHING:
                self._work.wait()
                if self._after is not None:
                    self._after()
        finally:
            if record is not None:
                record.waiting = None
        if not self._waits_on_stream:
            self._traffic.add(wait_s=time.perf_counter() - started)
        self._work = None


def all_reduce(
    tensor: torch.Tensor,
    group: Group,
    *,
    op: Reduction = "sum",
    wait: bool = True,
    after: Callable[[], None] | None = None,
) -> Pending:
    """Every rank ends with the reduction of all ranks' tensors, in place; `after` runs when it is waited for."""
    run = partial(_run, group, "all-reduce", tensor, wait=wait, after=after)
    wire = group.wire(tensor) or group.level_wire(tensor)
    if wire is not None:
        return run(lambda _: wire.all_reduce(tensor, op), wire=wire)
    return run(lambda later: dist.all_reduce(tensor, REDUCE_OPS[op], group.handle, later))


def broadcast(tensor: torch.Tensor, group: Group, *, root: int = 0, wait: bool = True) -> Pending:
    """Every rank ends with the root's tensor, in place."""
    run = partial(_run, group, "broadcast", tensor, wait=wait)
    wire = group.wire(tensor) or group.level_wire(tensor)
    if wire is not None:
        return run(lambda _: wire.broadcast(tensor, root), wire=wire)
    return run(lambda later: dist.broadcast(tensor, group.ranks[root], group.handle, later))


def all_gather(output: torch.Tensor, tensor: torch.Tensor, group: Group, *, wait: bool = True) -> Pending:
    """`output` ends as all ranks' tensors, one after another along dim 0; `tensor` may be this rank's place in it."""
    if group.size == 1 and output.data_ptr() != tensor.data_ptr():
        output.copy_(tensor.reshape(output.shape))
    run = partial(_run, group, "all-gather", output, wait=wait)
    shared = group.wire(tensor)
    if shared is not None and shared.barrier.is_common(output):
        return run(lambda _: shared.arrive())
    wire = shared or group.level_wire(tensor, is_even=True)
    if wire is not None:
        outputs = list(output.view(group.size, -1))
        return run(lambda _: wire.all_gather(outputs, tensor), wire=wire)
    if uses_messages(group, tensor):
        return run(lambda _: start_all_gather(output, tensor, group))
    return run(lambda later: _all_gather_flat(output, tensor, group.handle, later))


def reduce_scatter(
    output: torch.Tensor,
    tensor: torch.Tensor,
    group: Group,
    *,
    add: bool = False,
    received: torch.Tensor | None = None,
    wait: bool = True,
) -> Pending:
    """`output` ends as this rank's equal part, along dim 0, of the sum of all ranks' tensors; `add`: grows by it.

    `output` may be this rank's place in `tensor`, and of a wider dtype. `received` is memory for the other ranks'
    parts, of the size and dtype of `tensor`, for callers that keep it from call to call; of use where `uses_messages`.
    """
    if group.size == 1:
        if add or output.data_ptr() != tensor.data_ptr():
            _store(output, tensor.reshape(output.shape), add)
        return Pending(None, group.traffic)
    run = partial(_run, group, "reduce-scatter", tensor, wait=wait)
    wire = group.wire(tensor) or group.level_wire(tensor, is_even=True)
    if wire is not None:
        return run(lambda _: wire.reduce_scatter(output, tensor, add=add), wire=wire)
    target = output.view(-1)
    if uses_messages(group, tensor):
        rows = torch.empty_like(tensor).view(-1) if received is None else received
        return run(
            lambda _: start_reduce_scatter(tensor, rows, group),
            after=lambda: add_into(target, parts_to_add(tensor, rows, group), add=add),
        )
    in_place = not add and target.dtype == tensor.dtype
    result = target if in_place else tensor.new_empty(target.numel())
    return run(
        lambda later: _reduce_scatter_flat(result, tensor.view(-1), dist.ReduceOp.SUM, group.handle, later),
        after=None if in_place else lambda: _store(target, result, add),
    )


def _store(target: torch.Tensor, result: torch.Tensor, add: bool) -> None:
    if add:
        target.add_(result)
    else:
        target.copy_(result)


def uses_messages(group: Group, tensor: torch.Tensor) -> bool:
    """True if parts go as messages from rank to rank: gloo cannot send from a GPU, and NCCL has its own collectives."""
    is_direct = group.wire(tensor) is None and group.level_wire(tensor, is_even=True) is None
    return group.handle is not None and is_direct and tensor.device.type == "cpu" and not group.is_stream_ordered


def all_to_all(
    output: torch.Tensor,
    tensor: torch.Tensor,
    group: Group,
    *,
    output_splits: list[int] | None = None,
    input_splits: list[int] | None = None,
    wait: bool = True,
) -> Pending:
    """Part k of `tensor` along dim 0 goes to rank k; `output` is what all ranks sent here, in order of rank.

    Parts are equal unless their lengths are given.
    """
    if group.size == 1:
        output.copy_(tensor)
    sent = None
    if input_splits is not None:  # a rank keeps its own part, whatever its size
        sent = tensor.nbytes - tensor[: input_splits[group.index]].nbytes
    run = partial(_run, group, "all-to-all", tensor, wait=wait, sent=sent)
    wire = group.wire(tensor)
    if wire is not None:
        received, given = (
            _lengths(one, splits, group.size) for one, splits in ((output, output_splits), (tensor, input_splits))
        )
        return run(lambda _: wire.all_to_all(output, tensor, received, given), wire=wire)
    return run(lambda later: dist.all_to_all_single(output, tensor, output_splits, input_splits, group.handle, later))


def _lengths(tensor: torch.Tensor, splits: list[int] | None, size: int) -> list[int]:
    """Elements of each part of a tensor."""
    if splits is None:
        return [tensor.numel() // size] * size
    row = tensor[0].numel() if len(tensor) else 0
    return [length * row for length in splits]


def _run(
    group: Group,
    collective: Collective,
    buffer: torch.Tensor,
    start: Callable[[bool], _Work | None],
    *,
    wait: bool,
    wire: SharedTransport | TwoLevel | None = None,
    after: Callable[[], None] | None = None,
    sent: int | None = None,
) -> Pending:
    """Start an exchange and count it: by its kind and buffer, or as the bytes `sent` where parts differ in size.

    `start` is told whether to return before the exchange is over. On a `wire` it does the whole exchange: in this
    thread if it is waited for at once, else in the wire's. On NCCL an exchange that is waited for at once runs on the
    caller's stream, without the events that another stream would need.
    """
    traffic = group.traffic
    if group.handle is None:
        return Pending(None, traffic)
    require_device(buffer, group)
    counted = sent_bytes(collective, buffer.nbytes, group.size) if sent is None else sent
    traffic.add(num_calls=1, sent_bytes=counted)
    started, waits_on_stream, record = time.perf_counter(), group.waits_on_stream, group.record
    record.begun = number = record.begun + 1
    what = (collective, buffer.nbytes, number, ())
    with hide_from_modes():
        if wire is None and wait and group.is_stream_ordered:
            with traffic.time_stream_wait() if waits_on_stream else _NOTHING:
                start(False)
                if after is not None:
                    after()
            return Pending(None, traffic)
        if wire is None:
            pending = Pending(start(True), traffic, after, waits_on_stream, record, what)
        elif not wait:
            pending = Pending(wire.worker.start(lambda: start(True)), traffic, after, False, record, what)
        else:
            record.since_s, record.waiting = started, what
            try:
                wire.worker.run(lambda: start(True))
            finally:
                record.waiting = None
            pending = Pending(WaitAll(()), traffic, after)
    if wait:
        pending.wait(since=started)
    return pending


def require_device(tensor: torch.Tensor, group: Group) -> None:
    """Refuse a tensor of another device: gloo would copy it through the host, and NCCL cannot read host memory."""
    if tensor.device.type != group.device.type:
        raise ValueError(
            f"a tensor on {tensor.device} was given to the group {group.axis}/{group.purpose}, which moves tensors on "
            f"{group.device}; use a group of another purpose, or move the tensor"
        )
