"""Layers of a model that no file of pretrained weights has: a new head on a pretrained body, the usual fine-tuning.

They are named by the user, not guessed: a misspelt or renamed tensor would otherwise train from random values without a
word. What is missing from the files besides is refused, and the refusal names the layers that could be meant.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn

from weft.errors import ModelError, nearest


class NewLayers:
    """The layers that a user calls new."""

    def __init__(self, model: nn.Module, names: Sequence[str], *, has_weights: bool) -> None:
        self.names = (names,) if isinstance(names, str) else tuple(names)
        self._has_weights = has_weights
        if self.names and not has_weights:
            raise ModelError(
                f"new_layers = {list(self.names)} has no effect without weights: every layer is new then; leave it out"
            )
        known = [name for name, _ in model.named_modules() if name]
        known += [name for name, _ in model.named_parameters(remove_duplicate=False)]
        if unknown := [name for name in self.names if name not in known]:
            shown = [name for name in known if name.count(".") == unknown[0].count(".")]
            raise ModelError(
                [f'new_layers: the model has no layer "{name}"; {nearest(name, shown)}' for name in unknown]
            )

    def draws(self, name: str) -> bool:
        """True if a parameter without memory gets first values, False if its values are read."""
        return not self._has_weights or is_inside(name, self.names)


def is_inside(name: str, layers: Collection[str]) -> bool:
    """True if a tensor belongs to one of these layers, or is one of these tensors."""
    return any(name == layer or name.startswith(f"{layer}.") for layer in layers)


def layers_without_weights(lacking: Collection[str], found: Collection[str]) -> list[str]:
    """The outermost layers of which every tensor is lacking, where most of the model was found; else none.

    layers_without_weights(["score.weight"], ["body.weight", "body.bias"]) -> ["score"]
    """
    layers: dict[str, None] = {}
    for name in lacking:
        path = name.split(".")
        prefixes = [".".join(path[:end]) for end in range(1, len(path) + 1)]
        layers[next(prefix for prefix in prefixes if not any(is_inside(one, [prefix]) for one in found))] = None
    return list(layers) if len(found) > len(lacking) else []
