"""Attention over all ranks for Hugging Face models, through the registries in which they look attention up.

Their models name their attention in their configuration, look it up in one registry and its mask function in another.
During a pass both contain an entry of ours, which the configuration names; between passes nothing of it is left, and
generation or evaluation of whole sequences works as usual. transformers is not imported here.

No mask of the local tokens is made: `attend` knows causality, padding and documents of the whole sequence. In place of
the mask of a window the model passes on its numbers (`Band`), so that each layer has its own. Whatever else would
affect attention (chunks, dropout, sinks, biases, caches, the user's masks) is refused, never ignored.
Their detection of packed documents would be misled by the position_ids of some of the tokens: it is replaced meanwhile,
and applied to the whole sequence instead (`models/hugging_face_inputs.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from weft.errors import ModelError
from weft.models.hugging_face_inputs import (
    by_name,
    hugging_face_class,
    makes_own_positions,
    outermost_models,
    without_cache,
)
from weft.parallel.attention.attention import Pass
from weft.parallel.sequence.device_assertion import DeviceAssertion
from weft.parallel.sequence.hugging_face_models import (
    REMEDY,
    find_band,
    is_plain,
    longest_rotation,
    model_problems,
    uses_registry,
)
from weft.parallel.wrapping.replacements import Replacement, hugging_face_attention
from weft.parallel.wrapping.wrap import add_hook
from weft.plan.partition.sequence import Band

NAME = "weft_sequence"
_HARMLESS = frozenset(
    {
        "position_ids", "cache_position", "use_cache", "output_hidden_states", "output_router_logits", "return_dict",
        "num_items_in_batch", "logits_to_keep", "deterministic",
    }
)  # fmt: skip
"""Arguments that models pass on to attention and that do not change its result."""


class Attend(Protocol):
    """Attention of this rank's queries to the keys of all ranks; (samples, heads, tokens, entries)."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        /,
        *,
        is_causal: bool,
        scale: float | None,
        band: Band | None,
        softcap: float | None,
    ) -> Tensor: ...


def use_registry(
    model: nn.Module, attend: Attend, *, now: Callable[[], Pass | None], numbers: Callable[[torch.device], Tensor]
) -> Callable[[], list[Replacement]] | None:
    """Finds the replacements by which the Hugging Face models in a model attend over all ranks.

    It is to be called before the first pass, not sooner: until then, other axes may give modules configurations.

    `now` gives the pass under way, `numbers` the positions of this rank's tokens, on a device. None: there are no such
    models.
    """
    kind = hugging_face_class()
    models = [module for module in model.modules() if kind is not None and isinstance(module, kind)]
    if not models:
        return None
    problems: list[str] = []
    named: set[nn.Module] = set()  # parts of a model that is named already have its problem
    for module in models:
        if module not in named and (found := model_problems(module)):
            problems += found
            named.update(module.modules())
    if problems:
        raise ModelError(problems)
    return _Switch(model, models, attend, now, numbers).replacements


