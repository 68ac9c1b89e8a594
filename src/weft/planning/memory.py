"""The bytes a rank will need, by category, from the plan and the model's profile: arithmetic, nothing is run.

The peak is over all moments of a step. The state is the same at each of them; the rest is not:

    forward and backward of each segment   activations kept so far, the segment's workspace, gathered parameters
    update                                 temporaries of the optimizer, gradients cast to the master's dtype
    exchange                               temporaries of an exchange between replicas that differ
    new buckets                            copies of what codecs keep, when buckets change after the first step

State, gradient buffers and gathered parameters are counted as they are allocated, padding included. Activations are
measured at the profile's microbatch and scaled to the plan's. Where a block is recomputed, its backward pass is taken
to hold all that it saves without recomputation, which ignores the order in which that is allocated and freed.
Not counted: the framework itself (libraries, a CUDA context), fragmentation, and the model as it was before
`parallelize` took its parameters over (build it on the meta device if that is what does not fit).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from weft.errors import PlanError
from weft.plan.exchange.codec_memory import codec_memory
from weft.plan.exchange.fragments import assign_fragments
from weft.plan.exchange.weight_exchange import (
    ExchangeBucket,
    exchange_buckets,
    exchange_buffer_bytes,
    exchange_temporary_bytes,
    kept_weights,
    outer_bytes,
)
from weft.plan.late_merges import merges_late
from weft.plan.partition.flat_buffers import (
    FlatBuffer,
    Sharding,
    flat_buffers,
    item_bytes,
    needs_flats,
    offloads,
    own_tensor,
)
from weft.plan.partition.groups import COMMUNICATOR_BYTES, num_communicators
from weft.plan.partition.one_worker import is_served
from weft.plan.partition.replicas import shares_batch
from weft.plan.plan import Plan, said
from weft.planning.gradient_buffers import travelling_bytes
from weft.profiles.model import ModelProfile
from weft.units import format_bytes

_STATE = ("parameters", "gradients", "master", "optimizer", "average", "outer", "codec", "buffers")


def _category(meaning: str) -> int:
    counted: int = dataclasses.field(default=0, metadata={"meaning": meaning})
    return counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of one rank at the fullest moment of a step."""

    moment: str
    """The moment's name: "backward of blocks.3", "update"."""
    parameters: int = _category("as the model computes with them")
    gradients: int = _category("kept over microbatches")
    master: int = _category("what the optimizer updates, where it is not the parameters themselves")
    optimizer: int = _category("the optimizer's moments")
    average: int = _category("the average of the weights")
    outer: int = _category("the weights that replicas last exchanged, and the outer momentum")
    codec: int = _category("what codecs keep: not sent yet, momenta of it, where the next exchange starts")
    buffers: int = _category("running statistics and tables of the model")
    gathered: int = _category("parameters of other ranks, whole for a while")
    gradient_buffers: int = _category("gradients on their way to other ranks")
    exchange_buffers: int = _category("weights, or messages of codecs, on their way to other replicas")
    activations: int = _category("kept from forward to backward")
    workspace: int = _category("what the segment needs beyond that, the loss included")
    update: int = _category("temporaries of the update, or of an exchange between replicas")
    communicators: int = _category("what NCCL keeps for the plan's process groups")
    host: int = 0
    """With `[data] offload`: bytes in host memory, which the total does not count."""

    @property
    def state(self) -> int:
        """Bytes that stay from step to step."""
        return sum(getattr(self, name) for name in _STATE)

    @property
    def total(self) -> int:
        return sum(num_bytes for _, num_bytes, _ in self._rows())

    def _rows(self) -> list[tuple[str, int, str]]:
        counted = (field for field in dataclasses.fields(self) if field.metadata)
        return [
            (field.name.replace("_", " "), getattr(self, field.name), field.metadata["meaning"]) for field in counted
        ]

    def table(self) -> str:
        """The categories as people read them, one per line."""
        rows = [*self._rows(), ("total", self.total, f"at its peak: {self.moment}")]
        rows.append(("on the host", self.host, "masters, moments, averages, outer state and gradients of the update"))
        return "\n".join(f"{name:17s} {format_bytes(num):>10s}  {what}" for name, num, what in rows if num)


