"""What each part of a model costs on this device, found by running each kind of part once, alone: for balanced stages.

A model may be larger than the device and have no memory yet (the meta device), so every part is timed as a copy with
memory of its own, which is let go before the next one is made. What has no values gets random ones, since only shapes
matter to time. Parts that look alike are timed once: equal blocks cost the same, to the last digit, and a model of 96
of them takes no longer than a model of two.

Looking alike means: the same layers as their `repr` shows them, the same shapes and dtypes of parameters, buffers and
inputs. Two blocks that differ only in a plain attribute that no `repr` shows are taken for one. What selective
recomputation keeps is outside autograd and does not count as an activation here.

Where the device is the meta device (an imagined world), nothing runs: operations of the forward pass are counted
instead, by shapes, and activations are not, since they depend on which kernels a real device would choose.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import statistics
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from weft.plan.pipeline.stage_cuts import BlockCost

log = logging.getLogger("weft")

_FEWEST_RUNS, _MOST_RUNS = 3, 5
_BUDGET_S = 0.05
_NOMINAL_BYTES_PER_S = 1e9
_NOMINAL_FLOPS_PER_S = 1e12
"""Turn bytes or operations into a time where nothing could be timed; only proportions matter then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A part of a model, and what it is called with for one microbatch.

    Examples on the meta device say a shape, a dtype and whether a gradient flows back; others are used as they are.
    """

    name: str
    module: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def time_units(units: Sequence[Unit], device: torch.device) -> list[BlockCost]:
    """The cost of each unit on this device: forward and backward of one microbatch, parameters, what autograd saves.

    The modules and the random state are left as they are. If a unit cannot be run alone, all of them are weighed by
    their parameters instead, with a warning.
    """
    known: dict[Hashable, BlockCost] = {}
    costs = []
    for unit in units:
        look = _look(unit)
        if look not in known:
            try:
                known[look] = _count_unit(unit) if device.type == "meta" else _time_unit(unit, device)
            except Exception as error:  # whatever a stranger's module may raise, out of memory included
                reason = str(error).partition("\n")[0]
                log.warning(
                    f'"{unit.name}" cannot be timed alone ({type(error).__name__}: {reason}); stages are balanced by '
                    "parameter bytes instead of time; set [pipeline] cuts to choose them yourself"
                )
                return [_weigh(each.module) for each in units]
        costs.append(known[look])
    return costs


@torch.no_grad()
def _count_unit(unit: Unit) -> BlockCost:
    args, kwargs = tree_map(_without_memory, (unit.args, dict(unit.kwargs)))
    with FlopCounterMode(display=False) as counter:
        unit.module(*args, **kwargs)
    return BlockCost(time_s=counter.get_total_flops() / _NOMINAL_FLOPS_PER_S, state_bytes=_num_bytes(unit.module))


def _without_memory(leaf: Any) -> Any:
    return leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf


def _weigh(module: nn.Module) -> BlockCost:
    state_bytes = _num_bytes(module)
    return BlockCost(time_s=state_bytes / _NOMINAL_BYTES_PER_S, state_bytes=state_bytes)


def _num_bytes(module: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


def _look(unit: Unit) -> Hashable:
    """Equal for units that cost the same."""
    leaves, structure = tree_flatten((unit.args, dict(unit.kwargs)))
    inside = (*unit.module.named_parameters(), *unit.module.named_buffers())
    return (
        repr(unit.module),
        tuple((type(module), module.training) for module in unit.module.modules()),
        tuple((name, _shape(tensor)) for name, tensor in inside),
        tuple(_shape(leaf) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves),
        repr(structure),
    )


def _shape(tensor: torch.Tensor) -> Hashable:
    return tuple(tensor.shape), tensor.dtype, tensor.requires_grad


def _time_unit(unit: Unit, device: torch.device) -> BlockCost:
    devices = [device] if device.type == "cuda" else []
    # Dropout draws from the global random state, and so may anything else a module does.
    with torch.random.fork_rng(devices=devices), torch.enable_grad(), _copied(unit.module, device) as module:
        args, kwargs = tree_map(lambda leaf: _make_input(leaf, device), (unit.args, dict(unit.kwargs)))
        run = _Run(module, args, kwargs, device)
        activation_bytes = run.warm_up()
        times: list[float] = []
        while len(times) < (_MOST_RUNS if sum(times) < _BUDGET_S else _FEWEST_RUNS):
            times.append(run.seconds())
    return BlockCost(
        time_s=statistics.median(times), state_bytes=_num_bytes(unit.module), activation_bytes=activation_bytes
    )


class _Run:
    """Forward and backward of a module with fixed inputs, again and again.

    Gradients are kept from run to run, as they are from microbatch to microbatch.
    """

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> None:
        self._module, self._args, self._kwargs, self._device = module, args, kwargs, device
        self._gradients: list[torch.Tensor] = []

    def warm_up(self) -> int:
        """The first run, which takes longer than those after it. Returns the bytes that wait for the backward pass."""
        inputs = [leaf for leaf in tree_leaves((self._args, self._kwargs)) if isinstance(leaf, torch.Tensor)]
        flowing = [tensor for tensor in inputs if tensor.requires_grad]
        # What all blocks are given alike (masks, tables of positions) is there once, whoever saves it.
        shared = [tensor for tensor in inputs if not tensor.requires_grad]
        # Recomputation holds on to the inputs outside autograd.
        sizes = _storages(flowing)

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            sizes.update(_storages([tensor]))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs = self._forward()
        self._gradients = [torch.ones_like(output) for output in outputs]
        self._backward(outputs)
        others = _storages([*self._module.parameters(), *self._module.buffers(), *shared])
        return sum(num_bytes for storage, num_bytes in sizes.items() if storage not in others)

    def seconds(self) -> float:
        self._synchronise()
        started = time.perf_counter()
        self._backward(self._forward())
        self._synchronise()
        return time.perf_counter() - started

    def _forward(self) -> list[torch.Tensor]:
        outputs = tree_leaves(self._module(*self._args, **self._kwargs))
        return [output for output in outputs if isinstance(output, torch.Tensor) and output.requires_grad]

    def _backward(self, outputs: list[torch.Tensor]) -> None:
        if outputs:
            torch.autograd.backward(outputs, self._gradients)

    def _synchronise(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _storages(tensors: Sequence[torch.Tensor]) -> dict[int, int]:
    """Bytes of what lies behind these tensors, by address: views of one memory count once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


