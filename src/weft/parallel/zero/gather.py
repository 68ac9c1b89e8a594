"""ZeRO-3's gather: a block's parameters are gathered just before it computes, and freed just after.

    forward    | gather 0 | block 0 | block 1 | block 2 |            backward   | block 2 | block 1 | block 0 |
               | gather 1 ~~~~~~~~~~|                                | gather 2 | gather 1 ~~~~~~~~~~~~~~~~~~~|
                          | gather 2 ~~~~~~~~~~|                                | gather 0 ~~~~~~~~~|

While a block computes, the next one is gathered. The root (what is outside blocks) is gathered when the model is called
and freed when the backward pass is over, because its backward starts at once. Gathers always go through *all* units in
one order, so that a rank which skips a block, or has no data at all, stays in step with the others.

Hooks run on the module's call, outside of what recomputation repeats and of what is compiled.

Large embeddings before the blocks and large linear layers after them are the first and the last unit, each gathered
once per microbatch. The embeddings' backward pass needs no weights; the last unit stays whole for its own, which comes
next. Other code than the layers themselves may use their weights (tied logits are often a product with the embedding's
weight), so uses are intercepted. A unit that other code uses is *held*: gathered at its usual place, but freed when
the backward pass is over. To know that in time, embeddings are kept through the first microbatch, in
which the optimizer has no moments yet.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.hooks import RemovableHandle

from weft.errors import ModelError
from weft.parallel.wrapping.wrap import add_hook
from weft.parallel.zero.flat_parameters import FlatParameters
from weft.parallel.zero.intercepted_parameter import intercepting_class
from weft.parallel.zero.unit import Unit
from weft.plan.model_refusals import HIDDEN_OUTPUTS

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.Size, torch.dtype, torch.device, torch.layout)
"""Types that a block may return besides tensors."""


class ParameterGathering:
    """Gathers and frees units; `Gathering` by hooks on the model, `StageGathering` as a schedule says."""

    def __init__(self, root: Unit, blocks: Sequence[Unit]) -> None:
        """`root` holds what is in no other unit."""
        self._root = root
        self._blocks = tuple(blocks)
        self.is_last = False
        """The microbatch is the step's last one."""

    def begin_step(self) -> None:
        """Free everything; no microbatch is the last one yet."""
        self.is_last = False
        self._free_all()

    def _free_all(self) -> None:
        self._root.free()
        for block in self._blocks:
            block.free()

    def end_microbatch(self) -> None:
        """A backward pass is over."""

    def skip_microbatch(self) -> None:
        """Take part in the exchanges of a microbatch without computing anything."""


