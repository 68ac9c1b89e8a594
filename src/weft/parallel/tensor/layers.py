"""Forward methods of layers that are sharded over the tensor axis.

Layers stay the user's own modules, with smaller weights; only `forward` is replaced, by a bound method: a closure would
make a copy of the model run the original's layers, and a compiler would compile every callable object by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_map_only

from weft.comm.group import Group
from weft.errors import ModelError
from weft.parallel.state.rng import ShareDraws
from weft.parallel.tensor.cross_entropy import Share, gather_logits
from weft.parallel.tensor.discovery.layer_rules import is_transposed
from weft.parallel.tensor.functions import add, columns, row, spread
from weft.parallel.tensor.megatron_sequence import TokenSplit
from weft.parallel.tensor.operators import kept_row, traced_add, traced_gather, traced_scatter, traced_spread
from weft.plan.model_refusals import TOKENS_FLATTENED
from weft.plan.partition.tensor import Range

Forward = Callable[..., Any]
_FEWEST_DIMS = 3
"""Of activations whose tokens are split: samples, tokens, features."""
_EXCHANGED = "weft_exchanged"
"""Attribute of the common input of several layers in a compiled graph: its exchanged form, and how many layers still
need it."""


@dataclass(slots=True, kw_only=True)
class Axis:
    """The tensor axis as layers see it."""

    group: Group
    handle: int
    """Handle by which operators know the group."""
    tokens: TokenSplit | None = None
    """None: activations between regions are never split along the tokens."""
    draws: ShareDraws | None = None
    """Random numbers inside regions; None: nothing there is random."""
    keeps_products: bool = False
    """A policy of recomputation keeps the results of operators."""

    @property
    def splits_tokens(self) -> bool:
        return self.tokens is not None and self.tokens.is_split

    @property
    def shows_all_tokens(self) -> bool:
        """True if tokens are split and the running module got all of them; their gradients are summed elsewhere."""
        return self.tokens is not None and self.tokens.is_split and self.tokens.is_showing


class ColumnGroup:
    """Linear layers that are given the very same tensor, called one after another.

    The first call computes all of them, and the others take their results: so the gradient of the input is summed over
    the layers before it travels.
    """

    def __init__(self, layers: Sequence[nn.Linear], axis: Axis, *, is_region: bool, is_shown: bool = False) -> None:
        """`is_region`: a row layer follows; not so at the model's output. `is_shown`: split tokens are gathered before
        the module that holds these layers runs."""
        self.is_shown = is_shown
        self.layers = tuple(layers)
        self.axis = axis
        self.is_region = is_region
        self._given: Tensor | None = None
        self._version = (False, 0)
        self._made: dict[int, Tensor] = {}

    def call(self, number: int, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return self._call_traced(number, x)
        version = (torch.is_grad_enabled(), 0 if x.is_inference() else x._version)
        if self._given is x and number in self._made and version == self._version:
            made = self._made.pop(number)
            if not self._made:
                self._given = None
            return made
        axis = self.axis
        if axis.draws is not None and self.is_region and self.layers[0].training and not axis.splits_tokens:
            axis.draws.enter()
        parameters = [p for layer in self.layers for p in (layer.weight, layer.bias)]
        local = None if axis.tokens is None else axis.tokens.local_of(x)
        if local is not None:
            outputs = columns(local, axis.group, True, x.detach(), *parameters)
        elif axis.shows_all_tokens:
            return F.linear(x, self.layers[number].weight, self.layers[number].bias)
        else:
            if axis.splits_tokens and x.dim() < _FEWEST_DIMS:
                raise ModelError(TOKENS_FLATTENED.message(shape=tuple(x.shape)))
            outputs = columns(x, axis.group, axis.splits_tokens, None, *parameters)
        if len(outputs) > 1:
            self._given, self._version = x, version
            self._made = {other: output for other, output in enumerate(outputs) if other != number}
        return outputs[number]

    def _call_traced(self, number: int, x: Tensor) -> Tensor:
        """One layer alone; the input that layers share is spread once."""
        layer, axis = self.layers[number], self.axis
        if self.is_shown and axis.splits_tokens:  # the gather sums the gradients
            return F.linear(x, layer.weight, layer.bias)
        begin = traced_gather if axis.splits_tokens else traced_spread
        if len(self.layers) == 1:
            return F.linear(begin(x, axis.handle), layer.weight, layer.bias)
        # Kept on the tensor itself: torch's recomputation allows no other state between layers.
        exchanged, num_left = getattr(x, _EXCHANGED, None) or (begin(x, axis.handle), len(self.layers))
        setattr(x, _EXCHANGED, (exchanged, num_left - 1) if num_left > 1 else None)
        return F.linear(exchanged, layer.weight, layer.bias)


class InputViews:
    """Replaces the `forward` of a module that contains layers with a common input, where recomputation is compiled.

    The module's code gets views of its arguments. These belong to the recomputed graph, so layers may keep state on
    them; on the arguments themselves they may not.
    """

    def __init__(self, module: nn.Module) -> None:
        self.inner: Forward = module.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.view_as(tensor), (args, kwargs))
        return self.inner(*args, **kwargs)


class ColumnLinear:
    """One layer of a `ColumnGroup`."""

    def __init__(self, group: ColumnGroup, number: int) -> None:
        self.group = group
        self.number = number

    def forward(self, input: Tensor) -> Tensor:
        return self.group.call(self.number, input)


class ColumnLayer:
    """Any other layer with a whole input: its own code on a shard of its weights."""

    def __init__(self, layer: nn.Module, axis: Axis, *, channels: Range | None = None, is_shown: bool = False) -> None:
        """`channels`: input channels of a grouped convolution's local groups. `is_shown`: as for `ColumnGroup`."""
        self.is_shown = is_shown
        self.layer = layer
        self.inner: Forward = layer.forward
        self.axis = axis
        self.channels = channels
        self.channel_dim = -1 - len(layer.kernel_size) if isinstance(layer, _ConvNd) else -1

    def forward(self, input: Tensor) -> Any:
        if self.axis.draws is not None and self.layer.training and not self.axis.splits_tokens:
            self.axis.draws.enter()
        x = self._begin(input)
        if self.channels is not None:
            start, stop = self.channels
            x = x.narrow(self.channel_dim, start, stop - start)
        return self.inner(x)

    def _begin(self, x: Tensor) -> Tensor:
        axis, is_compiling = self.axis, torch.compiler.is_compiling()
        if not axis.splits_tokens:
            return traced_spread(x, axis.handle) if is_compiling else spread(x, axis.group)
        if self.is_shown if is_compiling else axis.shows_all_tokens:
            return x  # the gather sums the gradients
        gathered: Tensor = traced_gather(x, axis.handle)
        return gathered


