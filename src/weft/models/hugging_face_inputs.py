"""Positions, padding and documents of whole sequences, read from the inputs of a Hugging Face model before a split.

Their models derive all three from the inputs; from some of the tokens they would derive something else. So this is done
here, from the whole sequence, by their own rules:

    positions   position_ids, or else 0, 1, 2, ...; some models count only tokens that are not padding
    padding     attention_mask (samples, tokens), 0 for padding, which the model itself is then not given
    documents   a new one begins where position_ids do not increase by 1; only without an attention_mask and a cache

Models that make a cache unasked (use_cache is True in most configurations) ignore documents. transformers is not
imported here: if the user has not, no model is one of theirs.
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
    "past_key_values": "no rank has the keys of earlier tokens; give the model whole sequences",
    "head_mask": "attention over several ranks does not weight heads; leave it out",
    "output_attentions": "no rank has the weights of attention; leave it out",
    "encoder_hidden_states": "attention to another sequence is not split; leave it out",
    "encoder_attention_mask": "attention to another sequence is not split; leave it out",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceInputs:
    """The whole inputs of one call: S tokens of B samples."""

    inputs: dict[str, Any]
    """Values by argument name; with position_ids (samples or 1, tokens), without mask and cache."""
    along: tuple[str, ...]
    """Names of the inputs that are split along dim 1, the sequence."""
    key_mask_BS: Tensor | None
    """False for keys that no query may see; None: all may be seen."""
    documents_BS: Tensor | None
    """The number of each token's document; None: every sample is one document."""


def hugging_face_class() -> Any:
    """The base class of all Hugging Face models; None if transformers has not been imported."""
    return getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)


def encoder_decoders(model: nn.Module) -> list[str]:
    """The classes of Hugging Face models in a model that are an encoder and a decoder, outermost first."""
    kind = hugging_face_class()
    found = (one for one in model.modules() if kind is not None and isinstance(one, kind))
    return [type(one).__name__ for one in found if getattr(one.config, "is_encoder_decoder", False)][:1]


def outermost_models(model: nn.Module, argument: str) -> Iterator[nn.Module]:
    """The outermost Hugging Face models in a model that take an argument of this name."""
    kind = hugging_face_class()
    waiting = [model] if kind is not None else []
    while waiting:
        module = waiting.pop()
        if isinstance(module, kind) and _takes(module, argument):
            yield module
        else:
            waiting += module.children()


def _takes(module: nn.Module, argument: str) -> bool:
    return argument in inspect.signature(type(module).forward).parameters


def inputs_of(model: nn.Module, inputs: Any) -> SequenceInputs | None:
    """Read the inputs (a tensor, a tuple or a dict) of a Hugging Face model; None for any other model.

    Also None for those of their models that take no position_ids.
    """
    kind = hugging_face_class()
    if kind is None or not isinstance(model, kind) or not _takes(model, _POSITIONS):
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
    """The number of each token's document; None: every sample is one document."""
    goes_on = torch.diff(position_ids_BS, dim=1) == 1
    if bool(goes_on.all()):
        return None
    return torch.nn.functional.pad((~goes_on).cumsum(1), (1, 0))


def makes_own_positions(model: nn.Module) -> bool:
    """True if default position_ids depend on the tokens themselves, not only on their number."""
    return _padding_index(model) is not None


