"""A model on this rank and what `apply_plan` has made beside it: the record that a trainer is built from."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from weft.blueprint import Blueprint, find_blueprint
from weft.layout import Layout
from weft.mesh import Mesh
from weft.parallel.pipeline.cut_model import CutModel
from weft.parallel.state.batchnorm import has_batch_norms
from weft.parallel.state.materialise import Draws
from weft.parallel.state.rng import PlaceSeeds, Seeds
from weft.parallel.tensor.tensor_parallel import TensorParallel
from weft.parallel.wrapping.replacements import Replacements, donated_buffers, reentrant_checkpoints
from weft.plan.partition.one_worker import is_served
from weft.plan.partition.tensor import Region
from weft.sync.base import Sync
from weft.sync.in_process import InProcessExchange
from weft.training.data.balance import Balance
from weft.training.data.sample_split import SampleSplit


@dataclass(slots=True, kw_only=True)
class ParallelModel:
    """A model on this rank; the steps of `apply_plan` fill in the fields after `in_process`."""

    model: nn.Module
    mesh: Mesh
    example: Any = None
    """Inputs of one microbatch; once samples are split, this rank's part of them."""
    whole_example: Any = None
    """The example with whole samples, once samples are split."""
    keep_output: bool = False
    """The loss can take shares of the output features."""
    draws: Draws = lambda name: True
    """Which parameters on the meta device get first values, instead of zeros until weights are read."""
    in_process: InProcessExchange | None = None
    """The exchange between replicas that are all in one process."""

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
    balance: Balance | None = None
    """Which microbatches this rank computes, where it trains."""

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

    @property
    def num_parameters(self) -> int:
        """Elements of the whole model's parameters."""
        if self.cut is not None:
            return sum(parameter.numel() for parameter in self.cut.whole.parameters())
        return sum(math.prod(self.layouts[name].global_shape) for name, _ in self.model.named_parameters())

    @property
    def runs_empty(self) -> bool:
        """True if layers exchange in their forward pass, so that a microbatch without samples must run too."""
        return self.has_batch_norms and self.mesh.num_batch_parts > 1 and self.mesh.plan.data.buffers == "synchronise"

    def enter(self, inputs: Any) -> None:
        """Begin a forward or backward pass of a microbatch."""
        if self.sample_split is not None:
            self.sample_split.enter(inputs)

    def even_place(self, microbatch: int) -> tuple[int, int]:
        """The data rank and number by which a microbatch of this rank draws random numbers: those that it has where
        all ranks compute as many."""
        if self.balance is None or is_served(self.mesh.plan):  # where workers come and go, shares are not counted
            return self.mesh.data_rank, microbatch
        return self.balance.even_place(microbatch)

    def sample_rank_of(self, data_rank: int) -> int:
        """The `sample_rank` of the rank that has this one's part of the sequences on another data rank."""
        return self.mesh.sample_rank + (data_rank - self.mesh.data_rank) * self.mesh.sequence_size

    def random_states(self, step: int, microbatch: int) -> AbstractContextManager[None]:
        """Context of the random states of one microbatch's forward pass, the same for any number of stages."""
        if self.place_seeds is None:
            return nullcontext()
        draws_alike = self.sample_split is None or self.sample_split.draws_alike
        data_rank, number = self.even_place(microbatch)
        if not draws_alike:
            data_rank = self.sample_rank_of(data_rank)
        return self.place_seeds.during(step=step, microbatch=number, data_rank=data_rank)

    def make_replacements(self) -> Replacements:
        """Context of the model's passes."""
        plan = self.mesh.plan
        made = Replacements() if self.sample_split is None else self.sample_split.replacements
        if plan.axes.pipeline > 1:
            made.add(reentrant_checkpoints())
        if plan.compile.blocks and plan.axes.pipeline > 1 and plan.pipeline.schedule == "zero-bubble":
            made.add(donated_buffers())
        return made
