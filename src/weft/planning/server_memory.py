"""The bytes that each parameter server will need, from the plan and the model's profile: arithmetic, nothing is run.

A server holds its parts of the weights and what the optimizer keeps of them, and of what is not trained (frozen
parameters and buffers), which it gives to workers that join, for as long as the run lasts. The rest
comes and goes: gradients of workers, which stay as they came until a clock is whole; their sum; and copies of weights,
where an update may not write what a worker is still reading, or what its gradient will be compensated for.
What a server shares with ranks of its host is the same memory in another place: gradients lie where these ranks put
them, and weights where they read them. Not counted: while a snapshot is written, or a checkpoint asks for it, a copy of
the optimizer's state, and one of the weights if they are updated meanwhile; weights that `pull` has rounded to 16 bits;
lines of 128 bytes at which places begin in shared memory; the process itself (Python and torch, some 200 MB), and what
ZeroMQ has not handed over yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.errors import PlanError
from weft.plan.partition.flat_buffers import ParameterSpec, compute_dtype, flat_buffers, item_bytes, needs_flats
from weft.plan.partition.one_worker import is_served
from weft.plan.partition.server_shards import ServedTensor, assign_parts
from weft.plan.plan import Plan, said


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerMemory:
    """Bytes of one server at the fullest moment."""

    weights: int
    optimizer: int
    gradients: int
    """Of all workers, which may all have sent theirs before the last one makes an update possible."""
    update: int
    """The sum of gradients, and temporaries of the optimizer."""
    copies: int
    """Weights of earlier versions that somebody reads, or that compensation needs."""
    fixed: int = 0
    """What is not trained."""

    @property
    def total(self) -> int:
        return self.weights + self.optimizer + self.gradients + self.update + self.copies + self.fixed


def predict_server_memory(
    plan: Plan,
    parameters: Sequence[ParameterSpec],
    *,
    device: str = "cpu",
    optimizer_bytes_per_parameter: float = 8.0,
    buffers: Sequence[ParameterSpec] = (),
) -> tuple[ServerMemory, ...]:
    """By server. `device`: where workers compute. `optimizer_bytes_per_parameter`: moments of a float32 parameter: 8
    for Adam, 4 for SGD with momentum, 0 for SGD. `buffers`: of the model, in their own dtypes."""
    if not is_served(plan):
        raise PlanError(f'{said(plan, "data.sync")} has no servers; set [data] sync = "server"')
    num_workers = plan.axes.data
    if isinstance(num_workers, str):
        raise PlanError("memory of servers depends on how many workers there are; set [axes] data to a number")
    tensors = served_tensors_of(plan, parameters, device=device)
    fixed = fixed_tensors_of(plan, parameters, buffers)
    all_fixed = assign_parts(fixed, plan.server.shards, most_bytes=plan.comm.bucket_bytes)
    found = []
    for number, parts in enumerate(assign_parts(tensors, plan.server.shards, most_bytes=plan.comm.bucket_bytes)):
        sizes = [part.numel * tensors[part.tensor].item_bytes for part in parts]
        weights = sum(sizes)
        if plan.server.updates_together:
            copies = 0  # all have taken theirs when an update is made
        else:
            copies = weights * (num_workers if plan.server.compensation else 1)
        found.append(
            ServerMemory(
                weights=weights,
                optimizer=round(weights / 4 * optimizer_bytes_per_parameter),
                gradients=weights * num_workers,
                update=weights + 2 * max(sizes, default=0),
                copies=copies,
                fixed=sum(part.numel * fixed[part.tensor].item_bytes for part in all_fixed[number]),
            )
        )
    return tuple(found)


def served_tensors_of(plan: Plan, parameters: Sequence[ParameterSpec], *, device: str = "cpu") -> list[ServedTensor]:
    """The tensors that servers hold for workers of one rank: everything that is trained, in the master's format."""
    masters = {one.name: one.dtype for one in parameters if one.trainable}
    if needs_flats(plan, parameters, device=device):
        trained = [flat for flat in flat_buffers(parameters, plan) if flat.trainable]
        masters = {name: flat.master for flat in trained for name in flat.names}
    return [
        ServedTensor(name=one.name, numel=one.numel, item_bytes=item_bytes(masters[one.name]))
        for one in parameters
        if one.trainable
    ]


def fixed_tensors_of(
    plan: Plan, parameters: Sequence[ParameterSpec], buffers: Sequence[ParameterSpec] = ()
) -> list[ServedTensor]:
    """What servers keep for workers of one rank that join: what is not trained, as the model computes with it."""
    frozen = [(one, compute_dtype(one, plan)) for one in parameters if not one.trainable]
    return [
        ServedTensor(name=one.name, numel=one.numel, item_bytes=item_bytes(dtype))
        for one, dtype in (*frozen, *((one, one.dtype) for one in buffers))
    ]
