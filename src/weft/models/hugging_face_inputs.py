"""What the inputs of a Hugging Face model say of the whole sequence, read before ranks get their tokens of it.

Their models make positions, masks of padding and masks of packed documents from the inputs; from a part of the tokens
they would make others. So all three are made here, from the whole, by their own rules:

    positions   position_ids, or else 0, 1, 2, ...; some count only tokens that are not padding
    padding     attention_mask (samples, tokens), 0 for padding, which the model itself is then not given
    documents   a new one begins where position_ids do not go on by 1; only without an attention_mask and a cache

Models that make a cache when they are not asked to (use_cache is True in most configurations) mask by no documents.
transformers is not imported here: where nobody has, no model is one of theirs.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import ModelError
from weft.parallel.wrapping.wrap import add_hook

_TOKENS, _MASK, _POSITIONS = ("input_ids", "inputs_embeds"), "attention_mask", "position_ids"
_UNSUPPORTED = {
    "past_key_values": "keys of earlier tokens are on no rank; give the model whole sequences",
    "head_mask": "attention over several ranks has no weights of heads; leave it out",
    "output_attentions": "no rank has the weights of attention; leave it out",
    "encoder_hidden_states": "attention to another sequence is not split; leave it out",
    "encoder_attention_mask": "attention to another sequence is not split; leave it out",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceInputs:
    """The inputs of one call, whole: S tokens of B samples."""

    inputs: dict[str, Any]
    """By the names of the model's arguments; with position_ids (samples or 1, tokens), without mask and cache."""
    along: tuple[str, ...]
    """The names of those that lie along the sequence, with dim 1."""
    key_mask_BS: Tensor | None
    """Where a key may be seen, if not everywhere."""
    documents_BS: Tensor | None
    """The number of each token's document, if a sample has several."""


def hugging_face_class() -> Any:
    """The class of all Hugging Face models; None where transformers has not been imported."""
    return getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)


def inputs_of(model: nn.Module, inputs: Any) -> SequenceInputs | None:
    """Read the inputs (a tensor, a tuple or a dict) of a Hugging Face model; None for any other model.

    Also None for those of their models that take no position_ids.
    """
    kind = hugging_face_class()
    if kind is None or not isinstance(model, kind):
        return None
    if _POSITIONS not in inspect.signature(type(model).forward).parameters:
        return None
    if isinstance(inputs, Mapping):
        named = dict(inputs)
    else:
        named = by_name(model, inputs if isinstance(inputs, tuple | list) else (inputs,), {})
    tokens = _tokens(named)
    if not isinstance(tokens, Tensor) or tokens.dim() < 2:
        raise ModelError(f"{type(model).__name__} was given no {' or '.join(_TOKENS)} of samples and tokens to split")
    problems = _problems(named, tuple(tokens.shape[:2]))
    if getattr(model.config, "output_attentions", False):
        problems.append(f"output_attentions in the configuration: {_UNSUPPORTED['output_attentions']}")
    if problems:
        raise ModelError([f"{type(model).__name__} was given {problem}" for problem in problems])
    mask, given = named.pop(_MASK, None), named.get(_POSITIONS)
    named[_POSITIONS] = _make_positions(model, named, tokens, mask) if given is None else given
    documents = None
    if mask is None and given is not None and not _makes_cache(model, named.get("use_cache")):
        documents = documents_of(given.expand(tokens.shape[0], -1))
    return SequenceInputs(
        inputs=without_cache(model, named),
        along=tuple(name for name, value in named.items() if isinstance(value, Tensor) and value.dim() >= 2),
        key_mask_BS=None if mask is None or bool(mask.all()) else mask.bool(),
        documents_BS=documents,
    )


def documents_of(position_ids_BS: Tensor) -> Tensor | None:
    """The number of each token's document; None where each sample is one."""
    goes_on = torch.diff(position_ids_BS, dim=1) == 1
    if bool(goes_on.all()):
        return None
    return torch.nn.functional.pad((~goes_on).cumsum(1), (1, 0))


def makes_own_positions(model: nn.Module) -> bool:
    """Whether position_ids that a model is not given follow from its tokens, and not only from how many there are."""
    return _padding_index(model) is not None


