"""The bytes a rank will need, by category, from the plan and the model's profile: arithmetic, nothing is run.

The answer is the fullest moment of a step. What stays from step to step (`state`) is the same in all of them; the rest
comes and goes:

    forward and backward of each segment   activations kept so far, the segment's workspace, gathered parameters
    update                                 temporaries of the optimizer, gradients cast to the master's dtype

State, gradient buffers and gathered parameters are counted as they are allocated, padding included. Activations are
measured at the profile's microbatch and scaled to the plan's. Where a block is recomputed, its backward pass is taken
to hold all that it saves without recomputation, which leaves out the order in which that comes and goes.
Not counted: what the framework itself takes (libraries, a CUDA context), fragmentation, and the model as it was before
`parallelize` took its parameters over (build it on the meta device if that is what does not fit).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from weft.errors import PlanError
from weft.plan.plan import Plan, said
from weft.planning.flats import ParameterFlat, Sharding, find_sharding, lay_out, travelling_bytes
from weft.profiles.model import ModelProfile
from weft.units import format_bytes

_WHAT = {
    "parameters": "as the model computes with them",
    "gradients": "kept over microbatches",
    "master": "what the optimizer updates, where it is not the parameters themselves",
    "optimizer": "the optimizer's moments",
    "buffers": "running statistics and tables of the model",
    "gathered": "parameters of other ranks, whole for a while",
    "gradient_buffers": "gradients on their way to other ranks",
    "activations": "kept from forward to backward",
    "workspace": "what the segment needs beyond that, the loss included",
    "update": "temporaries of the update",
}
_STATE = ("parameters", "gradients", "master", "optimizer", "buffers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of one rank at the fullest moment of a step."""

    moment: str
    """When that is: "backward of blocks.3", "update"."""
    parameters: int = 0
    gradients: int = 0
    master: int = 0
    optimizer: int = 0
    buffers: int = 0
    gathered: int = 0
    gradient_buffers: int = 0
    activations: int = 0
    workspace: int = 0
    update: int = 0
    host: int = 0
    """With `[data] offload`: bytes in host memory, which the total does not count."""

    @property
    def state(self) -> int:
        """What stays from step to step."""
        return sum(getattr(self, name) for name in _STATE)

    @property
    def total(self) -> int:
        """The peak."""
        return sum(getattr(self, name) for name in _WHAT)

    def table(self) -> str:
        """The categories as people read them, one a line."""
        rows = [(name.replace("_", " "), getattr(self, name), what) for name, what in _WHAT.items()]
        rows.append(("total", self.total, f"at its peak: {self.moment}"))
        rows.append(("on the host", self.host, "masters, moments and gradients of the update"))
        return "\n".join(f"{name:17s} {format_bytes(num):>10s}  {what}" for name, num, what in rows if num)


