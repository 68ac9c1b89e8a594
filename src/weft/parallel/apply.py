"""The complete list of what is done to a model to make it parallel, in the order in which it is done (`STEPS`).

The model stays the user's own module: same class, same names, same parameters. Wrapped forwards and hooks are recorded
on the modules (`parallel/wrapping/wrap.py`), where `trainer.describe()` reads them. Two other files change something
outside weft: `parallel/wrapping/replacements.py` lists functions of torch and transformers that are replaced while a
step runs, and `checkpoint/pretrained.py` reads weights into the finished model.

The steps need `sync/` and `training/setup/`, so in the import order this file comes after those, just before
`training/`, which calls it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from weft.blueprint import Blueprint, find_blueprint
from weft.layout import Layout
from weft.mesh import Mesh
from weft.models.hugging_face_inputs import leave_out_caches
from weft.parallel.compile import compile_blocks
from weft.parallel.pipeline.cut_model import CutModel
from weft.parallel.recompute import recompute_blocks
from weft.parallel.state.batchnorm import has_batch_norms, synchronise_batch_norms
from weft.parallel.state.materialise import model_tensors
from weft.parallel.state.rng import PlaceSeeds, Seeds
from weft.parallel.tensor.shares import counted_elements
from weft.parallel.tensor.tensor_parallel import TensorParallel
from weft.plan.partition.tensor import Region
from weft.plan.pipeline.communication import FLUSH_FREE
from weft.plan.plan import Plan
from weft.sync.base import Apart, Sync
from weft.sync.make import find_layouts, place
from weft.training.data.sample_split import SampleSplit
from weft.training.setup.choose_sample_split import choose_sample_split
from weft.training.setup.cut_stages import cut_model
from weft.training.setup.probe import probe_split
from weft.training.setup.split_layers import split_regions


@dataclass(slots=True, kw_only=True)
class ParallelModel:
    """A model on this rank, and what the steps so far have made beside it."""

    model: nn.Module
    mesh: Mesh
    example: Any = None
    """Inputs of one microbatch; once samples are split, this rank's part of them."""
    keep_output: bool = False
    """The loss can take shares of the output features."""
    initialise: bool = True
    """Parameters on the meta device get first values, instead of zeros until weights are read."""

    blueprint: Blueprint = field(init=False)
    has_batch_norms: bool = field(init=False)
    """The whole model has some; this rank's stages may have none."""
    make_sample_split: Callable[[nn.Module], SampleSplit] | None = None
    sample_split: SampleSplit | None = None
    """This rank's part of every sample, where ranks share samples."""
    regions: tuple[Region, ...] = ()
    """The parts of the whole model that the tensor axis splits."""
    cut: CutModel | None = None
    """This rank's stages, in a pipeline."""
    tensor: TensorParallel | None = None
    """This rank's shares of layers, with a tensor axis."""
    layouts: dict[str, Layout] = field(default_factory=dict)
    """Each parameter's and buffer's placement in the global tensor, by name."""
    sync: Sync = field(init=False)
    seeds: Seeds = field(init=False)
    place_seeds: PlaceSeeds | None = None
    """Random states by place in the model, where it is in one piece."""

    def __post_init__(self) -> None:
        self.blueprint = find_blueprint(self.model)
        self.has_batch_norms = has_batch_norms(self.model)
        self.seeds = Seeds(self.mesh.world.device)

    @property
    def stage_of(self) -> dict[str, int] | None:
        """The stage of each block of this rank, in a pipeline."""
        if self.cut is None:
            return None
        return {block: min(self.cut.stage_of_unit[block]) for block in self.blueprint.blocks}


def apply_plan(parts: ParallelModel) -> None:
    """Change a model in place as the mesh's plan says; collective."""
    for step in STEPS:
        if step.when(parts.mesh.plan):
            step.do(parts)


def _split_samples(parts: ParallelModel) -> None:
    parts.make_sample_split = choose_sample_split(parts.mesh, parts.blueprint, parts.example)
    assert parts.make_sample_split is not None
    parts.sample_split = parts.make_sample_split(parts.model)


def _find_regions(parts: ParallelModel) -> None:
    parts.regions = split_regions(parts.model, parts.mesh, parts.blueprint, parts.example)


def _probe(parts: ParallelModel) -> None:
    probe_split(
        parts.model,
        parts.mesh,
        parts.blueprint,
        parts.regions,
        parts.example,
        parts.sample_split,
        parts.make_sample_split,
    )
    if parts.sample_split is not None and parts.example is not None:
        parts.example = parts.sample_split.cut_inputs(parts.example)


def _cut_stages(parts: ParallelModel) -> None:
    parts.cut, parts.mesh.plan = cut_model(parts.model, parts.mesh, parts.blueprint, parts.example)
    parts.blueprint = parts.cut.blueprint


def _cut_layers(parts: ParallelModel) -> None:
    parts.tensor = TensorParallel(parts.model, parts.mesh, parts.blueprint, parts.regions)
    shares = parts.tensor.shares
    parts.layouts = {name: shares.layout(name, one.shape) for name, one in model_tensors(parts.model)}
    parts.tensor.cut()


def _place_parameters(parts: ParallelModel) -> None:
    if parts.tensor is None:
        parts.layouts = {name: Layout(global_shape=tuple(one.shape)) for name, one in model_tensors(parts.model)}
    parts.sync = place(
        parts.model,
        parts.mesh,
        parts.blueprint,
        layouts=parts.layouts,
        cut=None if parts.tensor is None else parts.tensor.cut_one,
        apart=_apart(parts),
        stage_of=parts.stage_of,
        initialise=parts.initialise,
    )
    parts.layouts = find_layouts(parts.layouts, parts.sync)


def _apart(parts: ParallelModel) -> Apart:
    """The parameters that a pipeline or the tensor axis makes exceptions of."""
    cut, mesh = parts.cut, parts.mesh
    held: frozenset[str] = frozenset()
    counted = {} if parts.tensor is None else counted_elements(parts.tensor.shares, parts.layouts, mesh)
    if cut is not None:
        rank = mesh.index("pipeline")
        held = frozenset(name for name, ranks in cut.holders.items() if rank in ranks)
        if mesh.plan.pipeline.schedule in FLUSH_FREE:  # all gradients are made on weight versions
            held = frozenset(name for name, _ in cut.model.named_parameters())
        counted |= {name: () for name, ranks in cut.holders.items() if rank in ranks[1:]}
    return Apart(held=held, counted=counted)


def _exchange_in_layers(parts: ParallelModel) -> None:
    assert parts.tensor is not None
    parts.tensor.install(keep_output=parts.keep_output)


def _split_rows(parts: ParallelModel) -> None:
    assert parts.sample_split is not None
    parts.sample_split.prepare(parts.model)


def _split_tokens(parts: ParallelModel) -> None:
    assert parts.tensor is not None
    parts.tensor.split_tokens(parts.stage_of)


def _open_gates(parts: ParallelModel) -> None:
    assert parts.cut is not None
    parts.cut.open_gates()


def _seed_places(parts: ParallelModel) -> None:
    if parts.cut is None:
        parts.place_seeds = PlaceSeeds(parts.model, parts.blueprint, parts.seeds)
    if parts.tensor is not None:
        parts.tensor.draw_with(parts.seeds)


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that is done to a model."""

    what: str
    when: Callable[[Plan], bool]
    do: Callable[[ParallelModel], None]


def _always(plan: Plan) -> bool:
    del plan
    return True


def _shares_batch(plan: Plan) -> bool:
    return plan.axes.replicate * plan.axes.data * plan.axes.sequence > 1


STEPS = (
    Step(
        "Hugging Face models are told to keep no keys for a next token",
        _always,
        lambda parts: leave_out_caches(parts.model),
    ),
    Step(
        "samples are split by tokens or by rows; modules that take positions get this rank's",
        lambda plan: plan.axes.sequence > 1,
        _split_samples,
    ),
    Step(
        "regions of layers are chosen for the tensor axis: declared, or found by following the example",
        lambda plan: plan.axes.tensor > 1,
        _find_regions,
    ),
    Step(
        "a split copy is compared with the whole model on the example, outputs and gradients",
        lambda plan: plan.axes.tensor * plan.axes.sequence > 1,
        _probe,
    ),
    Step(
        "stages of other pipeline ranks become placeholders; every rank starts from rank 0's weights",
        lambda plan: plan.axes.pipeline > 1,
        _cut_stages,
    ),
    Step(
        "this rank keeps its share of each tensor that the tensor axis splits",
        lambda plan: plan.axes.tensor > 1,
        _cut_layers,
    ),
    Step(
        "parameters get memory, first values that all ranks share, ZeRO's shards, and hooks that exchange gradients",
        _always,
        _place_parameters,
    ),
    Step("layers at both ends of a region exchange", lambda plan: plan.axes.tensor > 1, _exchange_in_layers),
    Step(
        "BatchNorm takes its statistics over the whole batch",
        lambda plan: _shares_batch(plan) and plan.data.buffers == "synchronise",
        lambda parts: synchronise_batch_norms(parts.model, parts.mesh.batch_group("statistics")),
    ),
    Step(
        "blocks recompute their activations in the backward pass",
        lambda plan: plan.recompute.policy != "none",
        lambda parts: recompute_blocks(parts.model, parts.blueprint, parts.mesh.plan.recompute.policy),
    ),
    Step(
        "blocks are compiled, with all of the above inside",
        lambda plan: plan.compile.blocks,
        lambda parts: compile_blocks(parts.model, parts.blueprint),
    ),
    Step("BatchNorm takes rows of images", lambda plan: plan.axes.sequence > 1, _split_rows),
    Step("activations between regions are split by tokens", lambda plan: plan.tensor.sequence, _split_tokens),
    Step("units compute only when their stage is run", lambda plan: plan.axes.pipeline > 1, _open_gates),
    Step("random states follow a unit's place in the model, not the plan", _always, _seed_places),
)
