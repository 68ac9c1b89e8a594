"""Records what each segment of a model saves, receives and needs at its peak, in one training step.

Segments are entered by hooks on the blocks in the forward pass, and by hooks on the gradients of the blocks' outputs in
the backward pass. Holding a tensor is an event; which events count is decided at the end, for each recompute policy, so
that one step serves all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from weft.measure.liveness import LiveBytes
from weft.parallel.recompute import KEPT_PRODUCTS
from weft.parallel.wrapping.wrap import add_hook

SIZES = ("saved", "selective", "inputs", "forward_peak", "backward_peak")
"""Names of the recorded sizes, as in `profiles.model.Segment`."""


@dataclass(frozen=True, slots=True)
class _Event:
    """A segment holds a storage from now on: saved, as a block's input, or as a matrix product."""

    kind: str
    segment: int
    storage: int
    num_bytes: int


class Recorder:
    """The present segment of the step, and the storages of each. Segment 0 is the prelude, the last the postlude.

    Computation between two blocks counts as the first one's.
    """

    def __init__(self, blocks: Sequence[nn.Module], *, others: Sequence[torch.Tensor]) -> None:
        """Puts hooks on the blocks. `others` are tensors that do not count: parameters, buffers, the batch."""
        self.live = LiveBytes(others=others, made=self._made)
        self._num_blocks = len(blocks)
        self._segment, self._phase = 0, "forward"
        self._events: list[_Event] = []
        self._peaks = {phase: [0] * (len(blocks) + 2) for phase in ("forward", "backward")}
        for number, block in enumerate(blocks):
            self._attach(block, number)

    def enter_postlude(self) -> None:
        self._enter("forward", self._num_blocks + 1)

    def enter_backward(self) -> None:
        self.live.accumulating = True
        self._enter("backward", self._num_blocks + 1)

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        self._note("save", tensor)
        return tensor

    def sizes(self) -> dict[str, list[int]]:
        """Bytes of each segment, by the names of `Segment`'s sizes."""
        self._enter(self._phase, self._segment)
        ends = (0, self._num_blocks + 1)
        saved = self._held(lambda event: event.kind == "save")
        inputs = self._held(lambda event: event.kind == "input" or event.kind == "save" and event.segment in ends)
        selective = self._held(lambda event: event.kind != "save" or event.segment in ends)
        before = [sum(saved[:number]) for number in range(len(saved) + 1)]
        return {
            "saved": saved,
            "selective": selective,
            "inputs": inputs,
            "forward_peak": [max(peak - before[at], 0) for at, peak in enumerate(self._peaks["forward"])],
            "backward_peak": [max(peak - before[at + 1], 0) for at, peak in enumerate(self._peaks["backward"])],
        }

    def _attach(self, block: nn.Module, number: int) -> None:
        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._enter("forward", number + 1)
            for tensor in _tensors((args, kwargs)):
                self._note("input", tensor)
                if number == 0:
                    self._on_gradient(tensor, 0)

        def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            for tensor in _tensors(output):
                self._on_gradient(tensor, number + 1)
            if number == self._num_blocks - 1:
                self.enter_postlude()

        add_hook(block, "forward_pre", before, by="measure", why="begins its segment", with_kwargs=True)
        add_hook(block, "forward", after, by="measure", why="ends its segment")

    def _held(self, counts: Callable[[_Event], bool]) -> list[int]:
        """Bytes of each segment, every storage counted for the first event that counts."""
        held, seen = [0] * (self._num_blocks + 2), set()
        for event in self._events:
            if counts(event) and event.storage not in seen:
                seen.add(event.storage)
                held[event.segment] += event.num_bytes
        return held

    def _enter(self, phase: str, segment: int) -> None:
        peaks = self._peaks[self._phase]
        peaks[self._segment] = max(peaks[self._segment], self.live.peak_bytes)
        self.live.restart_peak()
        self._phase, self._segment = phase, segment

    def _on_gradient(self, tensor: torch.Tensor, segment: int) -> None:
        """Enter the segment that made this tensor when its gradient is computed."""
        if tensor.requires_grad:
            tensor.register_hook(lambda _: self._enter("backward", segment))

    def _made(self, operator: Any, tensor: torch.Tensor) -> None:
        if self._phase == "forward" and operator in KEPT_PRODUCTS and 0 < self._segment <= self._num_blocks:
            self._note("product", tensor)

    def _note(self, kind: str, tensor: torch.Tensor) -> None:
        if (storage := self.live.number_of(tensor)) is not None:
            self._events.append(_Event(kind, self._segment, storage, tensor.untyped_storage().nbytes()))


def _tensors(tree: Any) -> list[torch.Tensor]:
    """Tensors of anything a module takes or returns, Hugging Face's outputs included."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