def by_name(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    try:
        named = inspect.signature(type(model).forward).bind_partial(model, *args).arguments
    except TypeError as error:
        raise ModelError(f"{type(model).__name__} cannot be called with {len(args)} inputs: {error}") from error
    return {**dict(list(named.items())[1:]), **kwargs}  # without the model itself


def without_cache(model: nn.Module, named: dict[str, Any]) -> dict[str, Any]:
    """The same arguments for a call without cache, to which a recomputed block would add its keys twice."""
    return {**named, "use_cache": False} if _takes(model, "use_cache") else named


def leave_out_caches(model: nn.Module) -> None:
    """Let the Hugging Face models in a model make no cache of keys unless they are asked to.

    Most configurations make one in every pass. A recomputed block would find its own keys in it, a pipeline stage would
    keep those of every microbatch, and a block that is timed alone would find those of another.
    """
    why = "builds no key-value cache unless it is asked to"
    for module in outermost_models(model, "use_cache"):
        add_hook(module, "forward_pre", _ask_for_no_cache, by="hugging face", why=why, with_kwargs=True)


def _ask_for_no_cache(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    named = by_name(model, args, kwargs)
    if named.get("use_cache") is not None or named.get("past_key_values") is not None:
        return None
    tokens, positions = _tokens(named), named.get(_POSITIONS)
    if positions is not None and named.get(_MASK) is None and tokens is not None and _makes_cache(model, None):
        # Without a cache they would look for documents in these positions; an explicit mask prevents that.
        named[_MASK] = torch.ones(tokens.shape[:2], dtype=torch.long, device=tokens.device)
    return (), without_cache(model, named)


def _problems(named: Mapping[str, Any], shape: tuple[int, ...]) -> list[str]:
    """Inputs that cannot be split, or whose meaning for some of the tokens is not known."""
    problems = []
    for name, value in named.items():
        if name in _UNSUPPORTED and value is not None and value is not False:
            problems.append(f"{name}: {_UNSUPPORTED[name]}")
        elif isinstance(value, Tensor) and value.dim() >= 2 and not _lies_along(name, tuple(value.shape), shape):
            problems.append(
                f"{name} of {tuple(value.shape)}, where the sequences are {shape[0]} of {shape[1]} tokens; weft splits "
                f"inputs with a row per sample and a column per token; give {name} in that form"
            )
    return problems


def _lies_along(name: str, given: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    if name == _POSITIONS:
        return given in (shape, (1, shape[1]))
    return given == shape if name == _MASK else given[:2] == shape


def _tokens(named: Mapping[str, Any]) -> Any:
    return next((named[name] for name in _TOKENS if named.get(name) is not None), None)


def _make_positions(model: nn.Module, named: Mapping[str, Any], tokens: Tensor, mask: Tensor | None) -> Tensor:
    """The positions that the model would use for the whole sequence: (samples or 1, tokens)."""
    padding = _padding_index(model)
    if padding is not None and tokens is named.get("input_ids"):
        return _count(tokens != padding) + (padding + 1)
    tables = (one for one in _outside_layers(model) if isinstance(one, nn.Embedding) and type(one) is not nn.Embedding)
    if mask is not None and any(_takes(table, _MASK) for table in tables):  # derived from the mask (OPT's family)
        return _count(mask)
    first = 0 if padding is None else padding + 1
    return torch.arange(first, first + tokens.shape[1], device=tokens.device).unsqueeze(0)


def _count(counted: Tensor) -> Tensor:
    """Numbers from 0 of what is counted; -1 for the rest."""
    return (counted.long().cumsum(1) * counted - 1).long()


def _padding_index(model: nn.Module) -> int | None:
    """The padding index of models whose positions begin after it and whose padding has it (RoBERTa's family)."""
    for module in _outside_layers(model):
        if hasattr(type(module), "create_position_ids_from_inputs_embeds"):
            return int(getattr(module, "padding_idx", 0))
    return None


def _makes_cache(model: Any, asked: bool | None) -> bool:
    uses = getattr(model.config.get_text_config(), "use_cache", False) if asked is None else asked
    if not uses:
        return False
    # In training, none is made where the model does its own recomputation.
    return not any(one.training and getattr(one, "gradient_checkpointing", False) for one in _outside_layers(model))


def _outside_layers(model: nn.Module) -> Iterator[nn.Module]:
    """All modules outside lists of layers, which are many, and this runs for every microbatch."""
    yield model
    for child in model.children():
        if not isinstance(child, nn.ModuleList):
            yield from _outside_layers(child)
