"""The plan: everything weft decides about a run, as plain data.

It says how the model is split, what replicas exchange and when, and in which precision. Every field has a default that
changes nothing, so `Plan()` is one rank and `Plan(axes=Axes(data=2))` is a complete plan. A value that is bad by itself
is refused on creation; `check.py` decides whether the values go together and can run here.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import cast

from weft.errors import PlanError
from weft.plan.fields import (
    Choice,
    Flag,
    Increasing,
    Permutation,
    Real,
    Section,
    Whole,
    declare,
    statement,
)

# Outermost first. Tensor is innermost because it communicates most and must stay inside a node.
AXES = ("pipeline", "replicate", "data", "ring", "ulysses", "tensor")
ALL = "all"
"""The word for the ranks that the other axes leave; `plan/all_ranks.py` replaces it by their number."""
POSITIVE, NATURAL, NOT_NEGATIVE, FLAG = Whole(minimum=1), Whole(minimum=0), Real(minimum=0), Flag()
CODECS = ("half", "topk", "dgc", "onebit", "sign", "qsgd", "terngrad", "powersgd")


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes(Section):
    """The number of ranks along each axis of the mesh. Their product is the number of ranks."""

    data: int | str = declare(
        1,
        Whole(minimum=1, words=(ALL,)),
        "Ranks that each train on their own part of the batch; all: the ranks that the other axes leave.",
    )
    replicate: int = declare(1, POSITIVE, "Hybrid sharding: shard over data, replicate over this.")
    pipeline: int = declare(1, POSITIVE, "Ranks that each hold their own run of the model's blocks.")
    tensor: int = declare(1, POSITIVE, "Ranks that share every matrix of a block.")
    ulysses: int = declare(1, POSITIVE, "Sequence parallelism inside a node, by all-to-all over heads.")
    ring: int = declare(1, POSITIVE, "Sequence parallelism between nodes, by ring attention; images by rows.")
    order: tuple[str, ...] = declare(
        AXES,
        Permutation(AXES),
        "The axes from outermost to innermost; ranks that differ along the last are neighbours.",
    )

    @property
    def sizes(self) -> dict[str, int]:
        """Ranks along each axis, outermost first."""
        if self.data == ALL:
            raise PlanError(
                '[axes] data = "all" is a number only where ranks run, as in parallelize and weft train; write the '
                "number to use the plan elsewhere"
            )
        return {axis: getattr(self, axis) for axis in self.order}

    @property
    def num_ranks(self) -> int:
        return math.prod(self.sizes.values())

    @property
    def sequence(self) -> int:
        """Ranks that split the tokens of one sequence, or the rows of one image."""
        return self.ring * self.ulysses

    @property
    def besides_data(self) -> int:
        """The product of all axes but data."""
        return math.prod(getattr(self, axis) for axis in AXES if axis != "data")

    @property
    def data_ranks(self) -> int:
        """Ranks, or groups of them, that get different samples."""
        return self.replicate * self.sizes["data"]

    @property
    def state(self) -> int:
        """Ranks of one replica that have the same parameters and sum their gradients."""
        return self.sizes["data"] * self.sequence

    @property
    def state_axes(self) -> str:
        """The joint name of these axes, for groups and byte counts."""
        return "data" if self.sequence == 1 else "data+ring+ulysses"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(Section):
    """One training step."""

    microbatches: int = declare(
        1, POSITIVE, "Parts of a rank's batch: accumulated one by one, or in flight together in a pipeline."
    )
    clip_norm: float = declare(
        0.0, NOT_NEGATIVE, "Largest norm of the whole model's averaged gradient; 0 clips nothing."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline(Section):
    """The cut of the blocks into stages, and the order in which stages run microbatches."""

    schedule: str = declare(
        "1f1b",
        Choice(("naive", "gpipe", "1f1b", "interleaved", "zero-bubble", "pipedream", "2bw")),
        "Order of passes; zero-bubble is ZB-H1, and pipedream and 2bw never flush the pipeline.",
    )
    chunks: int = declare(1, POSITIVE, "Model chunks that each rank holds, with the interleaved schedule.")
    cuts: tuple[int, ...] = declare(
        (), Increasing(minimum=1), "Numbers of the blocks to cut before; empty balances stages by measured time."
    )
    vertical_sync: bool = declare(
        False, FLAG, "Pipedream: a microbatch uses one weight version on all stages, the one it met on the first."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor(Section):
    """Tensor parallelism."""

    sequence: bool = declare(
        False, FLAG, "Megatron sequence parallelism: norms and dropout are split along the sequence."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence(Section):
    """Sequence parallelism over the ring axis."""

    layout: str = declare(
        "zigzag", Choice(("zigzag", "contiguous")), "Layout of tokens; zigzag balances causal attention over ranks."
    )
    variant: str = declare(
        "ring",
        Choice(("ring", "ring-self-attention")),
        "Ring attention, or the older ring self-attention of Li et al., which stores whole rows of scores.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Data(Section):
    """The state that replicas hold, and when they exchange gradients or weights."""

    sync: str = declare(
        "all-reduce",
        Choice(("all-reduce", "server", "local", "delayed")),
        "Synchronisation of replicas: every step, by a parameter server, every few steps, or some steps late.",
    )
    shard: str = declare(
        "nothing",
        Choice(("nothing", "optimizer", "gradients", "parameters")),
        "State that is split over the data axis instead of copied: ZeRO 0, 1, 2 and 3.",
    )
    reshard: str = declare(
        "step", Choice(("step", "microbatch")), "ZeRO-3: parameters are gathered once per step or once per microbatch."
    )
    offload: bool = declare(False, FLAG, "Keep the optimizer's state in host memory.")
    every: int = declare(
        1,
        Whole(minimum=1, hint="1 exchanges after every step"),
        "Steps between exchanges of replicas that differ (local, delayed).",
    )
    switch_step: int = declare(
        0, NATURAL, "Post-local SGD: plain averages after every step up to this one, and only then `every` and `outer`."
    )
    outer: str = declare(
        "average", Choice(("average", "nesterov")), "Average of local replicas, or an outer Nesterov step (DiLoCo)."
    )
    outer_lr: float = declare(
        1.0, Real(above=0), "Learning rate of the outer optimizer; DiLoCo's published one is 0.7, with momentum 0.9."
    )
    outer_momentum: float = declare(
        0.0, Real(minimum=0, below=1), "Momentum of the outer optimizer; 0 with a rate of 1 is the plain average."
    )
    fragments: int = declare(
        1, POSITIVE, "Streaming DiLoCo: parts of the model, of whole blocks, that local replicas exchange in turn."
    )
    delay: int | str = declare(
        0,
        Whole(minimum=0, words=("auto",)),
        "Steps between sending an exchange and merging it: less than `every` with local; auto (delayed) measures it.",
    )
    mix: float = declare(
        0.0,
        Real(minimum=0, below=1),
        "Streaming DiLoCo: share of a replica's own weights that a merge keeps; 0 takes the outer weights as they are.",
    )
    balance: bool = declare(False, FLAG, "Distribute microbatches in proportion to each rank's speed.")
    buffers: str = declare(
        "synchronise",
        Choice(("synchronise", "broadcast", "local")),
        "BatchNorm: statistics of the global batch, the first rank's running statistics for all, or each rank's own.",
    )
    check_every: int = declare(100, NATURAL, "Steps between checks that replicas are equal; 0 never checks.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Server(Section):
    """The parameter server, with `[data] sync = "server"`. Its processes come on top of the ranks of the axes."""

    mode: str = declare(
        "sync", Choice(("sync", "async", "bounded")), "Workers wait for all others, for none, or for the slowest."
    )
    shards: int = declare(1, POSITIVE, "Server processes that share the parameters.")
    staleness: int = declare(0, NATURAL, "Bounded: clocks a worker may be ahead of the slowest.")
    backups: int = declare(0, NATURAL, "Sync: workers, counted in the data axis, that a step does not wait for.")
    compensation: float = declare(0.0, NOT_NEGATIVE, "Lambda of DC-ASGD's delay compensation; 0 compensates nothing.")
    lr_scaling: str = declare(
        "none", Choice(("none", "staleness")), "Divide the learning rate by nothing, or by a gradient's staleness."
    )
    pull: str = declare(
        "master",
        Choice(("master", "bf16", "fp16")),
        "Format in which workers get weights: that of the servers' own, which stay as they are, or rounded to 16 bits.",
    )

    @property
    def updates_together(self) -> bool:
        """True if workers share one batch, of which every update is made."""
        return updates_together(self.mode, self.staleness)


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec(Section):
    """Compression of what replicas exchange: gradients, or, where they differ, the change since the last exchange."""

    name: str = declare("none", Choice(("none", *CODECS)), "The compression method.")
    density: float = declare(0.01, Real(above=0, maximum=1), "Share of the entries that topk and dgc send.")
    bits: int = declare(
        32,
        Whole(minimum=2, among=(2, 8, 32)),
        "Bits of a value that topk and dgc send: 32 (as it is), 8 or 2; its index takes 16 more.",
    )
    rank: int = declare(4, POSITIVE, "Rank of powersgd's factors.")
    levels: int = declare(
        256,
        Whole(minimum=2, among=(4, 16, 256)),
        "Codes of qsgd, in 2, 4 or 8 bits per entry: multiples of norm / s from -s to s, with s = levels / 2 - 1.",
    )
    memory: float = declare(
        1.0,
        Real(minimum=0, maximum=1),
        "Error feedback: share of what was not sent that is added to the next exchange; 0 forgets it.",
    )
    clip: float = declare(
        0.0,
        NOT_NEGATIVE,
        "Norm to which dgc clips: each of W replicas scales its own gradient to at most clip / √W; 0 clips nothing.",
    )
    masking: bool = declare(True, FLAG, "Clear dgc's momentum of the entries that were sent (momentum factor masking).")
    warmup_steps: int = declare(
        0,
        NATURAL,
        "Steps over which compression sets in: topk and dgc send 25 % of the entries, then ever fewer; others all.",
    )
    dense_below: int = declare(
        1024, POSITIVE, "Elements below which a tensor travels as it is; those of one dim (biases, norms) always do."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Average(Section):
    """An exponential moving average of the weights, kept beside them (EMA)."""

    decay: float = declare(
        0.0, Real(minimum=0, below=1), "Share of the average that each update keeps, such as 0.999; 0 keeps no average."
    )
    start: int = declare(0, NATURAL, "Steps before the average begins, with the weights of that moment.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision(Section):
    """Number formats."""

    compute: str = declare(
        "model",
        Choice(("model", "bf16", "fp16")),
        "Format of forward and backward; bf16 and fp16 train fp32 master weights, model keeps the model's own.",
    )
    reduce: str = declare("fp32", Choice(("fp32", "bf16", "fp16")), "Format in which gradients are summed over ranks.")
    accumulate: str = declare(
        "fp32",
        Choice(("fp32", "bf16", "fp16")),
        "Format in which gradients add up over microbatches: fp32, or the one of compute.",
    )
    loss_scale: int | str = declare(
        "dynamic",
        Whole(minimum=0, words=("dynamic",)),
        "Factor on an fp16 loss that keeps small gradients from vanishing; dynamic finds the largest that fits.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute(Section):
    """Activations computed again in the backward pass instead of kept."""

    policy: str = declare(
        "none",
        Choice(("none", "selective", "full")),
        "Recompute nothing, attention and cheap wide activations, or whole blocks.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Compile(Section):
    """Compilation."""

    blocks: bool = declare(False, FLAG, "Run torch.compile on each block.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Comm(Section):
    """Transport of messages."""

    transport: str = declare(
        "auto",
        Choice(("auto", "c10d", "shared")),
        "Torch's backends, or shared memory between ranks of one host, and with servers of their host.",
    )
    bucket_bytes: int = declare(26214400, POSITIVE, "Size of the buffers in which gradients are exchanged.")
    timeout_s: float = declare(
        0.0,
        NOT_NEGATIVE,
        "Seconds that ranks wait for each other in a steady step before the run ends; 0: half an hour, which the first "
        "steps and checkpoints always have.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All the sections; the default is one rank and changes nothing."""

    axes: Axes = field(default_factory=Axes)
    step: Step = field(default_factory=Step)
    pipeline: Pipeline = field(default_factory=Pipeline)
    tensor: Tensor = field(default_factory=Tensor)
    sequence: Sequence = field(default_factory=Sequence)
    data: Data = field(default_factory=Data)
    server: Server = field(default_factory=Server)
    codec: Codec = field(default_factory=Codec)
    average: Average = field(default_factory=Average)
    precision: Precision = field(default_factory=Precision)
    recompute: Recompute = field(default_factory=Recompute)
    compile: Compile = field(default_factory=Compile)
    comm: Comm = field(default_factory=Comm)

    def __post_init__(self) -> None:
        problems = [
            f"[{name}] must be given as {section.__name__}(...), not as {type(getattr(self, name)).__name__}"
            for name, section in SECTIONS.items()
            if not isinstance(getattr(self, name), section)
        ]
        if problems:
            raise PlanError(problems)

    @property
    def replica_axis(self) -> str | None:
        """The axis along which replicas differ between exchanges; None where all ranks hold the same weights."""
        if self.data.sync == "all-reduce":
            return None
        return "data" if self.data.shard == "nothing" else "replicate"

    @property
    def num_replicas(self) -> int:
        """Replicas that may differ."""
        return 1 if self.replica_axis is None else self.axes.sizes[self.replica_axis]


SECTIONS: dict[str, type[Section]] = {
    section.name: cast(type[Section], section.default_factory) for section in dataclasses.fields(Plan)
}


def updates_together(mode: str, staleness: int) -> bool:
    """True if servers of this mode make updates of all workers' gradients: also with a bound of 0, where no worker is
    ahead of another."""
    return mode == "sync" or (mode == "bounded" and staleness == 0)


def value_at(plan: Plan, path: str) -> object:
    """The value of a field given as "section.field"."""
    section, name = path.split(".")
    return getattr(getattr(plan, section), name)


def said(plan: Plan, path: str) -> str:
    """The field and its value as messages name them: `[section] field = value`."""
    section, name = path.split(".")
    return statement(section, name, value_at(plan, path))
