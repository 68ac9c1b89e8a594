"""The cost of each part of a model on this device, measured by running each kind of part alone, for balanced stages.

A model may be larger than the device and on the meta device, so each part is timed as a copy with memory of its own,
freed before the next copy is made. Parameters without values get random ones, since only shapes matter to time. Parts
with the same `repr`, and the same shapes and dtypes of parameters, buffers and inputs, are timed once: equal blocks get
exactly equal costs, and a model of 96 takes no longer than one of two. Blocks that differ only in an attribute that no
`repr` shows count as equal. What selective recomputation keeps is outside autograd and is not counted as an activation.

On the meta device (a fake world) nothing runs: operations of the forward pass are counted by shapes, and activations
are not, since they depend on the kernels that a real device would choose.
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
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from weft.parallel.wrapping.host_random import HostRandom
from weft.plan.pipeline.stage_cuts import BlockCost

log = logging.getLogger("weft")

_FEWEST_RUNS, _MOST_RUNS = 3, 5
_BUDGET_S = 0.05
_NOMINAL_BYTES_PER_S = 1e9
_NOMINAL_FLOPS_PER_S = 1e12
"""Rates that turn bytes or operations into a time where nothing was timed; only proportions matter then."""


@dataclass(frozen=True, slots=True)
class Unit:
    """A part of a model and its arguments for one microbatch.

    Of arguments on the meta device only shape, dtype and requires_grad count; others are used as they are.
    """

    name: str
    module: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def time_units(units: Sequence[Unit], device: torch.device) -> list[BlockCost]:
    """The cost of each unit on this device: forward and backward of one microbatch, parameters, what autograd saves.

    The modules and the random state are unchanged. If a unit cannot be run alone, the costs of all follow from their
    parameters instead, with a warning.
    """
    known: dict[Hashable, BlockCost] = {}
    costs = []
    for unit in units:
        key = _key(unit)
        if key not in known:
            try:
                known[key] = _count_unit(unit) if device.type == "meta" else _time_unit(unit, device)
            except Exception as error:  # whatever a user's module may raise, out of memory included
                reason = str(error).partition("\n")[0]
                log.warning(
                    f'"{unit.name}" cannot be timed alone ({type(error).__name__}: {reason}); stages are balanced by '
                    "parameter bytes instead of time; set [pipeline] cuts to choose them yourself"
                )
                sizes = [_num_bytes(each.module) for each in units]
                return [BlockCost(time_s=size / _NOMINAL_BYTES_PER_S, state_bytes=size) for size in sizes]
        costs.append(known[key])
    return costs


@torch.no_grad()
def _count_unit(unit: Unit) -> BlockCost:
    args, kwargs = tree_map_only(torch.Tensor, lambda leaf: leaf.to("meta"), (unit.args, dict(unit.kwargs)))
    with FlopCounterMode(display=False) as counter:
        unit.module(*args, **kwargs)
    return BlockCost(time_s=counter.get_total_flops() / _NOMINAL_FLOPS_PER_S, state_bytes=_num_bytes(unit.module))


def _num_bytes(module: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


def _key(unit: Unit) -> Hashable:
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
    ours = torch.random.fork_rng(devices=devices)
    with ours, HostRandom().kept(), torch.enable_grad(), _copied(unit.module, device) as module:
        arguments = tree_map_only(torch.Tensor, lambda leaf: _make_input(leaf, device), (unit.args, dict(unit.kwargs)))
        run = _Run(module, *arguments)
        activation_bytes = run.warm_up()  # the first run takes longer than those after it
        times: list[float] = []
        while len(times) < (_MOST_RUNS if sum(times) < _BUDGET_S else _FEWEST_RUNS):
            _synchronise(device)
            started = time.perf_counter()
            run.backward(run.forward())
            _synchronise(device)
            times.append(time.perf_counter() - started)
    return BlockCost(
        time_s=statistics.median(times), state_bytes=_num_bytes(unit.module), activation_bytes=activation_bytes
    )


class _Run:
    """Repeated forward and backward passes of a module with fixed inputs; gradients accumulate, as in a step."""

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._module, self._args, self._kwargs = module, args, kwargs
        self._gradients: list[torch.Tensor] = []

    def warm_up(self) -> int:
        """Run once; returns the bytes saved for the backward pass."""
        inputs = [leaf for leaf in tree_leaves((self._args, self._kwargs)) if isinstance(leaf, torch.Tensor)]
        # Recomputation keeps the inputs outside autograd.
        sizes = _storages([tensor for tensor in inputs if tensor.requires_grad])

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            sizes.update(_storages([tensor]))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs = self.forward()
        self._gradients = [torch.ones_like(output) for output in outputs]
        self.backward(outputs)
        # Inputs of all blocks (masks, tables of positions) exist once, whichever block saves them.
        shared = [tensor for tensor in inputs if not tensor.requires_grad]
        others = _storages([*self._module.parameters(), *self._module.buffers(), *shared])
        return sum(num_bytes for storage, num_bytes in sizes.items() if storage not in others)

    def forward(self) -> list[torch.Tensor]:
        outputs = tree_leaves(self._module(*self._args, **self._kwargs))
        return [output for output in outputs if isinstance(output, torch.Tensor) and output.requires_grad]

    def backward(self, outputs: list[torch.Tensor]) -> None:
        if outputs:
            torch.autograd.backward(outputs, self._gradients)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _storages(tensors: Sequence[torch.Tensor]) -> dict[int, int]:
    """The size of each storage behind these tensors, by address."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


@contextlib.contextmanager
def _copied(module: nn.Module, device: torch.device) -> Iterator[nn.Module]:
    """A copy with memory on the device; parameters without values get random ones."""
    generator = torch.Generator(device).manual_seed(0)
    made: dict[int, Any] = {}
    for parameter in module.parameters():
        # Scaled so that activations keep their size: denormal numbers are slow on some processors.
        fan_in = math.prod(parameter.shape[1:])
        values = _make_like(parameter, device, generator, std=max(fan_in, 1) ** -0.5)
        made[id(parameter)] = nn.Parameter(values, requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        made[id(buffer)] = torch.ones_like(buffer, device=device) if buffer.is_meta else buffer.to(device, copy=True)
    meta_copy = copy.deepcopy(module, made)
    try:
        yield meta_copy
    finally:
        # Modules may refer to themselves (recomputed blocks do); such cycles live until the next garbage collection.
        meta_copy.to("meta")


def _make_input(leaf: torch.Tensor, device: torch.device) -> torch.Tensor:
    values = _make_like(leaf, device, torch.Generator(device).manual_seed(0), std=1.0)
    return values.requires_grad_(leaf.requires_grad)


def _make_like(tensor: torch.Tensor, device: torch.device, generator: torch.Generator, *, std: float) -> torch.Tensor:
    """The same values on the device; for a meta tensor random ones, or zeros if it holds integers."""
    if not tensor.is_meta:
        return tensor.detach().to(device, copy=True)
    if tensor.is_floating_point() or tensor.is_complex():
        return torch.empty_like(tensor, device=device, requires_grad=False).normal_(std=std, generator=generator)
    return torch.zeros_like(tensor, device=device)
