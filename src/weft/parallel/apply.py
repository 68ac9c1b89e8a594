"""The complete list of what is done to a model to make it parallel, in the order in which it is done (`steps`).

The model stays the user's own module: same class, same names, same parameters. Wrapped forwards and hooks are recorded
on the modules (`parallel/wrapping/wrap.py`), where `trainer.describe()` reads them. Two other files change something
outside weft: `parallel/wrapping/replacements.py` lists functions of torch and transformers that are replaced while a
step runs, and `checkpoint/pretrained.py` reads weights into the finished model.

The steps need `sync/` and `training/setup/`, so in the import order this file comes after those, just before
`training/`, which calls it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from weft.comm.shared_gradients import SharedGradient, sums_may_differ
from weft.errors import PlanError
from weft.layout import Layout, Range
from weft.models.hugging_face_inputs import leave_out_caches
from weft.parallel.compile import compile_blocks
from weft.parallel.pipeline.cut_model import tied_gradients
from weft.parallel.recompute import recompute_blocks
from weft.parallel.state.batchnorm import synchronise_batch_norms
from weft.parallel.state.fragments import find_fragments
from weft.parallel.state.materialise import model_tensors
from weft.parallel.state.rng import PlaceSeeds
from weft.parallel.tensor.shares import counted_elements
from weft.parallel.tensor.tensor_parallel import TensorParallel
from weft.plan.exchange.coded_tensor import is_coded
from weft.plan.model_refusals import CODEC_OF_REPEATED_ROWS
from weft.plan.partition.flat_buffers import Sharding
from weft.plan.partition.replicas import shares_batch
from weft.plan.pipeline.communication import FLUSH_FREE
from weft.plan.plan import Plan
from weft.sync.make import place, reduction_groups
from weft.sync.norm import GradientRules
from weft.training.setup.choose_sample_split import choose_sample_split
from weft.training.setup.cut_stages import cut_model
from weft.training.setup.probe import probe_split
from weft.training.setup.split_layers import refuse_left_out_stages, split_regions
from weft.training.step.parallel_model import ParallelModel

log = logging.getLogger("weft")


def apply_plan(parts: ParallelModel) -> None:
    """Change a model in place as the mesh's plan says; collective."""
    for step in steps():
        if step.is_for(parts.mesh.plan):
            step.do(parts)
    parts.example = parts.whole_example = parts.make_sample_split = None  # the trainer keeps the record, not its inputs


