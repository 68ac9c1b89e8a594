"""First values of a model that was built without memory, the same under every plan.

A layer's own `reset_parameters()` initialises it; in a Hugging Face model `_init_weights(layer)` does, which also knows
tables that are in no file of weights (rotary frequencies, position numbers).

Every draw starts from a seed of its own, made of the run's seed, the names of the layer and the tensor, and how often
this layer has drawn this tensor. So a tensor's values do not depend on which others have memory meanwhile, and any plan
starts from the values of one process. Values that a layer draws into a temporary and copies in (`orthogonal_` does)
depend on the layer's name, and on which of its tensors have memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._python_dispatch import TorchDispatchMode

from weft.models.hugging_face_inputs import hugging_face_class

_NEITHER = 2
"""The byte that marks a boolean as uninitialised; a real one is 0 or 1."""


class InitValues:
    """Initialises the tensors of one model."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        self._model = model
        self._seed = seed
        self._hugging_face = _hugging_face_owners(model)

    def fill(self, parameters: Mapping[str, nn.Parameter], device: torch.device) -> None:
        """Initialise parameters, given under all of their names; all others must be on the meta device."""
        draws = _SeededDraws(self._seed, parameters)
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), torch.no_grad(), draws:
            for name, module in _holders(self._model, parameters):
                draws.enter(name)
                self._reset(name, module)

    def fill_buffers(self, device: torch.device) -> None:
        """Give buffers on the meta device memory and values."""
        for name, module in self._model.named_modules():
            if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
                self._fill_buffers_of(name, module, device)

    def _fill_buffers_of(self, name: str, module: nn.Module, device: torch.device) -> None:
        is_bare = not any(True for _ in module.parameters(recurse=False))
        owner = self._hugging_face.get(name)
        if owner is None and is_bare and type(module)._apply is not nn.Module._apply:
            module.to_empty(device=device, recurse=False)  # the layer computes its tables when it is moved
            return
        for buffer_name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[buffer_name] = unfilled_like(buffer, device)
        if isinstance(module, _NormBase):
            module.reset_running_stats()
        elif owner is not None:
            with torch.no_grad():
                owner._init_weights(module)
        elif is_bare:
            _reset(module)

    def _reset(self, name: str, module: nn.Module) -> None:
        owner = self._hugging_face.get(name)
        if owner is None:
            _reset(module)
            return
        owner._init_weights(module)
        # Some models leave a layer, or some of its tensors, as torch's constructor initialised them.
        own = [p.detach() for p in module.parameters(recurse=False) if not p.is_meta]
        given = [tensor for tensor in own if not is_unfilled(tensor)]
        if len(given) < len(own):
            before = [tensor.clone() for tensor in given]
            _reset(module)
            for tensor, values in zip(given, before, strict=True):
                tensor.copy_(values)


def unfilled_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """New memory of a tensor's shape, full of NaN or of a mark that stands for it."""
    if tensor.is_floating_point() or tensor.is_complex():
        return torch.full_like(tensor, float("nan"), device=device)
    if tensor.dtype == torch.bool:
        return torch.full_like(tensor, _NEITHER, device=device, dtype=torch.uint8).view(torch.bool)
    info = torch.iinfo(tensor.dtype)
    return torch.full_like(tensor, info.min or info.max, device=device)


def is_unfilled(tensor: torch.Tensor) -> bool:
    """True if a tensor still holds the mark: anywhere, or everywhere for integers, where the mark may be a value."""
    if not tensor.numel():
        return False
    if tensor.dtype == torch.bool:
        return bool((tensor.view(torch.uint8) == _NEITHER).any())
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().any())
    info = torch.iinfo(tensor.dtype)
    return bool((tensor == (info.min or info.max)).all())


class _SeededDraws(TorchDispatchMode):
    """Seeds the random state for each draw, by the tensor that is drawn."""

    def __init__(self, seed: int, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed = seed
        # A tied parameter goes by its first name.
        named = reversed(list(parameters.items()))
        self._names = {p.untyped_storage().data_ptr(): name for name, p in named if p.numel()}
        self._owned = list(parameters)
        self._layer = self._first = ""
        self._counts: dict[str, int] = {}

    def enter(self, layer: str) -> None:
        """Begin a layer: draws that are not into a parameter count as its own."""
        prefix = f"{layer}." if layer else ""
        self._layer, self._first = layer, next((name for name in self._owned if name.startswith(prefix)), "")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None:
            drawn = args[0] if args and isinstance(args[0], torch.Tensor) else None
            if drawn is None or not drawn.is_meta:
                self._start(drawn)
        return func(*args, **kwargs)

    def _start(self, drawn: torch.Tensor | None) -> None:
        name = None if drawn is None else self._names.get(drawn.untyped_storage().data_ptr())
        key = f"{self._layer} with {self._first}" if name is None else f"{self._layer} into {name}"
        number = self._counts[key] = self._counts.get(key, 0) + 1
        digest = hashlib.blake2b(f"{self._seed} {number} {key}".encode(), digest_size=8).digest()
        torch.manual_seed(int.from_bytes(digest, "little") >> 1)


def _holders(model: nn.Module, names: Collection[str]) -> Iterable[tuple[str, nn.Module]]:
    """The modules that have any of these parameters, inner ones first, the model last."""
    wanted = {""}
    for name in names:
        path = name.split(".")
        wanted |= {".".join(path[:end]) for end in range(1, len(path))}
    return [(name, module) for name, module in reversed(list(model.named_modules())) if name in wanted]


def _hugging_face_owners(model: nn.Module) -> dict[str, Any]:
    """The innermost Hugging Face model around each module that is in one, by the module's name."""
    kind = hugging_face_class()
    owners: dict[str, Any] = {}
    if kind is not None:
        for name, module in model.named_modules():
            owner = module if isinstance(module, kind) else owners.get(name.rpartition(".")[0])
            if owner is not None:
                owners[name] = owner
    return owners


def _reset(module: nn.Module) -> None:
    reset: Callable[[], None] | None = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))
    if reset is not None:
        reset()
