"""Megatron's sequence parallelism: between the regions that the tensor axis shards, activations are split by tokens.

    split ─ norm ─[gather ─ attention ─ scatter]─ dropout, add ─ norm ─[gather ─ MLP ─ scatter]─ dropout, add ─ ... join

Code outside the brackets treats every token by itself, so each rank runs it on its own tokens only and keeps only their
activations. Gathers and reduce-scatters replace all-reduces and move as many bytes. Activations are split before the
first block of a stage and joined after its last.

Attention that no region shards (norms over all heads, as in OLMo 2; one key head of multi-query Falcon) mixes tokens as
well. It runs whole on every rank, on all tokens, and each rank keeps its own of the result: exact, but each rank does
all of its work.

A sequence whose length does not divide is left whole in evaluation, which costs only memory, and refused in training.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from weft.comm.group import Group
from weft.errors import DataError, ModelError
from weft.parallel.state.rng import ShareDraws
from weft.parallel.tensor.functions import TOKEN_DIM, join_tokens, split_tokens
from weft.parallel.tensor.operators import traced_gather
from weft.parallel.tracing.handles import handle_of
from weft.parallel.wrapping.wrap import wrap_forward


class TokenSplit:
    """State of the latest pass: are activations between regions split by tokens, and which modules see all tokens."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._handle = handle_of(group)
        self.draws: ShareDraws | None = None
        """None: nothing is random."""
        self.is_split = False
        """Stays set after the last block, for blocks may be recomputed in the backward pass."""
        self._local: Tensor | None = None
        self._shown: Tensor | None = None
        self._num_local = 0
        """Tokens of this rank."""

    def split(self, block: str, arguments: tuple[Any, Any], *, is_training: bool) -> tuple[Any, Any]:
        """The arguments of the first block, with this rank's tokens of the activations."""
        leaves, tree = tree_flatten(arguments)
        place = _activations(leaves)
        if place is None:
            raise ModelError(
                f'[tensor] sequence = true splits what block "{block}" is given along its tokens, and among its '
                "arguments is no floating-point tensor of three dims (samples, tokens, features); set sequence "
                "= false"
            )
        num_tokens, size = leaves[place].shape[TOKEN_DIM], self.group.size
        self.is_split = num_tokens % size == 0
        if not self.is_split:
            if is_training or torch.is_grad_enabled():
                below, above = num_tokens // size * size, -(-num_tokens // size) * size
                raise DataError(
                    f"[tensor] sequence = true cannot split {num_tokens} tokens over [axes] tensor = {size}; use "
                    f"sequences of {f'{below} or {above}' if below else above} tokens"
                )
            return arguments
        self._num_local = num_tokens // size
        leaves[place] = split_tokens(leaves[place], self.group)
        if self.draws is not None and is_training:
            self.draws.split_tokens()
        split: tuple[Any, Any] = tree_unflatten(leaves, tree)
        return split

    def join(self, output: Any) -> Any:
        """The output of the last block, with all tokens."""
        if not self.is_split:
            return output
        leaves, tree = tree_flatten(output)
        place = _activations(leaves)
        assert place is not None, "a block that is given activations returns none"
        leaves[place] = join_tokens(leaves[place], self.group, False)
        if self.draws is not None:
            self.draws.join_tokens()
        return tree_unflatten(leaves, tree)

    def show(self, arguments: tuple[Any, Any]) -> tuple[Any, Any]:
        """The arguments of a module that contains a region, with all tokens of the activations."""
        if not self.is_split:
            return arguments
        leaves, tree = tree_flatten(arguments)
        place = _activations(leaves)
        if place is None:
            return arguments
        if torch.compiler.is_compiling():
            leaves[place] = traced_gather(leaves[place], self._handle)
        else:
            self._local = leaves[place]
            leaves[place] = self._shown = join_tokens(self._local, self.group, True)
        shown: tuple[Any, Any] = tree_unflatten(leaves, tree)
        return shown

    def gather(self, arguments: tuple[Any, Any]) -> tuple[Any, Any]:
        """The arguments of a module that mixes tokens and runs whole, with all tokens of all activations."""
        leaves, tree = tree_flatten(arguments)
        for place, leaf in enumerate(leaves):
            if _has_tokens(leaf, self._num_local):
                is_traced = torch.compiler.is_compiling()
                leaves[place] = traced_gather(leaf, self._handle) if is_traced else join_tokens(leaf, self.group, True)
        if self.draws is not None:
            self.draws.join_tokens()
        gathered: tuple[Any, Any] = tree_unflatten(leaves, tree)
        return gathered

    def keep_own(self, output: Any, *, is_training: bool) -> Any:
        """The output of such a module, with this rank's tokens: only they have gradients here, which ranks add up."""
        if self.draws is not None and is_training:
            self.draws.split_tokens()
        start, num_all = self.group.index * self._num_local, self.group.size * self._num_local
        leaves, tree = tree_flatten(output)
        own = [
            leaf.narrow(TOKEN_DIM, start, self._num_local) if _has_tokens(leaf, num_all) else leaf for leaf in leaves
        ]
        return tree_unflatten(own, tree)

    def local_of(self, x: Tensor) -> Tensor | None:
        """This rank's tokens of x, if x is the tensor that `show` made."""
        return self._local if x is self._shown else None

    @property
    def is_showing(self) -> bool:
        """True while a module runs whose arguments `show` completed."""
        return self._shown is not None

    def forget(self) -> None:
        """End the module that `show` began."""
        self._local = self._shown = None

    def __deepcopy__(self, memo: object) -> TokenSplit:
        return self