class _Switch:
    """Replacements in transformers and in configurations during a pass."""

    def __init__(
        self,
        model: nn.Module,
        models: list[Any],
        attend: Attend,
        now: Callable[[], Pass | None],
        numbers: Callable[[torch.device], Tensor],
    ) -> None:
        self._model = model
        self._models = models
        self._attend = attend
        self._now = now
        self._numbers = numbers
        self._outermost = list(outermost_models(model, "position_ids"))
        self._longest = longest_rotation(model)
        self._asked_for_documents = False
        self._mask_assertion = DeviceAssertion(
            "an attention_mask given inside another module hides a token; give weft the Hugging Face model itself"
        )
        self._positions_assertion = DeviceAssertion(
            "position_ids given inside another module are not the global positions; leave them out there"
        )

    def replacements(self) -> list[Replacement]:
        switched = [module for model in filter(uses_registry, self._models) for module in model.modules()]
        found = (getattr(module, "config", None) for module in switched)  # also those of parts of composite models
        configs = {id(config): config for config in found if hasattr(config, "_attn_implementation_internal")}
        why = "gives it the positions of this rank's tokens, and no cache"
        add = partial(add_hook, when="forward_pre", hook=self._complete, by="sequence", why=why, with_kwargs=True)
        return [
            *hugging_face_attention(
                NAME,
                attention=self._attention,
                mask=self._mask,
                find_documents=self._no_documents,
                configs=tuple(configs.values()),
                calls_torch=not all(map(uses_registry, self._models)),
            ),
            *(
                Replacement(what=f"hook on {type(outer).__name__}", why=why, apply=partial(add, outer))
                for outer in self._outermost
            ),
        ]

    def _attention(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | Band | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """Our entry in the registry of attention. What `_mask` returned comes back as `attention_mask`."""
        problems = []
        band = attention_mask if isinstance(attention_mask, Band) else None
        if band is not None and band.before < 0:
            problems.append("a window of 0, through which a query sees no key; use a model without windows")
        elif isinstance(attention_mask, Tensor):
            problems.append(
                f"a mask of {tuple(attention_mask.shape)}, which says nothing about other ranks' tokens; give "
                "the model padding as an attention_mask (samples, tokens)"
            )
        if dropout > 0:
            problems.append(f"dropout = {dropout:g}; set the model's attention dropout to 0")
        if band is None and sliding_window and sliding_window < self._num_tokens:
            problems.append(
                f"sliding_window = {sliding_window}, less than the sequence's {self._num_tokens} tokens, but no mask "
                "of that window, so that backends of attention would differ; use shorter sequences, or another model"
            )
        if self._longest is not None and self._num_tokens > self._longest:
            problems.append(
                f"positions whose angles change with the length of the sequence beyond {self._longest} tokens; it has "
                f"{self._num_tokens}, of which a rank sees some; use shorter sequences, or other rope_parameters"
            )
        problems += [
            f"{name} = {_said(given)}, which weft does not support; use a model without it"
            for name, given in others.items()
            if name not in _HARMLESS and given is not None and given is not False
        ]
        if problems:
            raise ModelError([f"{type(module).__name__} gives attention {problem}, {REMEDY}" for problem in problems])
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        mixed = self._attend(
            query,
            key,
            value,
            is_causal=causal if band is None else band.after == 0,
            scale=scaling,
            band=band,
            softcap=softcap,
        )
        return mixed.transpose(1, 2).contiguous(), None

    def _mask(
        self,
        *,
        q_length: int,
        attention_mask: Tensor | None = None,
        mask_function: Callable[..., Any] | None = None,
        local_size: int | None = None,
        allow_is_causal_skip: bool = True,
        allow_is_bidirectional_skip: bool = False,
        **others: Any,
    ) -> Band | None:
        """Our entry in the registry of masks: makes none, and refuses masks that `attend` does not know of.

        In place of the mask of a window it returns the window, which reaches `_attention` in the layers that use it.
        """
        del others
        now, asked = self._now(), self._asked_for_documents
        self._asked_for_documents = False
        problems = []
        if not (allow_is_causal_skip or allow_is_bidirectional_skip or is_plain(mask_function)):
            problems.append("by more than causality, padding and documents; use a model that does not")
        band = None
        if local_size is not None and local_size < self._num_tokens:
            band = find_band(mask_function, local_size)
            if band is None:
                problems.append(
                    f"all but {local_size} tokens in a way of its own (chunks), less than the sequence's "
                    f"{self._num_tokens}; use shorter sequences, or a model without"
                )
        if attention_mask is not None and not self._sees_all(attention_mask, q_length):
            problems.append(
                f"by an attention_mask of {tuple(attention_mask.shape)} that reaches it inside another module; give "
                "the Hugging Face model itself to weft, and the mask by its name"
            )
        if now is not None and now.documents_BS is not None and not asked:
            problems.append(
                "no documents, although its position_ids begin anew within a sequence; give an attention_mask of ones "
                "as well to confirm it"
            )
        if problems:
            raise ModelError([f"the model masks {problem}, {REMEDY}" for problem in problems])
        return band

    def _sees_all(self, mask: Tensor, num_tokens: int) -> bool:
        """True if a mask lets every local token see every other."""
        has_columns = mask.dim() == 2 and mask.shape[1] == num_tokens
        return has_columns and self._mask_assertion.holds(mask.all(), mask.shape)

    def _no_documents(self, position_ids: Tensor) -> None:
        self._asked_for_documents = True

    @property
    def _num_tokens(self) -> int:
        now = self._now()
        assert now is not None, "attention outside a pass"
        return now.places.num_tokens

    def _complete(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Hook that gives a model inside another module the inputs that `inputs_of` gives an outermost one.

        Without it, the model would count its local tokens from 0, and cache their keys.
        """
        if model is self._model:
            return None
        named = by_name(model, args, kwargs)
        device = next((value.device for value in named.values() if isinstance(value, Tensor)), torch.device("cpu"))
        numbers = self._numbers(device).unsqueeze(0)
        given = named.get("position_ids")
        if given is None and makes_own_positions(model):
            raise ModelError(
                f"{type(model).__name__} makes its positions from the whole sequence, of which a rank has some; give "
                "weft the model itself, not inside another module"
            )
        if given is not None and not self._positions_assertion.holds(
            (given == numbers.to(given.device)).all(), given.shape
        ):
            raise ModelError(
                f"{type(model).__name__} is given position_ids inside another module that are not the global "
                "positions of this rank's tokens; leave them out there, or give weft the model itself"
            )
        return (), without_cache(model, {**named, "position_ids": numbers})


def _said(value: object) -> str:
    return f"a tensor of {tuple(value.shape)}" if isinstance(value, Tensor) else str(value)
