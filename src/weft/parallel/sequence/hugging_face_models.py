"""What a Hugging Face model says of its attention before the first pass: whether weft can distribute it, and windows.

transformers is not imported here.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from weft.models.hugging_face_inputs import hugging_face_class
from weft.plan.partition.sequence import Band

REMEDY = "or set [axes] ring and ulysses to 1"


def model_problems(model: Any) -> list[str]:
    """Why attention of this model cannot be distributed; empty if it can."""
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        return [
            f"{name} is an encoder and a decoder, with sequences of two lengths, which weft does not split; set [axes] "
            "ring and ulysses to 1"
        ]
    if _has_alibi(model):
        return [
            f"{name} adds ALiBi to its attention scores in code of its own, from the distances of the tokens that it "
            "sees, and a rank sees some of them; use a model with rotary or learned positions, " + REMEDY
        ]
    if uses_registry(model):
        return []
    attention = model.config._attn_implementation
    if not model._supports_sdpa or attention != "sdpa":
        instead = 'load it with attn_implementation="sdpa"' if model._supports_sdpa else "use another model"
        return [
            f'{name} attends in code of its own (attn_implementation = "{attention}"), which weft cannot '
            f"distribute; {instead}, {REMEDY}"
        ]
    return []


def _has_alibi(model: Any) -> bool:
    """True if scores have a term linear in the distance of tokens; families write it down in several ways."""
    config = model.config
    nested = getattr(config, "attn_config", None)
    if getattr(config, "alibi", False) or getattr(nested, "alibi", False):
        return True
    return any(hasattr(module, "build_alibi_tensor") for module in model.modules())


def uses_registry(model: Any) -> bool:
    """transformers decides by the source of a class, which a class that a user derived may lack; so bases count too."""
    base = hugging_face_class()
    kinds: list[Any] = [kind for kind in type(model).__mro__ if issubclass(kind, base) and kind is not base]
    return any(kind._can_set_attn_implementation() for kind in kinds)


def longest_rotation(model: nn.Module) -> int | None:
    """The length beyond which rotary angles depend on the length of the sequence; None: they never do."""
    lengths = []
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        for layer, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
            if not isinstance(kind, str) or not ("dynamic" in kind or kind == "longrope"):
                continue
            parameters = getattr(getattr(module, "config", None), "rope_parameters", None) or {}
            parameters = parameters.get(layer, parameters)
            known = (parameters.get("original_max_position_embeddings"), getattr(module, "original_max_seq_len", None))
            lengths.append(min((length for length in known if length is not None), default=0))
    return min(lengths, default=None)


def is_plain(mask_function: Any) -> bool:
    """True for the mask functions of causal and of full attention; models may ask for their mask in any case."""
    return getattr(mask_function, "__qualname__", "") in ("causal_mask_function", "bidirectional_mask_function")


def find_band(mask_function: Any, size: int) -> Band | None:
    """The window of one of transformers' mask functions, which are made of others; None if it is no window.

    Found by their names: calling them takes tensors with values, which there are none of while a model is traced.
    """
    parts = {
        part.__qualname__.partition(".")[0]
        for cell in getattr(mask_function, "__closure__", None) or ()
        for part in (cell.cell_contents if isinstance(cell.cell_contents, tuple) else (cell.cell_contents,))
        if callable(part)
    }
    if parts == {"sliding_window_overlay", "causal_mask_function"}:
        return Band(before=size - 1, after=0)
    if parts == {"sliding_window_bidirectional_overlay", "bidirectional_mask_function"}:
        return Band(before=size, after=size)
    return None
