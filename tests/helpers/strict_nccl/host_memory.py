"""Which tensors would lie in the host's memory, where NCCL cannot go, if this machine had a device.

Everything is host memory here, so it is decided by where a tensor comes from: made by one of torch's functions without
a device, or brought back by `.cpu()`, it is the host's; `.to(device)` makes a copy that is not. What is computed from
tensors is taken for the device's. Only what is made inside `watch_host_memory` is known.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext, _device_constructors

from strict_nccl.sites import calling_site

_MAKERS = (
    "tensor as_tensor asarray from_numpy frombuffer zeros ones empty full "
    "arange linspace eye rand randn randint randperm"
).split()
_PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Others, such as fake tensors, have no memory."""

_known: dict[int, tuple[StorageWeakRef, str]] = {}
"""Storages of the host by their address, which a weak reference keeps from being used again, and who made them."""


def host_maker(tensor: torch.Tensor) -> str | None:
    """Where a tensor of the host was made; None for one of the device."""
    found = _known.get(tensor.untyped_storage()._cdata)
    return None if found is None else found[1]


def _mark(tensor: torch.Tensor) -> None:
    if len(_known) > 1000:
        for address in [address for address, (reference, _) in _known.items() if reference.expired()]:
            del _known[address]
    storage = tensor.untyped_storage()
    _known[storage._cdata] = (StorageWeakRef(storage), calling_site())


def _has_default_device() -> bool:
    """`with device:` or `torch.set_default_device`."""
    return any(isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack())


def _watched(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def made(*given: Any, **settings: Any) -> torch.Tensor:
        result = make(*given, **settings)
        keeps = given and isinstance(given[0], torch.Tensor)  # as_tensor(tensor) is where the tensor was
        if settings.get("device") is None and not keeps and type(result) is torch.Tensor and not _has_default_device():
            _mark(result)
        return result

    return made


def _names_device(given: tuple[Any, ...], settings: dict[str, Any]) -> bool:
    if settings.get("device") is not None:
        return True
    return bool(given) and isinstance(given[0], str | torch.device)


@contextmanager
def watch_host_memory() -> Iterator[None]:
    """Inside, tensors of the host are known."""
    _device_constructors()  # torch's own list of these functions, kept from its first use: of the real ones
    to, cpu = torch.Tensor.to, torch.Tensor.cpu

    @functools.wraps(to)
    def to_device(tensor: torch.Tensor, *given: Any, **settings: Any) -> torch.Tensor:
        moved = to(tensor, *given, **settings)
        if type(moved) in _PLAIN and _names_device(given, settings) and host_maker(moved) is not None:
            return moved.clone()
        return moved

    @functools.wraps(cpu)
    def to_host(tensor: torch.Tensor, *given: Any, **settings: Any) -> torch.Tensor:
        moved = cpu(tensor, *given, **settings)
        if type(moved) in _PLAIN and host_maker(moved) is None:
            moved = moved.clone()
            _mark(moved)
        return moved

    with ExitStack() as patches:
        for name in _MAKERS:
            patches.enter_context(mock.patch.object(torch, name, _watched(getattr(torch, name))))
        patches.enter_context(mock.patch.object(torch.Tensor, "to", to_device))
        patches.enter_context(mock.patch.object(torch.Tensor, "cpu", to_host))
        try:
            yield
        finally:
            _known.clear()
