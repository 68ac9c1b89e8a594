"""The process group: torch's calls turned into calls to the referee, with the checks that need only this rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from strict_nccl.calls import Call, CommunicatorKey, Part, StrictError
from strict_nccl.client import RefereeClient
from strict_nccl.host_memory import host_maker
from strict_nccl.memory import content_of, from_bytes
from strict_nccl.ring import NAMES, reduce_part, reduce_whole
from strict_nccl.sites import calling_site
from strict_nccl.work import Finish, StrictWork, refuse_lost

Tensor = torch.Tensor


def _content(*tensors: Tensor) -> str:
    return " + ".join(f"{tensor.numel()} {str(tensor.dtype).removeprefix('torch.')}" for tensor in tensors)


def _op_of(opts: Any) -> dist.ReduceOp.RedOpType:
    op = opts.reduceOp
    found = getattr(op, "op", op)
    if found not in NAMES:
        raise StrictError(f"the stand-in reduces by {', '.join(NAMES.values())}, not {op}")
    return found


class StrictGroup(dist.ProcessGroup):
    """Ranks under NCCL's rules; see the package."""

    def __init__(self, client: RefereeClient, name: str, ranks: Sequence[int], under_way: list[StrictWork]) -> None:
        super().__init__(ranks.index(client.rank), len(ranks))
        self._client = client
        self._store_name = name
        self._ranks = tuple(ranks)
        self._place = self._ranks.index(client.rank)
        self._under_way = under_way
        self._description = name
        self._used: set[tuple[object, ...]] = set()

    # What torch asks of a group.

    def size(self) -> int:
        return len(self._ranks)

    def rank(self) -> int:
        return self._place

    def getBackendName(self) -> str:
        return "strict"

    @property
    def group_name(self) -> str:
        return self._store_name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _set_group_name(self, name: str) -> None:
        self._store_name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def shutdown(self) -> None:
        """Refuses what nobody waited for; `strict_world` says it again, to programs that go on after this."""
        refuse_lost([work for work in self._under_way if work.call.communicator[0] == self._store_name])

    def abort(self) -> None:
        pass

    # Collectives.

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> StrictWork:
        op = _op_of(opts or dist.AllreduceOptions())

        def finish(pieces: list[Any]) -> list[Tensor]:
            return [
                reduce_whole([from_bytes(piece[number], tensor.dtype) for piece in pieces], op)
                for number, tensor in enumerate(tensors)
            ]

        return self._collective(
            f"all_reduce({NAMES[op]}, {_content(*tensors)})", (), tensors, [content_of(one) for one in tensors], finish
        )

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: list[Tensor], opts: Any) -> StrictWork:
        (tensor,), root = tensors, opts.rootRank
        text = f"broadcast(from rank {self._ranks[root]}, {_content(tensor)})"
        if root == self._place:
            return self._collective(text, [tensor], (), [content_of(tensor)], lambda pieces: ())
        return self._collective(text, (), [tensor], [b""], lambda pieces: [from_bytes(pieces[root][0], tensor.dtype)])

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> StrictWork:
        return self.all_gather_single_coalesced([output], [tensor])

    def all_gather_single_coalesced(self, outputs: list[Tensor], tensors: list[Tensor], opts: Any = None) -> StrictWork:
        self._check_sizes("all_gather", outputs, tensors)
        written, places = [], []
        for number, (output, tensor) in enumerate(zip(outputs, tensors, strict=True)):
            for place, part in enumerate(self._parts(output)):
                # In place: NCCL leaves this rank's own part alone.
                if place != self._place or part.data_ptr() != tensor.data_ptr():
                    written.append(part)
                    places.append((place, number))

        def finish(pieces: list[Any]) -> list[Tensor]:
            return [
                from_bytes(pieces[place][number], part.dtype)
                for part, (place, number) in zip(written, places, strict=True)
            ]

        return self._collective(
            f"all_gather({_content(*tensors)} per rank)", tensors, written, [content_of(one) for one in tensors], finish
        )

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> StrictWork:
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], tensors: list[Tensor], opts: Any = None
    ) -> StrictWork:
        self._check_sizes("reduce_scatter", tensors, outputs)
        op = _op_of(opts or dist.ReduceScatterOptions())

        def finish(pieces: list[Any]) -> list[Tensor]:
            return [
                reduce_part([from_bytes(piece[number], output.dtype) for piece in pieces], self._place, op)
                for number, output in enumerate(outputs)
            ]

        payload = [tuple(content_of(part) for part in self._parts(tensor)) for tensor in tensors]
        text = f"reduce_scatter({NAMES[op]}, {_content(*outputs)} per rank)"
        return self._collective(text, tensors, outputs, payload, finish)

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> StrictWork:
        lengths = [
            splits or [one.shape[0] // self.size()] * self.size()
            for one, splits in ((output, output_splits), (tensor, input_splits))
        ]
        for one, splits, name in zip((output, tensor), lengths, ("output", "input"), strict=True):
            if len(splits) != self.size() or sum(splits) != one.shape[0]:
                raise StrictError(f"all_to_all: the {name} has {one.shape[0]} rows, and its parts {splits}")
        received, given = output.split(lengths[0]), tensor.split(lengths[1])
        return self._collective(
            f"all_to_all(sends {lengths[1]} rows, receives {lengths[0]}, {_content(tensor)})",
            [tensor],
            [output],
            [tuple(content_of(part) for part in given)],
            lambda pieces: [from_bytes(b"".join(piece[0] for piece in pieces), output.dtype)],
            compared=("all_to_all", str(tensor.dtype)),
            expected_bytes=tuple(part.nbytes for part in received),
        )

    def barrier(self, opts: Any = None) -> StrictWork:
        return self._collective("barrier()", (), (), [b""], lambda pieces: ())

    # The names of torch 2.11.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # Messages. NCCL has no tags.

    def send(self, tensors: list[Tensor], target: int, tag: int = 0) -> StrictWork:
        return self._messages([(True, tensors[0], target)])

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> StrictWork:
        return self._messages([(False, tensors[0], source)])

    def batch(self, messages: Sequence[tuple[bool, Tensor, int]]) -> StrictWork:
        """Sends (True) and receives (False) as one operation."""
        return self._messages(messages, is_batched=True)

    def _messages(self, messages: Sequence[tuple[bool, Tensor, int]], *, is_batched: bool = False) -> StrictWork:
        mine, parts, texts = self._client.rank, [], []
        for is_send, tensor, place in messages:
            peer = self._ranks[place]
            source, target = (mine, peer) if is_send else (peer, mine)
            parts.append(Part(source=source, target=target, content=_content(tensor)))
            texts.append(f"{'send to' if is_send else 'receive from'} rank {peer}, {_content(tensor)}")
        ranks = self._ranks
        if not (is_batched or self._client.mode.is_eager):
            ranks = tuple(sorted({mine, self._ranks[messages[0][2]]}))
        received = [tensor for is_send, tensor, _ in messages if not is_send]
        return self._start(
            f"batch[{'; '.join(texts)}]" if is_batched else texts[0],
            (self._store_name, ranks),
            [tensor for is_send, tensor, _ in messages if is_send],
            received,
            [content_of(tensor) if is_send else b"" for is_send, tensor, _ in messages],
            lambda pieces: [
                from_bytes(piece, tensor.dtype)
                for piece, (is_send, tensor, _) in zip(pieces, messages, strict=True)
                if not is_send
            ],
            parts=tuple(parts),
        )

    # All of them.

    def _collective(
        self,
        text: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        payload: list[Any],
        finish: Finish,
        *,
        compared: tuple[object, ...] = (),
        expected_bytes: tuple[int, ...] | None = None,
    ) -> StrictWork:
        return self._start(
            text,
            (self._store_name, self._ranks),
            inputs,
            outputs,
            payload,
            finish,
            compared=compared or (text,),
            expected_bytes=expected_bytes,
        )

    def _start(
        self,
        text: str,
        communicator: CommunicatorKey,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        payload: list[Any],
        finish: Finish,
        **details: Any,
    ) -> StrictWork:
        call = Call(
            number=self._client.next_number(),
            rank=self._client.rank,
            communicator=communicator,
            group_name=self._description,
            text=text,
            site=calling_site(),
            payload=payload,
            **details,
        )
        for tensor in (*inputs, *outputs):
            self._refuse(tensor, call)
        kinds = {part.direction for part in call.parts} or {()}
        used = {(communicator, *kind) for kind in kinds}
        call.blocks_host = not used <= self._used
        self._used |= used
        work = StrictWork(self._client, call, inputs=inputs, outputs=outputs, finish=finish, under_way=self._under_way)
        self._client.call(call)
        return work

    def _refuse(self, tensor: Tensor, call: Call) -> None:
        maker = host_maker(tensor)
        if maker is not None:
            raise StrictError(
                f"{call.describe()}: the tensor of {_content(tensor)} would lie in host memory, where NCCL cannot go; "
                f"it was made without a device at {maker}"
            )
        if not tensor.is_contiguous():
            raise StrictError(f"{call.describe()}: a tensor is not contiguous")

    def _parts(self, whole: Tensor) -> list[Tensor]:
        return list(whole.view(self.size(), -1))

    def _check_sizes(self, name: str, wholes: list[Tensor], parts: list[Tensor]) -> None:
        for whole, part in zip(wholes, parts, strict=True):
            if whole.numel() != part.numel() * self.size() or whole.dtype != part.dtype:
                raise StrictError(f"{name} over {self.size()} ranks of {_content(part)} and {_content(whole)}")
