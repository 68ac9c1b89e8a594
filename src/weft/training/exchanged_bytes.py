"""The bytes that this rank exchanges with others through codecs, from the plan and the parameters alone.

`trainer.describe()` tells them before the first step, the report at the end of a run divides by them where ranks are
played in one process and nothing is sent, and tests compare them with what `comm/` counts.
"""

from __future__ import annotations

import torch

from weft.mesh import Mesh
from weft.parallel.state.batchnorm import running_statistics
from weft.plan.exchange.compression import Compression, between_replicas, bytes_of_steps, dense_bytes
from weft.plan.exchange.gradient_exchange import codec_groups, compressed_all_reduce_bytes, compressed_flat_bytes
from weft.plan.exchange.weight_exchange import ExchangeBucket, Weight, exchange_buckets, exchange_bytes, kept_weights
from weft.plan.late_merges import exchanges_after
from weft.plan.partition.flat_buffers import ParameterSpec
from weft.sync.base import Sync
from weft.sync.local import LocalSync
from weft.training.step.parallel_model import ParallelModel


def sent_bytes_of_step(parts: ParallelModel, *, step: int) -> dict[str, int]:
    """Bytes by axis that gradients take in a step, counted from 0, or changes of weights in the exchange after it, of a
    plan with a codec; without the layers' own exchanges."""
    sync, mesh = parts.sync, parts.mesh
    plan = mesh.plan
    if plan.replica_axis is not None:
        if not exchanges_after(plan.data, step + 1):
            return {plan.replica_axis: 0}
        num_statistics = 0
        if plan.data.buffers != "local":
            num_statistics = sum(one.numel() for one in running_statistics(parts.model))
        buckets = weight_buckets_of(sync, mesh)
        return {plan.replica_axis: exchange_bytes(buckets, plan, num_statistics=num_statistics, step=step)}
    assert sync.compressed is not None, "a plan with a codec"
    coded = set(sync.compressed.names)
    groups = codec_groups(plan, rank=mesh.world.rank, hosts=mesh.world.hosts)
    if sync.flats:
        buffers, part = [flat.buffer for flat in sync.flats], sync.flats[0].group.index
        left_out = {name for one in buffers for name in one.names} - coded
        return compressed_flat_bytes(buffers, plan, step=step, part=part, groups=groups, not_coded=left_out)
    order = sync.state().get("order", range(len(sync.pieces)))
    pieces = [sync.pieces[place] for place in order]
    parameters = [
        ParameterSpec(name=one.name, shape=tuple(one.tensor.shape), dtype=_name(one.tensor.dtype)) for one in pieces
    ]
    left_out = {one.name for one in parameters} - coded
    return compressed_all_reduce_bytes(parameters, plan, step=step, groups=groups, not_coded=left_out)


def weight_buckets_of(sync: Sync, mesh: Mesh) -> list[ExchangeBucket]:
    """The buckets of weights that this rank exchanges with other replicas."""
    plan = mesh.plan
    if sync.flats:
        weights = kept_weights([flat.buffer for flat in sync.flats], sync.flats[0].group.index)
    else:
        weights = [
            Weight(
                numel=one.tensor.numel(), dtype=_name(one.tensor.dtype), name=one.name, shape=tuple(one.tensor.shape)
            )
            for one in sync.pieces
        ]
    fragment_of = sync.fragment_of if isinstance(sync, LocalSync) else {}
    return exchange_buckets(weights, plan.comm.bucket_bytes, plan.codec, fragment_of)


def predicted_compression(parts: ParallelModel, *, num_steps: int) -> Compression:
    """That of a run of so many steps, of which nothing need have been sent."""
    plan = parts.mesh.plan
    numel = sum(piece.tensor.numel() for piece in parts.sync.pieces)

    def bytes_in(step: int) -> int:
        return between_replicas(sent_bytes_of_step(parts, step=step), plan)

    period = plan.data.every if plan.replica_axis is not None else 1
    settled = max(plan.codec.warmup_steps, plan.data.switch_step if plan.replica_axis is not None else 0)
    sent = bytes_of_steps(bytes_in, num_steps, settled=settled, period=period)
    return Compression(
        dense_bytes=dense_bytes(numel, plan, num_steps=num_steps, hosts=parts.mesh.world.hosts), sent_bytes=sent
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
