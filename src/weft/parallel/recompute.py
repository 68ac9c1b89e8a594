"""Activation recomputation: a block keeps less in the forward pass and computes it again in the backward pass.

    full        nothing but the block's inputs is kept; the block runs once more in the backward pass
    selective   results of matrix products and convolutions with weights are kept too; attention, norms, activation
                functions, dropout and rotations, which are wide or cheap, are computed again

torch's checkpoint recomputes; this file makes it exact: random states are restored (also where tensors are given by
keyword, which torch overlooks on a GPU), running statistics of BatchNorm are updated once, and a block whose second run
would not repeat the first is refused. The block's `forward` is wrapped, so that hooks on the block stay outside and
never run in the recomputation.

Collectives inside a block run again in the backward pass, in the same order on every rank: synchronised BatchNorm
gathers its statistics twice.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from copy import copy
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from weft.blueprint import Blueprint
from weft.errors import ModelError
from weft.parallel.attention import attention  # noqa: F401  (it makes the operator)
from weft.parallel.tensor.operators import KEPT_OPERATORS
from weft.parallel.wrapping.host_random import HostRandom
from weft.parallel.wrapping.wrap import add_hook, wrap_forward
from weft.plan.model_refusals import BLOCKS_NEEDED, BUFFERS_RECOMPUTED, HOST_DRAWS_RECOMPUTED, PRODUCTS_OVERWRITTEN

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

_KEPT = {"full": "its inputs", "selective": "its inputs and products with weights"}

# Products with weights, their sums over ranks, and attention over ranks. Batched products are left out: those are
# attention scores, quadratic in the tokens.
KEPT_PRODUCTS = KEPT_OPERATORS | frozenset(
    {
        torch.ops.weft.attention.default,
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.linear.default,
        torch.ops.aten.convolution.default,
        torch.ops.aten._scaled_mm.default,
        torch.ops.aten._grouped_mm.default,
    }
)


def recompute_blocks(model: nn.Module, blueprint: Blueprint, policy: str) -> None:
    """Wrap the forward of each block, in place, so that it recomputes as the policy says: "selective" or "full"."""
    blocks = find_blocks(model, blueprint, asked=f'[recompute] policy = "{policy}"', instead='policy = "none"')
    for name, block in blocks.items():
        recomputed = RecomputedBlock(block, name, selective=policy == "selective")
        why = f"keeps {_KEPT[policy]}, and computes the rest again in the backward pass"
        wrap_forward(block, recomputed.forward, by="recompute", why=why)
        _BufferGuard(block, name)


def find_blocks(model: nn.Module, blueprint: Blueprint, *, asked: str, instead: str) -> dict[str, nn.Module]:
    """The blocks of a model by name, a block that is used twice under its first name; none are refused."""
    if not blueprint.blocks:
        raise ModelError(BLOCKS_NEEDED.message(asked=asked, instead=instead))
    names = {model.get_submodule(name): name for name in reversed(blueprint.blocks)}
    return {name: block for block, name in reversed(names.items())}


class RecomputedBlock:
    """Wraps a block's forward. Not a closure, so that a copy of the model runs the copy's blocks."""

    def __init__(self, block: nn.Module, name: str, *, selective: bool) -> None:
        self.block = block
        self.name = name
        self.inner: Callable[..., Any] = block.forward
        self.selective = selective
        self.norms = [module for module in block.modules() if isinstance(module, _NormBase) and module._buffers]
        self.is_new = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not (self.block.training and torch.is_grad_enabled()):
            return self.inner(*args, **kwargs)
        if torch.compiler.is_compiling() or not self.is_new:
            return self._checkpointed(args, kwargs)
        self.is_new, host = False, HostRandom()
        with host.kept():
            output = self._checkpointed(args, kwargs)
        if host.is_used:  # torch restores its own random states only
            raise ModelError(HOST_DRAWS_RECOMPUTED.message(name=self.name))
        return output

    def _checkpointed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # By position: torch looks there for the devices whose random state it keeps.
        return checkpoint(
            self._run,
            tuple(kwargs),
            *args,
            *kwargs.values(),
            use_reentrant=False,
            preserve_rng_state=True,
            **self._contexts(),
        )

    def _run(self, names: tuple[str, ...], *values: Any) -> Any:
        num_args = len(values) - len(names)
        return self.inner(*values[:num_args], **dict(zip(names, values[num_args:], strict=True)))

    def _contexts(self) -> dict[str, Any]:
        """torch's argument for contexts around both forwards; the compiler takes none that does nothing."""
        if torch.compiler.is_compiling():
            # A graph has no side effects and nothing in place, and the second run is cut out of it.
            return {"context_fn": selective_contexts} if self.selective else {}
        return {"context_fn": self._eager_contexts}

    def _eager_contexts(self) -> Contexts:
        first, second = selective_contexts() if self.selective else noop_context_fn()
        return first, _SecondRun(self.name, self.norms, second)