def predict_memory(
    plan: Plan,
    profile: ModelProfile,
    *,
    microbatch_samples: int | None = None,
    one_host: bool = True,
    optimizer_bytes_per_parameter: float = 8.0,
    update_bytes_per_parameter: float | None = None,
    communicator_bytes: int = COMMUNICATOR_BYTES,
) -> Memory:
    """The peak bytes of a rank under a plan.

    microbatch_samples             samples of one rank; None: as many as the profile was made with
    one_host                       all ranks along data are on one host; if they compute on CPUs, they share its memory
    optimizer_bytes_per_parameter  moments of a float32 parameter: 8 for Adam, 4 for SGD with momentum, 0 for SGD
    update_bytes_per_parameter     temporaries of the update, for all parameters at once: 0 for a fused optimizer; None:
                                   torch's own Adam, which takes 4 on a GPU and two of the largest tensor on a CPU
    communicator_bytes             of one communicator on a GPU; `trainer.describe()` tells those of a run
    """
    _refuse(plan, profile)
    on_host = profile.device == "cpu"
    shares_memory = on_host and one_host and plan.comm.transport != "c10d"
    shared: list[FlatBuffer] = []
    if needs_flats(plan, profile.parameters, device=profile.device):
        shared = flat_buffers(profile.parameters, plan)
    names = {name for flat in shared for name in flat.names}
    flats = [*(own_tensor(one, plan) for one in profile.parameters if one.name not in names), *shared]
    samples = profile.samples if microbatch_samples is None else microbatch_samples
    # Ranks that share memory have one copy of whole parameters among them.
    gathered = flats if plan.data.shard == "parameters" and not shares_memory else []
    update = 0
    if is_served(plan):  # updates are made by servers, who have the optimizer (`server_memory.py`)
        optimizer_bytes_per_parameter = 0.0
    else:
        update = _update_bytes(plan, flats, update_bytes_per_parameter, device=profile.device)
    master_bytes = sum(flat.part_bytes(flat.master) for flat in flats if flat.trainable)
    fragment_of = assign_fragments(profile.parameters, plan.data.fragments)
    state = state_memory(
        plan,
        flats,
        in_flats=bool(shared),
        device=profile.device,
        optimizer_bytes=round(master_bytes / 4 * optimizer_bytes_per_parameter),
        buffer_bytes=profile.buffer_bytes,
        fragment_of=fragment_of,
    )
    buckets = buckets_between_replicas(plan, flats, fragment_of)
    waits_in_backward = plan.data.buffers == "synchronise" and profile.batch_norms
    codec = codec_memory(
        plan,
        flats,
        in_flats=bool(shared),
        waits_in_backward=waits_in_backward,
        device=profile.device,
        fragment_of=fragment_of,
    )
    exchange = exchange_temporary_bytes(buckets, plan, on_host=offloads(plan, profile.device))
    # What stays under way over several steps is where the rest of the optimizer's state is.
    stays_on_host = merges_late(plan) and offloads(plan, profile.device)
    buffers = 0 if stays_on_host else exchange_buffer_bytes(buckets, plan)
    # Gradients that no other rank waits for are autograd's own, made anew in every step.
    comes_and_goes = not shared and not shares_batch(plan) and plan.step.microbatches == 1
    moments = [
        *_passes(plan, profile, samples, gathered, kept_gradients=None if comes_and_goes else state.gradients),
        Memory(moment="update", gradients=state.gradients, update=update),
        Memory(moment="exchange", gradients=state.gradients, update=exchange),
        Memory(moment="new buckets", gradients=state.gradients, update=codec.moved),
    ]
    fullest = max(moments, key=lambda moment: moment.total)
    return dataclasses.replace(
        state,
        moment=fullest.moment,
        gradients=fullest.gradients,
        gathered=fullest.gathered,
        gradient_buffers=travelling_bytes(
            plan,
            shared,
            receives=on_host and not shares_memory,
            waits_in_backward=waits_in_backward,
        ),
        exchange_buffers=buffers + codec.buffers,
        activations=fullest.activations + plan.step.microbatches * profile.batch.at(samples),
        workspace=fullest.workspace,
        update=fullest.update,
        communicators=0 if on_host else num_communicators(plan, batch_norms=profile.batch_norms) * communicator_bytes,
    )


def _refuse(plan: Plan, profile: ModelProfile) -> None:
    problems = [
        f"memory is not predicted yet for {said(plan, f'axes.{axis}')}; use 1"
        for axis in ("pipeline", "tensor", "ulysses", "ring")
        if getattr(plan.axes, axis) > 1
    ]
    if plan.precision.compute != profile.compute:
        problems.append(
            f'the profile was made with compute = "{profile.compute}" and the plan says '
            f'{said(plan, "precision.compute")}; profile the model again with compute = "{plan.precision.compute}"'
        )
    if problems:
        raise PlanError(problems)


