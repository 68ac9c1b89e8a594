"""Tensor parallelism: one layer on many ranks.

Which layers are split, and how, is plain data (`plan/partition/tensor.py`): declared by the model's blueprint, read off
the plan of a Hugging Face model, or found from its dataflow (`discovery/`). Here it is applied to a model in place:
every rank keeps its shard of the weights, and the layers at both ends of a region communicate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from weft.blueprint import Blueprint
from weft.comm.collectives import broadcast
from weft.comm.shared_gradients import SharedGradient
from weft.errors import ModelError
from weft.mesh import Mesh
from weft.parallel.state.materialise import model_tensors
from weft.parallel.state.rng import Seeds, ShareDraws, has_dropout
from weft.parallel.tensor.cross_entropy import Share
from weft.parallel.tensor.discovery.layer_rules import is_transposed
from weft.parallel.tensor.discovery.region_sizes import Lengths
from weft.parallel.tensor.layers import (
    Axis,
    ColumnGroup,
    ColumnLayer,
    ColumnLinear,
    EmbeddingRows,
    InputViews,
    OutputMode,
    RowLayer,
    WholeOutput,
)
from weft.parallel.tensor.local_sizes import LocalSizes
from weft.parallel.tensor.megatron_sequence import (
    Shown,
    TokenSplit,
    gather_for_attention,
    innermost_attention,
    split_between,
)
from weft.parallel.tensor.replicated_gradients import (
    add_early_sum_hooks,
    find_misaligned,
    find_own_buffers,
    shared_gradients,
)
from weft.parallel.tensor.shares import AXIS, Shares, local_part, make_shares, set_count, share_tied
from weft.parallel.tracing.handles import handle_of
from weft.parallel.tracing.placeholder import PlaceholderModule
from weft.parallel.wrapping.wrap import add_hook, wrap_forward
from weft.plan.partition.tensor import Range, Region, entries, region_shares, share_of


class TensorParallel:
    """A model, or a stage of one, of which each rank along the tensor axis holds a shard."""

    def __init__(self, model: nn.Module, mesh: Mesh, blueprint: Blueprint, regions: tuple[Region, ...]) -> None:
        """The model is not changed yet. `blueprint` has the blocks that are in this model."""
        self.model = model
        self._mesh = mesh
        self._blueprint = blueprint
        self.group = mesh.group(AXIS, "activations")
        self.shares: Shares = share_tied(make_shares(regions, self.group.size), blueprint.tied, model)
        handle, policy = handle_of(self.group), mesh.plan.recompute.policy
        self.tokens = TokenSplit(self.group) if mesh.plan.tensor.sequence else None
        self.inside = Axis(
            group=self.group,
            handle=handle,
            keeps_products=policy == "selective",
            tokens=self.tokens,
        )
        """The axis as layers in blocks see it."""
        self.outside = Axis(group=self.group, handle=handle)
        self._shares_on_input = policy != "none" and mesh.plan.compile.blocks
        """Layers with a common input keep its exchanged form on it, in graphs compiled with their recomputation."""
        self.output: Share | None = None
        """This rank's shard of the model's output features, where the loss can take it."""
        self.output_mode = OutputMode()
        self._misaligned = find_misaligned(model, blueprint.blocks, self.shares, mesh.plan)
        self.own_buffers = find_own_buffers(self.shares, self._misaligned, mesh)
        """Parameters that need flat buffers of their own, and the ranks that hold them."""
        self._has_dropout = has_dropout(model)
        self._num_held = Counter(_holder(region) for region in regions)
        """Number of regions per module that contains some."""

    @torch.no_grad()
    def cut(self) -> None:
        """Broadcast the first rank's tensors and keep this rank's shard of each; collective.

        Tensors on the meta device are cut when they are materialised.
        """
        for name, tensor in model_tensors(self.model):
            if not tensor.is_meta:
                there = tensor.detach().to(self._mesh.world.device).contiguous()
                broadcast(there, self.group)
                tensor.data = self.cut_one(name, there).to(tensor.device)

    def cut_one(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's shard of a whole tensor."""
        return local_part(whole, self.shares.layout(name, whole.shape), self._mesh.grid, self._mesh.world.rank)

    def install(self, *, keep_output: bool) -> None:
        """Let layers communicate; after all tensors are cut. `keep_output`: the loss can take a sharded output."""
        seen: set[int] = set()
        for region in self.shares.regions:
            layers = {id(self.model.get_submodule(n)) for n in (*chain(*region.columns), *region.rows) if self._has(n)}
            if not layers or not layers.isdisjoint(seen):  # on another stage, or of a block that is used twice
                continue
            seen |= layers
            self._install(region)
            if self._shares_on_input and any(len(names) > 1 for names in region.columns) and self._is_in_block(region):
                module = self.model.get_submodule(_holder(region))
                why = "lets layers that share an input exchange it once in a compiled recomputation"
                wrap_forward(module, InputViews(module).forward, by="tensor", why=why)
            holder = self._shown_holder(region)
            if holder is not None and self.tokens is not None:
                module = self.model.get_submodule(holder)
                why = "lets its code see all tokens, of which its layers keep this rank's"
                wrap_forward(module, Shown(module, self.tokens).forward, by="tensor", why=why)
            if region.is_output:
                self._install_output(region, keep_output=keep_output)
        add_early_sum_hooks(self.model, self.shares, self._mesh, misaligned=self._misaligned)
        for layer in self.model.modules():
            if isinstance(layer, nn.TransformerEncoderLayer):
                why = "keeps torch from a fused kernel that exchanges nothing"
                add_hook(layer, "forward_pre", _nothing, by="tensor", why=why)
        why = "refuses to save shares under the names of whole tensors"
        add_hook(self.model, "state_dict_pre", _refuse_state_dict, by="tensor", why=why)

    def draw_with(self, seeds: Seeds) -> None:
        """Let each rank draw random numbers of its own for its shard."""
        self._set_draws(seeds, ShareDraws(seeds.generator, self.group.index))

    def look_at_draws(self, seeds: Seeds) -> None:
        """After a step: a model that drew nothing and has no dropout needs no draws of its own."""
        if seeds.draws is not None and not seeds.draws.is_used and not self._has_dropout:
            self._set_draws(seeds, None)

    def _set_draws(self, seeds: Seeds, draws: ShareDraws | None) -> None:
        seeds.draws = self.inside.draws = self.outside.draws = draws
        if self.tokens is not None:
            self.tokens.draws = draws

    def split_tokens(self, stage_of: Mapping[str, int] | None) -> None:
        """Split activations between regions by tokens, if the plan says so; after all other wrapping of blocks."""
        if self.tokens is not None:
            blocks = [name for name in self._blueprint.blocks if self._has(name)]
            sharded = [name for region in self.shares.regions for name in (*chain(*region.columns), *region.rows)]
            gather_for_attention(self.model, blocks, sharded, self.tokens)
            split_between(self.model, self._blueprint.blocks, self.tokens, stage_of)

    def _install(self, region: Region) -> None:
        model = self.model
        for names in region.columns:
            self._install_columns(names, region)
        for name in region.rows:
            layer = model.get_submodule(name)
            why = "sums partial results over the tensor axis"
            wrap_forward(layer, self._row(layer, name, region), by="tensor", why=why)
        for count in region.counts:
            set_count(model, count, *self._share(region))
        for resized in region.resized:
            module = model.get_submodule(resized.module)
            sizes = LocalSizes(module, resized, Lengths(*self._share(region)))
            wrap_forward(module, sizes.forward, by="tensor", why="makes sizes in its code those of this rank's share")

    def _install_columns(self, names: Sequence[str], region: Region) -> None:
        layers: list[Any] = [self.model.get_submodule(name) for name in names]
        if all(type(layer).forward is nn.Linear.forward and "forward" not in vars(layer) for layer in layers):
            is_shown = self._shown_holder(region) is not None
            group = ColumnGroup(layers, self._axis(names[0]), is_region=not region.is_output, is_shown=is_shown)
            for number, layer in enumerate(layers):
                why = "computes this rank's output features; adds up the gradient of its input over the tensor axis"
                wrap_forward(layer, ColumnLinear(group, number).forward, by="tensor", why=why)
                layer.out_features = self._num_entries(f"{names[number]}.weight")
            return
        for name, layer in zip(names, layers, strict=True):
            channels = None
            if isinstance(layer, _ConvNd) and layer.groups > 1:
                each = layer.in_channels // layer.groups
                start, stop = share_of(layer.groups, *self._share(region))
                channels = (start * each, stop * each)
            is_shown = self._shown_holder(region) is not None
            made = ColumnLayer(layer, self._axis(name), channels=channels, is_shown=is_shown)
            why = "computes this rank's output features; adds up the gradient of its input over the tensor axis"
            wrap_forward(layer, made.forward, by="tensor", why=why)

    def _row(self, layer: Any, name: str, region: Region) -> Callable[..., Any]:
        if isinstance(layer, nn.Embedding):
            share, padding = self._vocabulary(region), layer.padding_idx
            if padding is not None:
                layer.padding_idx = padding - share.start if share.start <= padding < share.stop else None
            layer.num_embeddings = share.width
            forward: Callable[..., Any] = EmbeddingRows(layer, self.group, share).forward
            return forward
        if type(layer).forward is nn.Linear.forward and "forward" not in vars(layer):
            layer.in_features = self._num_entries(f"{name}.weight")
            return RowLayer(layer, self._axis(name), is_linear=True).forward
        known = isinstance(layer, _ConvNd) or is_transposed(layer)
        if not known and getattr(layer, "bias", None) is not None:
            raise ModelError(
                f'"{name}" is a {type(layer).__name__} with a bias and given a share of its inputs; weft does not know '
                "how to add its bias once: use torch.nn.Linear, or build it without bias"
            )
        return RowLayer(layer, self._axis(name)).forward

    def _install_output(self, region: Region, *, keep_output: bool) -> None:
        """Gather the output where it is made, except for callers that expect a shard."""
        (name,) = region.columns[0]
        share = self._vocabulary(region)
        self.output = share if keep_output else None
        layer = self.model.get_submodule(name)
        whole = WholeOutput(layer.forward, share, self.group, self.output_mode)
        wrap_forward(layer, whole.forward, by="tensor", why="gathers the output features, unless the loss takes shares")

    def _vocabulary(self, region: Region) -> Share:
        cut = region.cuts[0]
        ((start, stop),) = entries(cut, *self._share(region))
        return Share(start=start, stop=stop, total=sum(section.length for section in cut.sections))

    def _axis(self, layer: str) -> Axis:
        is_inside = any(layer == block or layer.startswith(f"{block}.") for block in self._blueprint.blocks)
        return self.inside if is_inside else self.outside

    def _num_entries(self, name: str) -> int:
        """Length of this rank's part of a cut tensor, along the dim that is cut."""
        return sum(stop - start for start, stop in self.shares.splits[name].parts[self.group.index])

    def _has(self, name: str) -> bool:
        """True if a module is on this stage; elsewhere there may be a placeholder that has its attributes."""
        module = self.model
        for step in name.split("."):
            inside = module._modules.get(step)
            if inside is None or isinstance(inside, PlaceholderModule):
                return False
            module = inside
        return True

    def _is_in_block(self, region: Region) -> bool:
        return any(f"{_holder(region)}.".startswith(f"{block}.") for block in self._blueprint.blocks)

    def _shown_holder(self, region: Region) -> str | None:
        """The module whose code should see all tokens where they are split, if it contains this region alone."""
        holder = _holder(region)
        is_inside = any(holder.startswith(f"{block}.") for block in self._blueprint.blocks)
        if not (is_inside and self._num_held[holder] == 1 and len(region.columns) == 1):
            return None
        return innermost_attention(self.model, holder, region.columns[0][0])

    def _share(self, region: Region) -> tuple[Range, int]:
        """(this rank's units of a region, number of units of all ranks)."""
        each, out_of = region_shares(region, self.group.size)
        return each[self.group.index], out_of

    def shared_gradients(self, *, sums_may_differ: bool) -> list[SharedGradient]:
        """Gradients that ranks exchange once they are summed over data, before parameters are sharded; collective.

        `sums_may_differ`: sums over data may round differently on two tensor ranks.
        """
        return shared_gradients(
            self.model,
            self.shares,
            self._mesh,
            partial=self._find_partial(),
            misaligned=self._misaligned,
            sums_may_differ=sums_may_differ,
        )

    def _find_partial(self) -> frozenset[str]:
        """Whole parameters that are used on shards, so that their gradients are summed over the ranks."""
        partial = self.shares.partial
        if self.tokens is None:
            return partial
        blocks = [self.model.get_submodule(block) for block in self._blueprint.blocks]
        inside = {parameter for block in blocks for parameter in block.parameters()}
        whole = (name for name, p in self.model.named_parameters() if p in inside and name not in self.shares.splits)
        return partial | frozenset(whole)


def _holder(region: Region) -> str:
    """The innermost module that contains all layers of a region."""
    paths = [name.split(".")[:-1] for name in (*chain(*region.columns), *region.rows)]
    common = [steps[0] for steps in zip(*paths, strict=False) if len(set(steps)) == 1]
    return ".".join(common)


def _nothing(*_: object) -> None:
    pass


def _refuse_state_dict(*_: object) -> None:
    raise ModelError(
        "with [axes] tensor > 1 a rank has a shard of most parameters, so state_dict() would save a part of the model "
        "under the names of the whole; call trainer.save(directory) on every rank, which writes whole tensors"
    )