def by_name(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by their names."""
    try:
        named = inspect.signature(type(model).forward).bind_partial(model, *args).arguments
    except TypeError as error:
        raise ModelError(f"{type(model).__name__} cannot be called with {len(args)} inputs: {error}") from error
    return {**dict(list(named.items())[1:]), **kwargs}  # without the model itself


def without_cache(model: nn.Module, named: dict[str, Any]) -> dict[str, Any]:
    """The same arguments for a call that keeps no keys for a next token: a recomputed block would add its own twice."""
    takes_it = "use_cache" in inspect.signature(type(model).forward).parameters
    return {**named, "use_cache": False} if takes_it else named


def leave_out_caches(model: nn.Module) -> None:
    """Let the Hugging Face models in a model keep no keys for a next token unless they are asked to.

    Most configurations have them do it in every pass. A block that is recomputed would find its own keys there, a
    stage of a pipeline would keep those of every microbatch, and a block that is timed alone those of another.
    """
    kind = hugging_face_class()
    waiting = [model] if kind is not None else []
    while waiting:
        module = waiting.pop()
        if isinstance(module, kind) and "use_cache" in inspect.signature(type(module).forward).parameters:
            why = "keeps no keys for a next token unless it is asked to"
            add_hook(module, "forward_pre", _ask_for_no_cache, by="hugging face", why=why, with_kwargs=True)
        else:
            waiting += module.children()


def _ask_for_no_cache(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    named = by_name(model, args, kwargs)
    if named.get("use_cache") is not None or named.get("past_key_values") is not None:
        return None
    tokens, positions = _tokens(named), named.get(_POSITIONS)
    if positions is not None and named.get(_MASK) is None and tokens is not None and _makes_cache(model, None):
        # Without a cache they would find documents in these positions, which they do not look for beside one.
        named[_MASK] = torch.ones(tokens.shape[:2], dtype=torch.long, device=tokens.device)
    return (), without_cache(model, named)


def _problems(named: Mapping[str, Any], shape: tuple[int, ...]) -> list[str]:
    """Of inputs that cannot be split, or whose meaning for a part of the tokens is not known."""
    problems = []
    for name, value in named.items():
        if name in _UNSUPPORTED and value is not None and value is not False:
            problems.append(f"{name}: {_UNSUPPORTED[name]}")
        elif isinstance(value, Tensor) and value.dim() >= 2 and not _lies_along(name, tuple(value.shape), shape):
            problems.append(
                f"{name} of {tuple(value.shape)}, where the sequences are {shape[0]} of {shape[1]} tokens; weft splits "
                f"what has a row for each sample and a column for each token, {name} in another form does not"
            )
    return problems


def _lies_along(name: str, given: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    if name == _POSITIONS:
        return given in (shape, (1, shape[1]))
    return given == shape if name == _MASK else given[:2] == shape


def _tokens(named: Mapping[str, Any]) -> Any:
    return next((named[name] for name in _TOKENS if named.get(name) is not None), None)


def _make_positions(model: nn.Module, named: Mapping[str, Any], tokens: Tensor, mask: Tensor | None) -> Tensor:
    """What the model would make of the whole sequence: (samples or 1, tokens)."""
    padding = _padding_index(model)
    if padding is not None and tokens is named.get("input_ids"):
        return _count(tokens != padding) + (padding + 1)
    if mask is not None and any(map(_counts_mask, _outside_layers(model))):
        return _count(mask)
    first = 0 if padding is None else padding + 1
    return torch.arange(first, first + tokens.shape[1], device=tokens.device).unsqueeze(0)


def _count(counted: Tensor) -> Tensor:
    """From 0; -1 for what is not counted."""
    return (counted.long().cumsum(1) * counted - 1).long()


def _padding_index(model: nn.Module) -> int | None:
    """Of models that number tokens from the one after their padding's, and padding by its own (RoBERTa's family)."""
    for module in _outside_layers(model):
        if hasattr(type(module), "create_position_ids_from_inputs_embeds"):
            return int(getattr(module, "padding_idx", 0))
    return None


def _counts_mask(module: nn.Module) -> bool:
    """Whether it is an embedding of positions that it makes from the mask itself (OPT's family)."""
    if not isinstance(module, nn.Embedding) or type(module) is nn.Embedding:
        return False
    return _MASK in inspect.signature(type(module).forward).parameters


def _makes_cache(model: Any, asked: bool | None) -> bool:
    uses = getattr(model.config.get_text_config(), "use_cache", False) if asked is None else asked
    if not uses:
        return False
    # In training, none is made where the model recomputes by its own means.
    return not any(one.training and getattr(one, "gradient_checkpointing", False) for one in _outside_layers(model))


def _outside_layers(model: nn.Module) -> Iterator[nn.Module]:
    """All modules but the many in lists of layers; this is asked of every microbatch."""
    yield model
    for child in model.children():
        if not isinstance(child, nn.ModuleList):
            yield from _outside_layers(child)