class Gathering(ParameterGathering):
    """Hooks on a model that gather and free its units in time."""

    def __init__(
        self, root: Unit, blocks: Sequence[Unit], close: Callable[[Sequence[FlatParameters]], None], *, stay_whole: bool
    ) -> None:
        """`blocks` with the units before and after them. `close` is told when no more gradients will come for some
        parameters in a backward pass; `stay_whole`: units stay from a step's first forward to its last backward."""
        super().__init__(root, blocks)
        self._stay_whole = stay_whole
        self._close = close
        # What happens in the two passes, until a microbatch shows that it is something else: i, block i begins to be
        # gathered; ~i, its backward pass is over.
        self._forward_order = list(range(len(self._blocks)))
        self._backward_order = [] if stay_whole else _usual_backward(self._blocks)
        self._held = [False] * len(self._blocks)
        self._is_first_microbatch = True
        """No microbatch has ended that showed which other code uses the layers outside of blocks."""
        self._log: list[int] = []
        self._with_grad = False
        self._handles: list[RemovableHandle] = []
        self.begin_step()
        (model,) = root.modules
        why = "gathers parameters outside of blocks, and begins to gather the first block's"
        add_hook(model, "forward_pre", _uncompiled(self._start_forward), by="zero", why=why, prepend=True)
        why = "frees gathered parameters until the backward pass"
        add_hook(model, "forward", _uncompiled(self._end_forward), by="zero", why=why)
        for index, block in enumerate(self._blocks):
            if block.place != "block":
                block.intercepting_class = intercepting_class(functools.partial(self._before_use, index))
                block.intercept()
            before, after = _uncompiled(self._make_before(index)), _uncompiled(self._make_after(index))
            for module in block.modules:
                why = "waits for its gathered parameters, and begins to gather the next block's"
                add_hook(module, "forward_pre", before, by="zero", why=why, with_kwargs=True, prepend=True)
                why = "frees its gathered parameters until the backward pass"
                add_hook(module, "forward", after, by="zero", why=why)

    def end_microbatch(self) -> None:
        """Gather and free what the backward pass left out, so that all ranks keep step."""
        if self._is_gathering_backward:
            for index in range(self._next_backward, -1, -1):
                self._advance_backward(index)
            self._backward_order, self._log = self._log, []
        self._is_first_microbatch = self._is_first_microbatch and not self._is_forward_over
        if not self._stay_whole or self.is_last:
            self._free_all()

    def skip_microbatch(self) -> None:
        """Repeat the gathers that the last microbatch here made, without computing anything.

        Reductions too start where they did: a rank that waits for a reduction would not take part in the next gather.
        """
        self._with_grad = torch.is_grad_enabled()
        self._root.start_gather()
        self._root.wait()
        for index in self._forward_order + (self._backward_order if self._with_grad else []):
            if index < 0:
                self._close(self._blocks[~index].flats)
                continue
            self._start(index)
            self._blocks[index].wait()
            if not self._stays:
                self._blocks[index].free()
        self._log.clear()
        if not self._with_grad:
            self._root.free()

    @property
    def _stays(self) -> bool:
        return self._stay_whole and self._with_grad

    def _start(self, index: int) -> None:
        if not self._blocks[index].is_whole:
            self._log.append(index)
            self._blocks[index].start_gather()

    def _free_all(self) -> None:
        self._log = []
        self._next_forward, self._next_backward = 0, -1
        self._called = [False] * len(self._blocks)
        self._is_gathering_backward = self._is_forward_over = self._in_passes = False
        self._is_forward_done = [False] * len(self._blocks)
        self._in_backward = [False] * len(self._blocks)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._num_open = [0] * len(self._blocks)  # calls of each block whose backward pass is still to come
        super()._free_all()

    def _start_forward(self, *_: object) -> None:
        # Asked once: inside, a block may run without gradients, in a checkpoint of the user's own for one.
        self._with_grad, self._is_forward_over, self._in_passes = torch.is_grad_enabled(), False, True
        self._next_forward = 0
        self._root.start_gather()
        self._log = []
        self._called = [False] * len(self._blocks)
        if self._blocks:
            self._start(0)
            self._next_forward = 1
        self._root.wait()

    def _end_forward(self, *_: object) -> None:
        self._advance_forward(len(self._blocks) - 1)
        self._is_forward_over = True
        if self._log:  # empty where everything stayed whole
            self._forward_order, self._log = self._log, []
        if self._stays:
            return
        for index in range(len(self._blocks)):
            self._release_after_forward(index)
        if self._with_grad:
            self._is_gathering_backward = True
            self._next_backward = len(self._blocks) - 1
        else:
            self._in_passes = False
            super()._free_all()

    def _advance_forward(self, index: int) -> None:
        """Start to gather blocks up to this one and, for later, the next one; free those passed by."""
        for passed in range(min(self._next_forward, index)):
            self._release_after_forward(passed)
        while self._next_forward < len(self._blocks) and self._next_forward <= index + 1:
            self._start(self._next_forward)
            if self._next_forward < index:  # skipped here: only the others need it
                self._release_after_forward(self._next_forward)
            self._next_forward += 1

    def _release_after_forward(self, index: int) -> None:
        """Free a unit that the forward pass no longer needs, unless something else does."""
        if self._stays or self._in_backward[index] or self._held[index]:
            return
        block = self._blocks[index]
        if block.place == "before" and self._is_first_microbatch:
            self._is_forward_done[index] = True
        elif block.place != "after" or not self._with_grad:
            block.free()

    def _before_use(self, index: int) -> bool:
        """Gather a unit that code other than its own layers uses. False between passes, where it stays freed."""
        if not self._in_passes:
            return False
        self._held[index] = True
        if not self._blocks[index].is_whole:
            self._reach(index)
        self._blocks[index].wait()
        return True

    def _reach(self, index: int) -> None:
        """Gather a unit that is used now, and those whose turn is before it."""
        self._called[index] = True
        if not self._is_forward_over:
            self._advance_forward(index)
        elif self._is_gathering_backward:  # a checkpoint of the user's own computes the block again
            self._reach_backward(index)
        self._start(index)  # a block that is called a second time has been freed already
        self._blocks[index].wait()

    def _reach_backward(self, index: int) -> None:
        """Start to gather blocks from the last one down to this one, in the one order."""
        while self._next_backward >= max(index, 0):
            if self._blocks[self._next_backward].place != "before":
                self._start(self._next_backward)
            self._next_backward -= 1

    def _advance_backward(self, index: int) -> None:
        """Start to gather blocks down to this one and, for later, the one before it; free those passed by one by one,
        and close them if they were skipped: the others' reductions wait for this rank's."""
        for passed in reversed(range(index + 1, len(self._blocks))):
            self._reach_backward(passed)
            if self._held[passed]:
                continue
            if not self._in_backward[passed]:
                self._blocks[passed].free()
            if not self._called[passed]:  # no gradient will come
                self._called[passed] = True
                self._finish_block(passed)
        self._reach_backward(index - 1)

    def _make_before(self, index: int) -> Callable[..., tuple[Any, Any]]:
        def before_forward(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
            del module
            self._held[index] = self._held[index] or self._is_forward_done[index]
            self._reach(index)
            if self._blocks[index].place == "before":
                return args, kwargs
            return self._watch_inputs(index, args, kwargs)

        return before_forward

    def _make_after(self, index: int) -> Callable[..., None]:
        def before_backward(gradient: torch.Tensor) -> None:
            del gradient
            if not self._in_backward[index]:
                self._in_backward[index] = True
                if self._is_gathering_backward:
                    self._advance_backward(index)
                self._start(index)
            self._blocks[index].wait()

        def after_forward(module: nn.Module, args: Any, output: Any) -> None:
            del args
            block = self._blocks[index]
            if self._in_backward[index]:
                return
            if not self._held[index]:
                block.intercept()
            if block.place == "before":  # others of the unit may come, and the next one's turn frees it
                return
            if torch.is_grad_enabled():
                for tensor in _outputs_of(output, module):
                    tensor.register_hook(before_backward)
            if not self._is_forward_over:  # computed again, it stays for its backward pass
                self._release_after_forward(index)

        return after_forward

    def _watch_inputs(self, index: int, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Hook the gradients of a block's inputs: when they are complete, its backward pass is over."""
        # Computed again, a call counts only if it did not the first time: without gradients, in a reentrant checkpoint.
        is_counted = self._is_forward_over and self._num_open[index] > 0
        if not torch.is_grad_enabled() or is_counted or self._in_backward[index]:
            return args, kwargs
        self._num_open[index] += 1  # also of a call that cannot be watched: then the block stays open to the end
        tensors = _differentiable((args, kwargs))
        if not tensors:
            return args, kwargs
        # Views, because a block may change its input in place, and the hook belongs to this call only.
        views = [tensor.view_as(tensor) for tensor in tensors]
        number = len(self._handles)
        hook = functools.partial(self._after_backward, index, number)
        self._handles.append(register_multi_grad_hook(views, hook, mode="all"))
        passed = iter(views)
        watched: tuple[Any, Any] = tree_map_only(
            torch.Tensor, lambda tensor: next(passed) if tensor.requires_grad else tensor, (args, kwargs)
        )
        return watched

    def _after_backward(self, index: int, number: int, gradients: object) -> None:
        del gradients
        self._handles[number].remove()  # the hook holds the graph that holds it: nothing else breaks the circle
        self._num_open[index] -= 1
        if self._num_open[index]:
            return
        self._in_backward[index] = False
        if self._held[index]:
            return
        if not self._stay_whole or self.is_last:
            self._blocks[index].free()
        self._finish_block(index)

    def _finish_block(self, index: int) -> None:
        self._log.append(~index)
        self._close(self._blocks[index].flats)


def _usual_backward(units: Sequence[Unit]) -> list[int]:
    """From the last unit to the first, each gathered while the one after it computes: 2, 1, ~2, 0, ~1, ~0.

    Of those outside blocks, the last is whole already, and the first needs no weights.
    """
    order = [len(units) - 1] if units and units[-1].place == "block" else []
    for index in reversed(range(len(units))):
        order += [index - 1] if index and units[index - 1].place == "block" else []
        order += [~index] if units[index].place != "before" else []
    return order


def _differentiable(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def _outputs_of(output: Any, module: nn.Module) -> list[torch.Tensor]:
    """The tensors at which a backward pass may enter. Missing one would mean using parameters that were freed."""
    found: list[torch.Tensor] = []
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            found += [leaf] if leaf.requires_grad else []
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            found += _outputs_of([getattr(leaf, field.name) for field in dataclasses.fields(leaf)], module)
        elif not isinstance(leaf, _PLAIN):
            raise ModelError(
                HIDDEN_OUTPUTS.message(
                    block=f"a block ({type(module).__name__})",
                    kind=type(leaf).__name__,
                    asked='[data] shard = "parameters"',
                    instead="tuples, lists, dicts or dataclasses",
                )
            )
    return found


def _uncompiled(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook that is not compiled into the graph of a model that is compiled as a whole."""
    return torch.compiler.disable(hook) if "torch._dynamo" in sys.modules else hook