def steps() -> tuple[Step, ...]:
    """All that can be done to a model, first to last."""
    return (
        Step("always", "Hugging Face models build no key-value cache", _leave_out_caches),
        Step("[axes] ring or ulysses > 1", "samples are split by tokens or rows; positions get hooks", _split_samples),
        Step("[axes] tensor > 1", "regions of layers are declared, or found by tracing the example", _find_regions),
        Step("[axes] tensor, ring or ulysses > 1", "a split copy is compared with the whole model", _probe),
        Step(
            "[axes] pipeline > 1",
            "cut copies are compared with the whole; other stages are placeholders",
            _cut_stages,
        ),
        Step("[axes] tensor > 1", "each tensor of a region is cut to this rank's share", _cut_layers),
        Step("always", "parameters are materialised, made equal or sharded; gradients get hooks", _place_parameters),
        Step("[axes] tensor > 1", "layers at both ends of a region communicate", _exchange_in_layers),
        Step(
            "[data] buffers", "BatchNorm takes its statistics over the microbatch of all data ranks", _synchronise_norms
        ),
        Step("[recompute] policy", "blocks recompute activations in the backward pass", _recompute_blocks),
        Step("[compile] blocks", "blocks are compiled, with all of the above inside", _compile_blocks),
        Step("[axes] ring or ulysses > 1", "BatchNorm takes rows of images", _split_rows),
        Step("[tensor] sequence", "activations between regions are split by tokens", _split_tokens),
        Step("[axes] pipeline > 1", "units run only with their own stage", _wrap_units),
        Step("always", "random states follow a unit's place in the model, not the plan", _seed_places),
    )


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that is done to a model, under a condition on the plan."""

    condition: str
    what: str
    do: Callable[[ParallelModel], None]

    def is_for(self, plan: Plan) -> bool:
        return _CONDITIONS[self.condition](plan)


_CONDITIONS: dict[str, Callable[[Plan], bool]] = {
    "always": lambda plan: True,
    "[axes] ring or ulysses > 1": lambda plan: plan.axes.sequence > 1,
    "[axes] tensor > 1": lambda plan: plan.axes.tensor > 1,
    "[axes] tensor, ring or ulysses > 1": lambda plan: plan.axes.tensor * plan.axes.sequence > 1,
    "[axes] pipeline > 1": lambda plan: plan.axes.pipeline > 1,
    "[data] buffers": lambda plan: plan.data.buffers == "synchronise" and shares_batch(plan),
    "[recompute] policy": lambda plan: plan.recompute.policy != "none",
    "[compile] blocks": lambda plan: plan.compile.blocks,
    "[tensor] sequence": lambda plan: plan.tensor.sequence,
}


def _leave_out_caches(parts: ParallelModel) -> None:
    leave_out_caches(parts.model)


def _split_samples(parts: ParallelModel) -> None:
    parts.make_sample_split = choose_sample_split(parts.mesh, parts.blueprint, parts.example)
    assert parts.make_sample_split is not None
    parts.sample_split = parts.make_sample_split(parts.model)


def _find_regions(parts: ParallelModel) -> None:
    parts.regions = split_regions(parts.model, parts.mesh, parts.blueprint, parts.example)


def _probe(parts: ParallelModel) -> None:
    probe_split(parts)
    if parts.sample_split is not None and parts.example is not None:
        parts.whole_example = parts.example
        parts.example = parts.sample_split.cut_inputs(parts.example)


def _cut_stages(parts: ParallelModel) -> None:
    refuse_left_out_stages(parts.model)
    parts.cut, parts.mesh.plan = cut_model(
        parts.model, parts.mesh, parts.blueprint, parts.example, whole_example=parts.whole_example
    )
    parts.blueprint = parts.cut.blueprint
    kept = parts.cut.kept_by_units
    if kept and not parts.keep_output and parts.mesh.world.rank == 0:  # a loss of the user's own, which may read them
        log.warning(
            "blocks keep tensors as attributes (%s); the loss runs on the last stage of the pipeline and finds there "
            "only those of its own blocks: if it adds them up (an auxiliary loss), let blocks return them instead",
            ", ".join(kept[:4]) + (", ..." if len(kept) > 4 else ""),
        )


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
        rules=_gradient_rules(parts),
        stage_of=parts.stage_of,
        fragment_of=find_fragments(parts.model if parts.cut is None else parts.cut.whole, parts.mesh.plan),
        draws=parts.draws,
        in_process=parts.in_process,
    )
    parts.layouts |= {name: flat.layout(number) for flat in parts.sync.flats for number, name in enumerate(flat.names)}


def _gradient_rules(parts: ParallelModel) -> GradientRules:
    """Exceptions that a pipeline and the tensor axis make for gradients; collective."""
    cut, mesh, tensor = parts.cut, parts.mesh, parts.tensor
    tied: list[SharedGradient] = []
    split: list[SharedGradient] = []
    counted: dict[str, tuple[Range, ...]] = {}
    own_buffers: dict[str, str] = {}
    weights: list[SharedGradient] = []
    weights_may_differ = mesh.num_replicas > 1 and sums_may_differ(
        [mesh.between_replicas("weights")], mesh.world.device
    )
    if tensor is not None:
        counted = counted_elements(tensor.shares, parts.layouts, mesh)
        group, replicas = reduction_groups(mesh)
        split = tensor.shared_gradients(sums_may_differ=sums_may_differ([group, *replicas], mesh.world.device))
        own_buffers = dict(tensor.own_buffers)
        if weights_may_differ:
            weights = tensor.shared_gradients(sums_may_differ=True)
    if cut is not None:
        rank = mesh.index("pipeline")
        counted |= {name: () for name, ranks in cut.holders.items() if rank in ranks[1:]}
        tied = tied_gradients(cut, mesh)
        if weights_may_differ:
            weights = [*tied, *weights]
        if Sharding.of(mesh.plan).num_parts > 1:
            # Named by places on the axis: data ranks make the same buffers in the same order.
            own_buffers |= {
                one.name: f"stages {cut.holders[one.name]}, {own_buffers.get(one.name, '')}" for one in tied
            }
    _refuse_rows_that_drift(parts, {one.name for one in split if one.kind == "sum"})
    return GradientRules(
        defers=cut is not None and mesh.plan.pipeline.schedule in FLUSH_FREE,
        norm_ranges=counted,
        shared=(*tied, *split),
        shared_weights=tuple(replace(one, kind="broadcast") for one in weights),
        tied=frozenset(one.name for one in tied),
        own_buffers=own_buffers,
    )


def _refuse_rows_that_drift(parts: ParallelModel, summed: Collection[str]) -> None:
    """Refuse a codec that would compress copies of some rows differently; `summed`: gradients that travel as they are,
    because their holders sum them afterwards."""
    plan = parts.mesh.plan
    if parts.tensor is None or plan.codec.name in ("none", "half"):
        return
    kept = summed if plan.replica_axis is None else ()
    for name in sorted(parts.tensor.shares.overlapping.difference(kept)):
        if is_coded(plan.codec, parts.layouts[name].global_shape):
            raise PlanError(CODEC_OF_REPEATED_ROWS.message(plan, name=name))


def _exchange_in_layers(parts: ParallelModel) -> None:
    assert parts.tensor is not None
    parts.tensor.install(keep_output=parts.keep_output)


def _synchronise_norms(parts: ParallelModel) -> None:
    if parts.has_batch_norms:
        synchronise_batch_norms(parts.model, parts.mesh.batch_group("statistics"))


def _recompute_blocks(parts: ParallelModel) -> None:
    recompute_blocks(parts.model, parts.blueprint, parts.mesh.plan.recompute.policy)


def _compile_blocks(parts: ParallelModel) -> None:
    compile_blocks(parts.model, parts.blueprint)


def _split_rows(parts: ParallelModel) -> None:
    assert parts.sample_split is not None
    parts.sample_split.prepare(parts.model)


def _split_tokens(parts: ParallelModel) -> None:
    assert parts.tensor is not None
    parts.tensor.split_tokens(parts.stage_of)


def _wrap_units(parts: ParallelModel) -> None:
    assert parts.cut is not None
    parts.cut.wrap_units()


def _seed_places(parts: ParallelModel) -> None:
    if parts.cut is None:
        parts.place_seeds = PlaceSeeds(parts.model, parts.blueprint, parts.seeds)
    if parts.tensor is not None:
        parts.tensor.draw_with(parts.seeds)
