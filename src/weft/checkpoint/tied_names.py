"""The further names under which a model's `state_dict()` has a tensor: tied parameters, and modules registered twice.

A checkpoint holds such a tensor under each of its names, so that a plain `model.load_state_dict(...)` takes the files
as they are. Weights are read by their first name.
"""

from __future__ import annotations

from torch import nn


def further_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """All names after the first of each parameter and persistent buffer that has several, by the first."""
    first: dict[object, str] = {}
    found: dict[str, list[str]] = {}

    def note(key: object, name: str) -> None:
        owner = first.setdefault(key, name)
        if owner != name:
            found.setdefault(owner, []).append(name)

    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for name, parameter in module._parameters.items():
            if parameter is not None:
                note(id(parameter), prefix + name)
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                note((id(module), name), prefix + name)
    return {owner: tuple(names) for owner, names in found.items()}