def predict_memory(
    plan: Plan,
    profile: ModelProfile,
    *,
    microbatch_samples: int | None = None,
    one_host: bool = True,
    optimizer_bytes_per_parameter: float = 8.0,
    update_bytes_per_parameter: float | None = None,
) -> Memory:
    """The peak bytes of a rank under a plan.

    one_host                       all ranks along data are on one host; if they compute on CPUs, they share its memory
    microbatch_samples             of one rank; None: as many as the profile was made with
    optimizer_bytes_per_parameter  moments of a float32 parameter: 8 for Adam, 4 for SGD with momentum, 0 for SGD
    update_bytes_per_parameter     temporaries of the update, for all parameters at once: 0 for a fused optimizer; None:
                                   torch's own Adam, which takes 4 on a GPU and two of the largest tensor on a CPU
    """
    _refuse(plan, profile)
    sharding = find_sharding(plan, profile, one_host=one_host)
    flats = lay_out(plan, profile, sharding)
    samples = profile.samples if microbatch_samples is None else microbatch_samples
    batch_bytes = plan.step.microbatches * profile.batch.at(samples)
    moments = [
        *_passes(plan, profile, samples, sharding, flats),
        Memory(moment="update", update=_update_bytes(sharding, flats, update_bytes_per_parameter)),
    ]
    fullest = max(moments, key=lambda moment: moment.total)
    return dataclasses.replace(
        _state(sharding, flats, profile, optimizer_bytes_per_parameter),
        moment=fullest.moment,
        gathered=fullest.gathered,
        activations=fullest.activations + batch_bytes,
        workspace=fullest.workspace,
        update=fullest.update,
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


def _state(
    sharding: Sharding, flats: Sequence[ParameterFlat], profile: ModelProfile, moment_bytes_per_parameter: float
) -> Memory:
    """What stays from step to step, and the buffers that are kept for the next step's gradients."""
    trainable = [flat for flat in flats if flat.trainable]
    copies = [flat for flat in trainable if sharding.offloads or flat.master_bytes != flat.item_bytes]
    master = sum(flat.part_numel * flat.master_bytes for flat in copies)
    moments = round(sum(flat.part_numel * flat.master_bytes for flat in trainable) / 4 * moment_bytes_per_parameter)
    handed_over = sum(flat.part_numel * flat.master_bytes for flat in trainable)
    return Memory(
        moment="",
        parameters=sum((flat.part_numel if sharding.stage == 3 else flat.numel) * flat.item_bytes for flat in flats),
        gradients=sum(
            (flat.numel if sharding.keeps_gradients else flat.part_numel) * flat.accumulate_bytes for flat in trainable
        ),
        master=0 if sharding.offloads else master,
        optimizer=0 if sharding.offloads else moments,
        buffers=profile.buffer_bytes,
        gradient_buffers=travelling_bytes(sharding, flats),
        host=master + moments + handed_over if sharding.offloads else 0,
    )


def _passes(
    plan: Plan, profile: ModelProfile, samples: int, sharding: Sharding, flats: Sequence[ParameterFlat]
) -> Iterator[Memory]:
    """Every segment's forward and backward pass: what comes and goes in it."""
    kept_before, num_blocks = 0, len(profile.blocks)
    for block, segment in enumerate(profile.segments, start=-1):  # the prelude is before block 0
        kept, saved = segment.kept(plan.recompute.policy).at(samples), segment.saved.at(samples)
        held = max(kept, saved) if 0 <= block < num_blocks else kept
        for direction, held_here, blocks in (
            ("forward", segment.forward_peak.at(samples), {block, block + 1}),
            ("backward", held + segment.backward_peak.at(samples), {block, block - 1} if block < num_blocks else ()),
        ):
            activations = min(kept, held_here)
            yield Memory(
                moment=f"{direction} of {segment.name}",
                gathered=_gathered_bytes(sharding, flats, blocks),
                activations=kept_before + activations,
                workspace=held_here - activations,
            )
        kept_before += kept


def _gathered_bytes(sharding: Sharding, flats: Sequence[ParameterFlat], blocks: Collection[int]) -> int:
    """Bytes of whole parameters beside the kept parts, while the root and these blocks are gathered."""
    if sharding.stage < 3 or sharding.shares_memory:
        return 0
    gathered = (flat for flat in flats if sharding.stays_whole or flat.block is None or flat.block in blocks)
    return sum(flat.numel * flat.item_bytes for flat in gathered)


def _update_bytes(sharding: Sharding, flats: Sequence[ParameterFlat], bytes_per_parameter: float | None) -> int:
    """Temporaries of the update: gradients in the master's dtype where they are not, and the optimizer's own."""
    if sharding.offloads:  # the update is on the host
        return 0
    trainable = [flat for flat in flats if flat.trainable]
    differing = (flat for flat in trainable if flat.accumulate_bytes != flat.master_bytes)
    casts = sum(flat.part_numel * flat.master_bytes for flat in differing)
    if bytes_per_parameter is not None:
        return casts + round(sum(flat.part_numel for flat in trainable) * bytes_per_parameter)
    if not sharding.on_host:
        return casts + sum(flat.part_numel * flat.master_bytes for flat in trainable)
    return casts + 2 * max((flat.largest_numel * flat.master_bytes for flat in trainable), default=0)