class _SecondRun:
    """Context of a recomputation, in which norms update copies of their running statistics.

    In training their outputs do not depend on those, so the second run repeats the first. Results that the selective
    policy kept are restored if the backward pass keeps its graph and so may run again
    (`parallel/pipeline/split_backward.py`).
    """

    def __init__(self, name: str, norms: list[_NormBase], inside: AbstractContextManager[Any]) -> None:
        self.name = name
        self.norms = norms
        self.inside = inside
        self.originals: list[dict[str, torch.Tensor | None]] = []
        self.kept: dict[Any, Any] = {}

    def __enter__(self) -> None:
        if torch._C._autograd._get_current_graph_task_keep_graph():
            self.kept = {key: copy(entries) for key, entries in self._storage().items()}
        self.originals = [dict(norm._buffers) for norm in self.norms]
        for norm in self.norms:
            for name, buffer in norm._buffers.items():
                norm._buffers[name] = None if buffer is None else buffer.clone()
        self.inside.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        for norm, buffers in zip(self.norms, self.originals, strict=True):
            norm._buffers.update(buffers)
        handled = self.inside.__exit__(kind, error, trace)
        self._storage().update(self.kept)
        self.kept = {}
        if isinstance(error, RuntimeError) and "selective activation checkpoint has been mutated" in str(error):
            raise ModelError(PRODUCTS_OVERWRITTEN.message(name=self.name)) from error
        return handled

    def _storage(self) -> dict[Any, Any]:
        """Results that torch keeps for the selective policy, by operator."""
        storage: dict[Any, Any] = getattr(self.inside, "storage", {})
        return storage


class _BufferGuard:
    """Refuses a block that changes a buffer when it runs: a second run would silently start from the changed one.

    Norms are exempt, because they update copies. Hooks on the block also see the changes of a compiled forward.
    """

    def __init__(self, block: nn.Module, name: str) -> None:
        self.name = name
        self.modules = [module for module in block.modules() if not isinstance(module, _NormBase) and module._buffers]
        self.before: list[tuple[nn.Module, str, torch.Tensor, int]] = []
        if self.modules:
            why = "refuses a forward that changes a buffer"
            add_hook(block, "forward_pre", self._remember, by="recompute", why=why)
            add_hook(block, "forward", self._compare, by="recompute", why=why)

    def _remember(self, block: nn.Module, _: object) -> None:
        self.before = [
            (module, name, buffer, buffer._version)
            for module in self.modules
            for name, buffer in module._buffers.items()
            if buffer is not None and block.training and torch.is_grad_enabled()
        ]

    def _compare(self, *_: object) -> None:
        changed = [
            BUFFERS_RECOMPUTED.message(buffer=f"{type(module).__name__}.{name}", block=self.name)
            for module, name, buffer, version in self.before
            if module._buffers[name] is not buffer or buffer._version != version
        ]
        self.before = []
        if changed:
            raise ModelError(changed)


def selective_contexts() -> Contexts:
    """New contexts of one forward and its recomputation, by which products are kept."""
    contexts: Contexts = create_selective_checkpoint_contexts(_keep_products)
    return contexts


def _keep_products(_: object, operator: Any, *__: object, **___: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in KEPT_PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE
