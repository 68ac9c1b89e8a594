"""Batches as trees: a tensor, or a tuple, list or dict of trees, in which dim 0 of every tensor is the samples.

Inputs and targets have whatever structure the user's model takes. They are cut for ranks and microbatches here, as
views. Leaves without dim 0 (numbers, strings, None, 0-dim tensors) belong to every sample and stay unchanged.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import SUPPORTED_NODES, tree_map_only
from torch.utils.data import default_collate

from weft.errors import DataError
from weft.layout import part_of

Tree = Any


class Arguments(dict[str, Any]):
    """Inputs by name, reduced to this rank's tokens."""

    beside: dict[str, Any]
    """Further arguments without a dim of samples, such as the positions of these tokens."""
    now: Any
    """The `Pass` of `parallel/attention/masks.py`, which describes the whole sequences."""

    def __init__(self, named: Mapping[str, Any], *, beside: dict[str, Any] | None = None, now: Any = None) -> None:
        super().__init__(named)
        self.beside = beside or {}
        self.now = now


def map_tensors(function: Callable[[torch.Tensor], Any], tree: Tree) -> Tree:
    """The same tree with `function` applied to each tensor; containers are new, other leaves the same."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        mapped = {key: map_tensors(function, branch) for key, branch in tree.items()}
        if not isinstance(tree, Arguments):
            return mapped
        return Arguments(mapped, beside=map_tensors(function, tree.beside), now=tree.now)
    if isinstance(tree, tuple | list):
        return _like(tree, [map_tensors(function, branch) for branch in tree])
    return tree


def map_output(function: Callable[[torch.Tensor], torch.Tensor], output: Any) -> Any:
    """`map_tensors` for what a model returns, also inside dataclasses and mappings of other kinds."""
    if dataclasses.is_dataclass(output) and not isinstance(output, type | Mapping):
        fields = {
            field.name: map_output(function, getattr(output, field.name))
            for field in dataclasses.fields(output)
            if field.init
        }
        return dataclasses.replace(output, **fields)
    if isinstance(output, MutableMapping) and type(output) not in SUPPORTED_NODES:
        mapped = copy.copy(output)
        mapped.update({key: map_output(function, value) for key, value in output.items()})
        return mapped
    return tree_map_only(torch.Tensor, function, output)


def output_tensors(output: Any) -> list[torch.Tensor]:
    """All tensors of what a model returns."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_output(note, output)
    return found


def named_tensors(tree: Tree, path: str = "batch") -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor with its path in Python's notation: `batch[0]['mask']`."""
    if isinstance(tree, torch.Tensor):
        yield path, tree
    elif isinstance(tree, Mapping):
        for key, branch in tree.items():
            yield from named_tensors(branch, f"{path}[{key!r}]")
    elif isinstance(tree, tuple | list):
        for index, branch in enumerate(tree):
            yield from named_tensors(branch, f"{path}[{index}]")


def tensors_of(tree: Tree) -> list[torch.Tensor]:
    """The tensors of a tree, in its order."""
    return [tensor for _, tensor in named_tensors(tree)]


def num_samples(tree: Tree, what: str = "batch") -> int:
    """The size of dim 0, which all tensors of the tree share; `what` names it in messages."""
    if untensored := list(_tables(tree, what)):
        raise DataError(
            [
                f"{path} is a list of lists of numbers, as a tokenizer returns it; give a tensor: tokenizer(..., "
                'padding=True, return_tensors="pt"), or torch.tensor(...)'
                for path in untensored
            ]
        )
    sizes = [(path, tensor.shape[0]) for path, tensor in named_tensors(tree, what) if tensor.dim()]
    if not sizes:
        raise DataError(
            "a batch has no tensor with a dim of samples; inputs and targets hold their samples along dim 0"
        )
    first_path, first = sizes[0]
    problems = [
        f"{path} has {size} samples along dim 0 and {first_path} has {first}; give every tensor the same samples"
        for path, size in sizes
        if size != first
    ]
    if problems:
        raise DataError(problems)
    return first


def _tables(tree: Tree, path: str) -> Iterator[str]:
    """The paths of lists of lists of numbers, which are a batch's samples in no form that can be cut."""
    if isinstance(tree, Mapping):
        for key, branch in tree.items():
            yield from _tables(branch, f"{path}[{key!r}]")
    elif isinstance(tree, list) and tree and all(map(_are_numbers, tree)):
        yield path
    elif isinstance(tree, tuple | list):
        for index, branch in enumerate(tree):
            yield from _tables(branch, f"{path}[{index}]")


def _are_numbers(tree: Tree) -> bool:
    return isinstance(tree, list) and bool(tree) and all(isinstance(number, int | float) for number in tree)


def split_tree(tree: Tree, start: int, stop: int) -> Tree:
    """Samples `start` to `stop - 1` of every tensor, as views."""
    return map_tensors(lambda tensor: tensor[start:stop] if tensor.dim() else tensor, tree)


def split_microbatches(tree: Tree, num: int) -> list[Tree]:
    """`num` contiguous parts, as even as possible and as views; some are empty when there are fewer samples."""
    total = num_samples(tree)
    return [split_tree(tree, *part_of(total, index, num)) for index in range(num)]


def stack_samples(samples: Sequence[Tree]) -> Tree:
    """One batch of single samples: leaves joined as by torch's DataLoader, containers of the same kind.

    torch's own `default_collate` turns tuples into lists; here a tuple means `*args`, so it must stay one. A list of
    numbers, such as a tokenizer returns, is a row of them.
    """
    first = samples[0]
    if isinstance(first, Mapping):
        return {key: stack_samples([sample[key] for sample in samples]) for key in first}
    if all(map(_are_numbers, samples)):
        most, fewest = (choose(len(sample) for sample in samples) for choose in (max, min))
        if most != fewest:
            raise DataError(
                f"samples of one batch hold lists of {most} and {fewest} numbers; pad or crop them to one length in "
                "the dataset"
            )
        return torch.tensor(samples)
    if isinstance(first, tuple | list):
        lengths = {len(sample) for sample in samples}
        if len(lengths) > 1:
            raise DataError(f"samples of one batch hold {min(lengths)} to {max(lengths)} things; give all the same")
        return _like(first, [stack_samples(branch) for branch in zip(*samples, strict=True)])
    if isinstance(first, torch.Tensor | np.ndarray):
        for sample in samples:
            if sample.shape != first.shape:
                raise DataError(
                    f"samples of one batch have shapes {tuple(first.shape)} and {tuple(sample.shape)}; "
                    "pad or crop them to one shape in the dataset"
                )
    return default_collate(list(samples))


def forward(model: Callable[..., Any], inputs: Any) -> Any:
    """Call a model with a tensor, a tuple (`*args`) or a dict (`**kwargs`). Hugging Face's logits are unwrapped."""
    if isinstance(inputs, Arguments):
        result = model(**inputs, **inputs.beside)
    elif isinstance(inputs, dict):
        result = model(**inputs)
    elif isinstance(inputs, tuple | list):
        result = model(*inputs)
    else:
        result = model(inputs)
    return result if isinstance(result, torch.Tensor) else getattr(result, "logits", result)


def _like(container: tuple[Tree, ...] | list[Tree], items: list[Tree]) -> Tree:
    if hasattr(container, "_fields"):
        return type(container)(*items)
    return tuple(items) if isinstance(container, tuple) else items