class Edge:
    """Replaces the `forward` of the first or last block of a stage."""

    def __init__(self, name: str, block: nn.Module, tokens: TokenSplit, *, is_first: bool, is_last: bool) -> None:
        self.name = name
        self.block = block
        self.inner: Callable[..., Any] = block.forward
        self.tokens = tokens
        self.is_first = is_first
        self.is_last = is_last

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_first:
            args, kwargs = self.tokens.split(self.name, (args, kwargs), is_training=self.block.training)
        output = self.inner(*args, **kwargs)
        return self.tokens.join(output) if self.is_last else output


class Shown:
    """Replaces the `forward` of a module that contains one region: its code sees all tokens, as in one process.

    Code that makes views takes their sizes from its arguments, not from the outputs of its layers. Column layers that
    are given the very same tensor keep this rank's tokens of it only; a norm before them runs on all tokens.
    """

    def __init__(self, module: nn.Module, tokens: TokenSplit) -> None:
        self.inner: Callable[..., Any] = module.forward
        self.tokens = tokens

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self.tokens.show((args, kwargs))
        output = self.inner(*args, **kwargs)
        if not torch.compiler.is_compiling():
            self.tokens.forget()
        return output


class WholeAttention:
    """Replaces the `forward` of a module that mixes tokens and that no region shards."""

    def __init__(self, module: nn.Module, tokens: TokenSplit) -> None:
        self.module = module
        self.inner: Callable[..., Any] = module.forward
        self.tokens = tokens

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.tokens.is_split:
            return self.inner(*args, **kwargs)
        args, kwargs = self.tokens.gather((args, kwargs))
        return self.tokens.keep_own(self.inner(*args, **kwargs), is_training=self.module.training)


def innermost_attention(model: nn.Module, holder: str, layer: str) -> str:
    """The innermost attention in a module that contains a layer; the module itself if there is none.

    The outer one of two (BERT) adds a residual, of which it should have this rank's tokens.
    """
    path = layer
    while (path := path.rpartition(".")[0]) != holder:
        if _is_attention(model.get_submodule(path)):
            return path
    return holder


def _is_attention(module: nn.Module) -> bool:
    """Found by the name of its class. A mixture of tokens that has another name is refused by the probe."""
    return "attention" in type(module).__name__.lower()


def gather_for_attention(model: nn.Module, blocks: Sequence[str], sharded: Collection[str], tokens: TokenSplit) -> None:
    """Let attention in blocks that has no layer among the sharded ones see all tokens."""
    for block in blocks:
        outermost: list[str] = []
        for path, module in model.get_submodule(block).named_modules(prefix=block):
            if path == block or not _is_attention(module) or any(path.startswith(f"{outer}.") for outer in outermost):
                continue
            outermost.append(path)
            if any(name.startswith(f"{path}.") for name in sharded):
                continue
            why = "runs on all tokens, because it mixes them and no rank has a share of it; keeps this rank's"
            wrap_forward(module, WholeAttention(module, tokens).forward, by="tensor", why=why)


def split_between(
    model: nn.Module, blocks: Sequence[str], tokens: TokenSplit, stage_of: Mapping[str, int] | None = None
) -> None:
    """Split the activations between the blocks of each stage, or of the whole model."""
    stages = [0 if stage_of is None else stage_of[name] for name in blocks]
    names = {id(model.get_submodule(name)) for name in blocks}
    alone = len(names) < len(blocks)  # a block that is used twice begins and ends by itself
    for number, name in enumerate(blocks):
        block = model.get_submodule(name)
        is_first = alone or number == 0 or stages[number - 1] != stages[number]
        is_last = alone or number == len(blocks) - 1 or stages[number + 1] != stages[number]
        if (is_first or is_last) and not isinstance(getattr(block, "forward", None), Edge):
            edge = Edge(name, block, tokens, is_first=is_first, is_last=is_last)
            wrap_forward(
                block, edge, by="tensor", why="splits tokens before the first block, joins them after the last"
            )


def _has_tokens(leaf: object, num_tokens: int) -> bool:
    """True for activations (samples, tokens, features) of so many tokens."""
    return (
        isinstance(leaf, Tensor)
        and leaf.dim() == 3
        and leaf.is_floating_point()
        and leaf.shape[TOKEN_DIM] == num_tokens
    )


def _activations(leaves: Sequence[object]) -> int | None:
    """The index of the activations among a block's arguments or results: one with a gradient, else the largest."""
    best: int | None = None
    rank = (False, -1)
    for place, leaf in enumerate(leaves):  # a loop, because compilers know no `max` with a key
        if isinstance(leaf, Tensor) and leaf.dim() == 3 and leaf.is_floating_point():
            here = (leaf.requires_grad, leaf.numel())
            if here > rank:
                best, rank = place, here
    return best
