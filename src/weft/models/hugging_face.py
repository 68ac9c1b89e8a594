"""A Hugging Face model from a local configuration or folder, built on the meta device; no hub is contacted.

    config.json           sizes only: the model starts from fresh values
    a folder              its config.json, and pretrained weights if there are *.safetensors

The class is the one that `architectures` names, or else the family's causal language model. Single entries of the
configuration can be changed; one that the family does not know is refused, where transformers would silently keep it.
Parameters are float32 unless `dtype` is given, whatever the weights were stored in: half precision belongs to the plan,
which keeps a master copy.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weft.errors import ModelError, nearest

CONFIG_FILE = "config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class HuggingFaceModel:
    """Configuration, class and weights of a model that can be built."""

    config: Any
    kind: Any
    """The class of the model."""
    weights: Path | None
    """A folder of safetensors; None: fresh values."""

    @property
    def continues_text(self) -> bool:
        """True if it is a causal language model."""
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as causal

        # In a family of encoder-decoder models, that class is the decoder alone.
        continues = not _is_encoder(self.config) or getattr(self.config, "is_encoder_decoder", False)
        return self.kind.__name__ in causal.values() and continues

    @property
    def longest(self) -> int | None:
        """Longest sequence in tokens, if the configuration says so."""
        return _whole(getattr(self.config.get_text_config(), "max_position_embeddings", None))

    @property
    def vocab_size(self) -> int | None:
        return _whole(getattr(self.config.get_text_config(), "vocab_size", None))

    def build(self) -> nn.Module:
        """The model, on the meta device."""
        attention = "sdpa" if getattr(self.kind, "_supports_sdpa", False) else "eager"
        dtype = getattr(self.config, "dtype", None) or torch.float32
        try:
            with torch.device("meta"):
                model: nn.Module = self.kind._from_config(self.config, attn_implementation=attention, dtype=dtype)
        except Exception as error:  # any error is caused by the entries
            raise ModelError(f"{self.kind.__name__} cannot be built from its configuration: {error}") from error
        return model.train()


def read_hugging_face(path: Path, changes: Mapping[str, Any]) -> HuggingFaceModel:
    """The model in a folder or configuration file, with some entries of its configuration changed."""
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise ModelError(
            f'[model] hf = "{path}" needs the package transformers, which is not installed ({error}); '
            'pip install "transformers>=5"'
        ) from error
    folder, file = (path, path / CONFIG_FILE) if path.is_dir() else (path.parent, path)
    stored, changes = _renamed(_read_json(file)), _renamed(changes)
    config = _make_config(transformers, file, stored, changes)
    if "dtype" not in changes:  # the stored one is the dtype of weights on disk, not in training
        config.dtype = torch.float32
    elif not isinstance(config.dtype, torch.dtype):
        raise ModelError(
            f"[model] dtype = {json.dumps(changes['dtype'])} is none of torch's; give the name of one, such as "
            '"bfloat16", or leave it out'
        )
    has_weights = path.is_dir() and any(folder.glob("*.safetensors"))
    return HuggingFaceModel(
        config=config, kind=_find_class(transformers, file, config), weights=folder if has_weights else None
    )


def _renamed(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Entries by their current names."""
    return {"dtype" if name == "torch_dtype" else name: value for name, value in entries.items()}


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise ModelError(f'[model] hf: there is no file "{file}"; give a folder with a {CONFIG_FILE}, or such a file')
    try:
        stored = json.loads(file.read_text("utf-8"))
    except ValueError as error:  # or bytes that are not text
        raise ModelError(f"{file} is no JSON: {error}; give a Hugging Face {CONFIG_FILE}") from error
    if not isinstance(stored, dict) or not isinstance(stored.get("model_type"), str):
        raise ModelError(f'{file} has no "model_type"; give the {CONFIG_FILE} of a Hugging Face model')
    return stored


def _make_config(transformers: Any, file: Path, stored: dict[str, Any], changes: Mapping[str, Any]) -> Any:
    kind = stored["model_type"]
    known_kinds = transformers.CONFIG_MAPPING
    if kind not in known_kinds:
        raise ModelError(
            f'{file}: model_type "{kind}" is not one that transformers {transformers.__version__} knows; '
            f"{nearest(kind, list(known_kinds.keys()))}"
        )
    config_class = known_kinds[kind]
    try:
        defaults = config_class().to_dict()
    except Exception as error:  # some consist of other configurations, which have to be given
        raise ModelError(f"{file}: {config_class.__name__} has no default: {error}; give another model_type") from error
    names = {*defaults, *config_class.attribute_map, *stored, "dtype"} - {"model_type"}
    problems = [
        f'[model] takes no setting "{name}", which is no entry of a {config_class.__name__}; {nearest(name, names)}'
        for name in changes
        if name not in names
    ]
    if problems:
        raise ModelError(problems)
    given = {config_class.attribute_map.get(name, name): value for name, value in changes.items()}
    merged = {config_class.attribute_map.get(name, name): value for name, value in stored.items()} | given
    layers, num_layers = merged.get("layer_types"), merged.get("num_hidden_layers")
    if isinstance(layers, list) and "layer_types" not in given and isinstance(num_layers, int):
        if num_layers <= len(layers):  # keep the first of those that are stored
            merged["layer_types"] = layers[:num_layers]
        else:
            del merged["layer_types"]
    try:
        return config_class.from_dict(merged)
    except Exception as error:  # any error is caused by the entries
        raise ModelError(f"{file}: {config_class.__name__}: {error}") from error


def _find_class(transformers: Any, file: Path, config: Any) -> Any:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as causal
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES as bare

    listed = config.architectures or []
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        raise ModelError(f'{file}: architectures = {listed!r} must be a list of names, such as ["LlamaForCausalLM"]')
    named = next(iter(listed), None)
    without_head = bare.get(config.model_type)
    is_bare = named in ((without_head,) if isinstance(without_head, str) else without_head or ())
    if (named is None or is_bare) and config.model_type in causal and not _is_encoder(config):
        named = causal[config.model_type]
    elif named is None or is_bare:
        said = "names no architectures" if named is None else f'names the architecture "{named}", which has no head'
        raise ModelError(
            f'{file} {said}; add one with a head, such as "architectures": ["{type(config).__name__[:-6]}ForMaskedLM"]'
        )
    found = getattr(transformers, named, None)
    if found is None:
        raise ModelError(
            f'{file} names the architecture "{named}", which transformers {transformers.__version__} does not have; '
            "weft runs no code that comes with a model"
        )
    return found


def _is_encoder(config: Any) -> bool:
    """True if it is of a family whose models look at all tokens by default."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as masked

    is_causal = any(getattr(config, name, False) for name in ("is_decoder", "causal"))
    return config.model_type in masked and not is_causal


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