def state_memory(
    plan: Plan,
    flats: Sequence[FlatBuffer],
    *,
    in_flats: bool,
    device: str,
    optimizer_bytes: int,
    buffer_bytes: int,
    fragment_of: Mapping[str, int] | None = None,
) -> Memory:
    """Bytes that stay from step to step, where parameters lie in these buffers; `in_flats`: they are not the model's
    own tensors. `optimizer_bytes` are the optimizer's moments. `fragment_of`: the fragment that each parameter travels
    in, by name."""
    sharding, on_host = Sharding.of(plan), offloads(plan, device)
    trainable = [flat for flat in flats if flat.trainable]
    master = sum(flat.part_bytes(flat.master) for flat in trainable if on_host or flat.master != flat.compute)
    handed_over = sum(flat.part_bytes(flat.master) for flat in trainable)
    average = sum(average_bytes(flat) for flat in trainable) if plan.average.decay > 0 else 0
    outer = outer_bytes(buckets_between_replicas(plan, flats, fragment_of), plan)
    codec = codec_memory(
        plan, flats, in_flats=in_flats, waits_in_backward=False, device=device, fragment_of=fragment_of
    )
    return Memory(
        moment="between steps",
        parameters=sum(
            flat.part_bytes(flat.compute) if sharding.stage == 3 else flat.whole_bytes(flat.compute) for flat in flats
        ),
        gradients=sum(
            flat.whole_bytes(flat.accumulate) if sharding.keeps_gradients else flat.part_bytes(flat.accumulate)
            for flat in trainable
        ),
        master=0 if on_host else master,
        optimizer=0 if on_host else optimizer_bytes,
        average=0 if on_host else average,
        outer=0 if on_host else outer,
        codec=codec.kept,
        buffers=buffer_bytes,
        host=master + optimizer_bytes + average + outer + handed_over if on_host else 0,
    )


def buckets_between_replicas(
    plan: Plan, flats: Sequence[FlatBuffer], fragment_of: Mapping[str, int] | None = None
) -> list[ExchangeBucket]:
    """The buckets that a rank exchanges with other replicas, where there are any; the first part has no padding."""
    if plan.replica_axis is None or is_served(plan):
        return []
    return exchange_buckets(kept_weights(flats, 0), plan.comm.bucket_bytes, plan.codec, fragment_of)


def average_bytes(flat: FlatBuffer) -> int:
    """Bytes of the average of a rank's part, which is in float32 at least (`training/step/average.py`)."""
    return flat.part_bytes(flat.master if item_bytes(flat.master) > 4 else "float32")


def _passes(
    plan: Plan, profile: ModelProfile, samples: int, gathered: Sequence[FlatBuffer], *, kept_gradients: int | None
) -> Iterator[Memory]:
    """Every segment's forward and backward pass: the bytes that it takes beside the state.

    `kept_gradients`: bytes of gradients that are there all the time; None: each is made in the backward pass.
    """
    stays_whole = Sharding.of(plan).stays_whole
    kept_before, num_blocks = 0, len(profile.blocks)
    # The last block is gathered for its backward pass beside that of a unit after it, or else not before it begins.
    last = num_blocks if any(flat.block == num_blocks for flat in gathered) else num_blocks - 1
    for block, segment in enumerate(profile.segments, start=-1):  # the prelude is before block 0
        kept, saved = segment.kept(plan.recompute.policy).at(samples), segment.saved.at(samples)
        held = max(kept, saved) if 0 <= block < num_blocks else kept
        for direction, held_here, blocks in (
            ("forward", segment.forward_peak.at(samples), {block, block + 1}),
            (
                "backward",
                held + segment.backward_peak.at(samples),
                {block, max(block - 1, 0)} if 0 <= block <= last else (),
            ),
        ):
            activations = min(kept, held_here)
            whole = (flat for flat in gathered if stays_whole or flat.block is None or flat.block in blocks)
            gradients = kept_gradients
            if gradients is None:
                gradients = _gradients_made(profile, block) if direction == "backward" else 0
            yield Memory(
                moment=f"{direction} of {segment.name}",
                gradients=gradients,
                gathered=sum(flat.whole_bytes(flat.compute) for flat in whole),
                activations=kept_before + activations,
                workspace=held_here - activations,
            )
        kept_before += kept


def _gradients_made(profile: ModelProfile, block: int) -> int:
    """Bytes of the gradients that there are when the backward pass of a block ends; those of no block come first."""
    made = (one for one in profile.parameters if one.trainable and (one.block is None or one.block >= block))
    return sum(one.numel * item_bytes(one.dtype) for one in made)


def _update_bytes(plan: Plan, flats: Sequence[FlatBuffer], bytes_per_parameter: float | None, *, device: str) -> int:
    """Temporaries of the update: gradients in the master's dtype where they are not, and the optimizer's own."""
    if offloads(plan, device):  # the update is on the host
        return 0
    trainable = [flat for flat in flats if flat.trainable]
    casts = sum(flat.part_bytes(flat.master) for flat in trainable if flat.accumulate != flat.master)
    if bytes_per_parameter is not None:
        return casts + round(sum(flat.flat.part_numel for flat in trainable) * bytes_per_parameter)
    if device != "cpu":
        return casts + sum(flat.part_bytes(flat.master) for flat in trainable)
    largest = (min(max(flat.flat.numels), flat.flat.part_numel) * item_bytes(flat.master) for flat in trainable)
    return casts + 2 * max(largest, default=0)
