"""An optimizer as plain data: its class by name and the settings of its parameter groups.

Workers have the user's optimizer and servers make the updates, so the optimizer travels: never as a pickle, but as a
name that is looked up in torch.optim and weft.optim alone, and numbers. Its own `lr` schedule stays with the workers,
who send its factor with every gradient.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from weft.errors import JobError

LIBRARIES = ("torch.optim", "weft.optim")
NOT_SENT = ("params", "initial_lr", "foreach", "fused", "capturable")
"""Entries of a parameter group that say how a worker would compute, or are of its schedule."""
Spec = dict[str, Any]


def describe_optimizer(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> Spec:
    """Class, settings and members of every group; `names`: those of its parameters, by identity."""
    kind = type(optimizer)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if not _is_known(name):
        raise JobError(
            f"servers make the updates, and know the optimizers of {' and '.join(LIBRARIES)} alone, not {name}; use "
            'one of these, or set [data] sync to "all-reduce"'
        )
    groups, problems = [], []
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key not in NOT_SENT}
        for key, value in settings.items():
            if isinstance(value, torch.Tensor):
                settings[key] = value = value.item() if value.numel() == 1 else value
            if not _is_plain(value):
                problems.append(
                    f"{kind.__name__}: {key} is a {type(value).__name__}, which cannot be sent to a server; give a "
                    "number"
                )
        groups.append({"settings": settings, "tensors": [names[id(one)] for one in group["params"]]})
    if problems:
        raise JobError(list(dict.fromkeys(problems)))
    return {"class": name, "groups": groups}


def make_optimizer(spec: Spec, parameters: Mapping[str, Sequence[torch.Tensor]]) -> torch.optim.Optimizer:
    """The optimizer of a server; `parameters`: the parts that it holds of each tensor, by the tensor's name.

    Raises JobError for a class that is not one of the libraries', or settings that it does not take.
    """
    name = spec.get("class")
    if not isinstance(name, str) or not _is_known(name):
        raise JobError(f"{name!r} is no optimizer of {' or '.join(LIBRARIES)}")
    module, _, attribute = name.rpartition(".")
    try:
        kind = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError):
        raise JobError(f"this server's torch {torch.__version__} has no optimizer {name}") from None
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise JobError(f"{name} is no optimizer")
    groups: list[dict[str, Any]] = []
    for group in spec["groups"]:
        members = [part for tensor in group["tensors"] for part in parameters.get(tensor, ())]
        settings = {key: tuple(value) if isinstance(value, list) else value for key, value in group["settings"].items()}
        groups.append({"params": members, **settings})
    defaults = {"lr": groups[0]["lr"]} if groups and "lr" in groups[0] else {}
    try:
        made: torch.optim.Optimizer = kind(groups, **defaults)
    except Exception as error:  # whatever a constructor makes of settings that are not its own
        raise JobError(f"{name} does not take these settings: {error}") from None
    return made


def try_optimizer(spec: Spec, names: Sequence[str]) -> bool:
    """Make an update of tensors of two elements; raises JobError if a server could not. True if the optimizer needs
    norms of whole tensors, which must then be on one server each."""
    tensors = {name: [torch.ones(2, requires_grad=True)] for name in names}
    optimizer = make_optimizer(spec, tensors)
    for held in tensors.values():
        held[0].grad = torch.ones(2)
    try:
        optimizer.step()
    except Exception as error:
        raise JobError(
            f"{spec['class']} cannot update on a server, which has flat parts of tensors and their gradients alone: "
            f"{error}; use another optimizer"
        ) from None
    return hasattr(optimizer, "use_norms")


def _is_known(name: str) -> bool:
    return any(name.startswith(f"{library}.") for library in LIBRARIES) and ".." not in name


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(one) for one in value)
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, bool | int | str)