@contextlib.contextmanager
def _copied(module: nn.Module, device: torch.device) -> Iterator[nn.Module]:
    """A copy with memory on the device. What has no values gets random ones."""
    generator = torch.Generator(device).manual_seed(0)
    made: dict[int, Any] = {}
    for parameter in module.parameters():
        # Such that activations stay about as large as they come in: numbers near zero are slow on some processors.
        fan_in = math.prod(parameter.shape[1:])
        values = _make_like(parameter, device, generator, std=max(fan_in, 1) ** -0.5)
        made[id(parameter)] = nn.Parameter(values, requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        made[id(buffer)] = torch.ones_like(buffer, device=device) if buffer.is_meta else buffer.to(device, copy=True)
    meta_copy = copy.deepcopy(module, made)
    try:
        yield meta_copy
    finally:
        # Modules may refer to themselves (recomputed blocks do), and such circles live until the next collection.
        meta_copy.to("meta")


def _make_input(leaf: Any, device: torch.device) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    values = _make_like(leaf, device, torch.Generator(device).manual_seed(0), std=1.0)
    return values.requires_grad_(leaf.requires_grad)


def _make_like(tensor: torch.Tensor, device: torch.device, generator: torch.Generator, *, std: float) -> torch.Tensor:
    """The same values on the device, if there are any; else random ones, and zeros where numbers are whole."""
    if not tensor.is_meta:
        return tensor.detach().to(device, copy=True)
    if tensor.is_floating_point() or tensor.is_complex():
        return torch.empty_like(tensor, device=device, requires_grad=False).normal_(std=std, generator=generator)
    return torch.zeros_like(tensor, device=device)
