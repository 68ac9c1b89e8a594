"""Sequence parallelism: each rank has some tokens of every sequence, and only attention mixes tokens of several ranks.

Everything else in a transformer treats a token by itself, so the model's own code runs unchanged on fewer tokens. It
needs two things: the global positions of its tokens (`Positions` of the blueprint), and the other ranks' keys and
values. For the latter, during a pass, `F.scaled_dot_product_attention` is replaced by attention over all ranks
(`parallel/attention/attention.py`). A model that mixes tokens in another way computes something else than in one
process, which the probe finds before the first step (`training/setup/probe.py`).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from weft.blueprint import Positions
from weft.comm.collectives import all_gather
from weft.errors import ModelError
from weft.mesh import Mesh
from weft.parallel.attention.attention import Pass, SequenceAxes, UnderWay, attend, attend_traced
from weft.parallel.sequence.device_assertion import DeviceAssertion
from weft.parallel.sequence.hugging_face import use_registry
from weft.parallel.sequence.positions import Numbered, Tables
from weft.parallel.wrapping.replacements import WHOLE_ATTENTION, Replacements, torch_attention
from weft.parallel.wrapping.wrap import add_hook
from weft.plan.model_refusals import ATTENTION_THAT_DROPS, CROSS_ATTENTION, MASKS_OF_ITS_OWN, TOKENS_OF_ITS_OWN
from weft.plan.partition.sequence import Band, Places, make_places
from weft.plan.partition.tensor import Range


class SequenceParallel:
    """A model of which each rank along ring and ulysses sees its own tokens only."""

    def __init__(self, model: nn.Module, mesh: Mesh, positions: Positions | None, axes: SequenceAxes) -> None:
        plan = mesh.plan
        self.axes = axes
        self._together = mesh.group("ring+ulysses", "masks")
        self.is_first = mesh.world.rank == 0
        self._under_way = UnderWay(self.axes)
        self.positions = positions
        self._layout = plan.sequence.layout
        self._multiple = plan.axes.tensor if plan.tensor.sequence else 1
        self._is_traced = plan.recompute.policy == "selective"
        self._tables = Tables(model, positions)
        self._mask_values_assertion = DeviceAssertion(
            "an attention mask has values other than 0 and -inf; give weft masks of padding only"
        )
        self._mask_heads_assertion = DeviceAssertion(
            "an attention mask differs between heads; give weft masks of padding only"
        )
        for name in positions.modules if positions is not None else ():
            hook = Numbered(name, lambda device: None if self.now is None else self.numbers(self.now.places, device))
            why = "gives it this rank's positions instead of 0 to T - 1"
            add_hook(model.get_submodule(name), "forward_pre", hook, by="sequence", why=why, with_kwargs=True)
        self._use_registry = use_registry(
            model, self.attend, now=lambda: self.now, numbers=lambda device: self.numbers(self._now.places, device)
        )
        attention = torch_attention(model, self.stand_in, why="attends over all ranks of the sequence")
        self.replacements = Replacements(*attention, find=self._use_registry, on_leave=self._leave)
        """Attention over all ranks; also in a backward pass, where blocks may be computed again."""

    @property
    def now(self) -> Pass | None:
        """The pass under way; in a backward pass, its forward pass."""
        return self._under_way.now

    @now.setter
    def now(self, now: Pass | None) -> None:
        self._under_way.now = now

    @property
    def is_known(self) -> bool:
        """True if this is a Hugging Face model, whose attention and positions are known."""
        return self._use_registry is not None

    def places(self, num_tokens: int) -> Places:
        """The distribution over ranks of the tokens of a sequence of this length."""
        return make_places(
            num_tokens,
            ring=self.axes.ring.size,
            ulysses=self.axes.ulysses.size,
            layout=self._layout,
            multiple=self._multiple,
        )

    def numbers(self, places: Places, device: torch.device) -> Tensor:
        """Global positions of this rank's tokens; padding has the last token's, which is valid in every model.

        They are made on the device: the host would wait for a copy of its own.
        """
        numbers = torch.cat([torch.arange(start, stop, device=device) for start, stop in self.ranges(places)])
        return numbers.clamp(max=places.num_tokens - 1)

    def ranges(self, places: Places) -> tuple[Range, ...]:
        """Ranges of this rank's tokens, in its order."""
        return places.ranges(self.axes.ring.index, self.axes.ulysses.index)

    def _leave(self) -> None:
        self.now = None
        self._tables.give_back()

    def enter(self, now: Pass) -> None:
        """Begin a pass, or the backward pass of an earlier one."""
        if self.now is None or self.now.places != now.places:
            self._tables.lend(lambda device: self.numbers(now.places, device))
        self.now = now

    @property
    def _now(self) -> Pass:
        assert self.now is not None, "attention outside of a pass"
        return self.now

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        is_causal: bool,
        scale: float | None,
        band: Band | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Attention of this rank's queries to the keys of all ranks."""
        scoring: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "band": band, "softcap": softcap}
        if torch.compiler.is_compiling():
            return attend_traced(query, key, value, self._under_way, **scoring)
        with _hidden():
            if key.shape[2] != query.shape[2]:
                raise ModelError(CROSS_ATTENTION.message(num_queries=query.shape[2], num_keys=key.shape[2]))
            if query.is_meta:  # the model is being traced: only shapes matter
                is_grouped = query.shape[1] != key.shape[1]
                return WHOLE_ATTENTION(query, key, value, is_causal=is_causal, enable_gqa=is_grouped)
            num_mine = self._now.places.tokens_per_rank
            if query.shape[2] != num_mine:
                raise ModelError(TOKENS_OF_ITS_OWN.message(num_tokens=query.shape[2], num_mine=num_mine))
            if self._is_traced:
                return attend_traced(query, key, value, self._under_way, **scoring)
            return attend(query, key, value, axes=self.axes, now=self._now, **scoring)

    def stand_in(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Replaces `F.scaled_dot_product_attention` during a pass."""
        del enable_gqa  # `attend` sees it by the number of heads
        if dropout_p > 0:
            raise ModelError(ATTENTION_THAT_DROPS.message(dropout=dropout_p))
        with _hidden():
            if query.dim() != 4:
                # Leading dims are independent of each other, so they may be heads of one sample.
                q, k, v = (one.reshape(1, -1, *one.shape[-2:]) for one in (query, key, value))
                mixed = self.stand_in(q, k, v, attn_mask, 0.0, is_causal, scale)
                return mixed.reshape(*query.shape[:-2], *mixed.shape[-2:])
            if attn_mask is not None and not query.is_meta:
                return self._attend_masked(query, key, value, attn_mask, is_causal=is_causal, scale=scale)
            return self.attend(query, key, value, is_causal=is_causal, scale=scale)

    def _attend_masked(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, is_causal: bool, scale: float | None
    ) -> Tensor:
        """Attention with a padding mask, which is the same for all queries of a sample."""
        num_samples, num_tokens = query.shape[0], query.shape[2]
        mine = None if torch.compiler.is_compiling() else self._padding(mask, num_samples, num_tokens)
        if mine is None:
            raise ModelError(MASKS_OF_ITS_OWN.message(shape=tuple(mask.shape), dtype=mask.dtype, num_tokens=num_tokens))
        before = self._now
        whole = self._join_mask(mine)
        if before.key_mask_BS is not None:
            whole = whole & before.key_mask_BS
        self.now = Pass(places=before.places, key_mask_BS=whole, documents_BS=before.documents_BS)
        try:
            return self.attend(query, key, value, is_causal=is_causal, scale=scale)
        finally:
            self.now = before

    def _padding(self, mask: Tensor, num_samples: int, num_tokens: int) -> Tensor | None:
        """(samples, tokens), True where keys may be seen, if the mask is the same for all queries and heads."""
        if mask.dim() != 4 or mask.shape[2:] != (1, num_tokens):
            return None
        if mask.is_floating_point():
            if not self._mask_values_assertion.holds(((mask == 0) | (mask == -torch.inf)).all(), mask.shape):
                return None
            mask = mask == 0
        if mask.shape[1] > 1 and not self._mask_heads_assertion.holds((mask == mask[:, :1]).all(), mask.shape):
            return None
        return mask[:, 0, 0].expand(num_samples, num_tokens)

    def _join_mask(self, mask_BT: Tensor) -> Tensor:
        """The mask of the whole sequence, gathered from all ranks."""
        places = self._now.places
        parts = mask_BT.new_empty(self._together.size, *mask_BT.shape)
        all_gather(parts.view(-1), mask_BT.contiguous().view(-1), self._together)
        whole = mask_BT.new_empty(mask_BT.shape[0], places.padded)
        for part, (ring, ulysses) in zip(parts, self._order, strict=True):
            first = 0
            for start, stop in places.ranges(ring, ulysses):
                whole[:, start:stop] = part[:, first : first + stop - start]
                first += stop - start
        return whole

    @property
    def _order(self) -> list[tuple[int, int]]:
        """(ring index, ulysses index) of every rank of both axes, in the order of their group."""
        ring, ulysses = self.axes.ring, self.axes.ulysses
        places = [(r, u) for r in range(ring.size) for u in range(ulysses.size)]
        if ring.size > 1 and ulysses.size > 1 and ring.ranks[1] - ring.ranks[0] < ulysses.ranks[1] - ulysses.ranks[0]:
            places = [(r, u) for u in range(ulysses.size) for r in range(ring.size)]
        return places

    def __deepcopy__(self, memo: object) -> SequenceParallel:
        return self


def _hidden() -> AbstractContextManager[object]:
    """Hides tensor operations from TorchFunctionModes that follow the model's own calls; a compiler has none."""
    return nullcontext() if torch.compiler.is_compiling() else torch._C.DisableTorchFunction()
