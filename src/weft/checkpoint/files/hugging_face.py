"""The files of a Hugging Face model folder: its config, and its weights in one or several safetensors files.

Nothing here needs transformers: a model's config serialises itself.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from torch import nn

from weft.errors import CheckpointError

WEIGHTS_INDEX = "model.safetensors.index.json"
CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
_SINGLE = "model.safetensors"


def weights_index(weight_map: dict[str, str], num_bytes: int) -> str:
    """The index that maps tensors to files."""
    return json.dumps({"metadata": {"total_size": num_bytes}, "weight_map": weight_map}, indent=1)


def config_files(model: nn.Module) -> dict[str, str]:
    """The files that transformers needs besides the weights, by name; none for a model without a config."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_json_string"):
        return {}
    content: dict[str, Any] = json.loads(config.to_json_string())
    content["architectures"] = [type(model).__name__]
    files = {CONFIG: json.dumps(content, indent=2, sort_keys=True) + "\n"}
    generation: Any = getattr(model, "generation_config", None)
    if hasattr(generation, "to_json_string"):
        files[GENERATION_CONFIG] = generation.to_json_string()
    return files


_COMPANIONS = re.compile(
    r"tokenizer.*\.json|.*\.(model|tiktoken)|vocab\.(json|txt)|merges\.txt|special_tokens_map\.json|added_tokens\.json"
    r"|chat_template\.(jinja|json)|generation_config\.json|(pre)?processor_config\.json"
)


def is_companion(name: str) -> bool:
    """True for a file that belongs to a model's folder and is neither its weights nor its config."""
    return _COMPANIONS.fullmatch(name) is not None


def companion_files(folder: Path) -> dict[str, bytes]:
    """The tokenizer, the chat template and the like of a model's folder, by name."""
    if not folder.is_dir():
        return {}
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if is_companion(path.name)}


def weight_files(folder: Path) -> list[str]:
    """The safetensors files with a model's weights; a folder without any is refused."""
    index = folder / WEIGHTS_INDEX
    try:
        if index.is_file():
            return sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} cannot be read: {error}") from error
    if (folder / _SINGLE).is_file():
        return [_SINGLE]
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    if found:
        return found
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; give the local folder that holds the model's weights")
    pickles = sorted(path.name for path in (*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")))
    if pickles:
        raise CheckpointError(
            f"{folder} holds weights as pickles only ({pickles[0]}), which can run any code and not be read in parts; "
            "convert them once, with transformers: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder)"
        )
    raise CheckpointError(f"{folder} holds no *.safetensors file; give the local folder that holds the model's weights")