class RowLayer:
    """A layer that is given a shard of its inputs; its bias is added once, after the sum."""

    def __init__(self, layer: nn.Module, axis: Axis, *, is_linear: bool = False) -> None:
        """`is_linear`: it computes what `nn.Linear` does."""
        self.layer: Any = layer
        self.axis = axis
        self.inner: Forward = layer.forward
        self.is_linear = is_linear

    def forward(self, input: Tensor) -> Tensor:
        layer, axis = self.layer, self.axis
        is_compiling = torch.compiler.is_compiling()
        if axis.draws is not None and not is_compiling:
            axis.draws.leave()
        is_eager = not is_compiling and not axis.keeps_products
        if self.is_linear and is_eager:
            return row(input, axis.group, axis.splits_tokens, layer.weight, layer.bias)
        made: Tensor
        bias = getattr(layer, "bias", None)
        if self.is_linear and not is_compiling and not axis.splits_tokens:
            made = kept_row(input, layer.weight, axis.handle)
            return made if bias is None else made + bias
        if self.is_linear:
            made = F.linear(input, layer.weight)
        elif isinstance(layer, _ConvNd):
            made = layer._conv_forward(input, layer.weight, None)
            bias = None if bias is None else bias.view(-1, *(1 for _ in layer.kernel_size))
        elif is_transposed(layer):
            made = input @ layer.weight
        else:
            made, bias = self.inner(input), None
        if axis.splits_tokens:
            made = traced_scatter(made, axis.handle)
        else:
            made = add(made, axis.group) if is_eager else traced_add(made, axis.handle)
        return made if bias is None else made + bias


class EmbeddingRows:
    """An embedding of which a rank has some rows: tokens of others' give zeros here, and the results are summed."""

    def __init__(self, layer: nn.Embedding, group: Group, share: Share) -> None:
        self.inner: Forward = layer.forward
        self.group = group
        self.share = share

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, input: Tensor) -> Tensor:
        local, elsewhere = self.share.find(input)
        return add(self.inner(local).masked_fill_(elsewhere.unsqueeze(-1), 0.0), self.group)


@dataclass(slots=True)
class OutputMode:
    """Switch: the model's output stays sharded while a caller that expects shards calls it."""

    is_kept: bool = False

    def __deepcopy__(self, memo: object) -> OutputMode:
        return self


class WholeOutput:
    """The last layer, whose output is gathered unless its caller expects a shard."""

    def __init__(self, inner: Forward, share: Share, group: Group, mode: OutputMode) -> None:
        self.inner = inner
        self.share = share
        self.group = group
        self.mode = mode

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        output: Tensor = self.inner(*args, **kwargs)
        return output if self.mode.is_kept else gather_logits(output, self.share, self.group)
