"""Giving a model that was built on the meta device memory and first values, if need be one flat buffer at a time.

A model larger than a rank's memory is built under `torch.device("meta")`: all shapes, no memory. While a flat buffer is
made, only its parameters have memory, and the model's own initialisation runs: `model.reset_parameters()` if there is
one, else that of each layer concerned. It does nothing to parameters on the meta device. Random numbers start from one
seed on all ranks, so every rank computes the same values and keeps its part of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from weft.comm.collectives import broadcast
from weft.errors import ModelError
from weft.mesh import Mesh
from weft.parallel.units import Members


def is_on_meta(model: nn.Module) -> bool:
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


class Materialiser:
    """Fills the parameters and buffers of a model that are on the meta device; a model elsewhere is left alone."""

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        """Collective. Buffers are filled at once."""
        self._model = model
        self._device = mesh.world.device
        self._num_filled = 0
        self._made: dict[nn.Parameter, nn.Parameter] = {}
        if not is_on_meta(model):
            return
        _refuse_unfillable(model)
        self._seed = torch.randint(2**31, (1,)).to(self._device)
        broadcast(self._seed, mesh.batch_group("control"))
        _fill_buffers(model, self._device)

    def fill_all(self) -> None:
        """Give the whole model memory and values."""
        on_meta = [parameter for parameter in self._model.parameters() if parameter.is_meta]
        if on_meta:
            self._install({parameter: self._make(parameter) for parameter in on_meta})
            self._initialise()

    @contextmanager
    def filling(self, members: Members) -> Iterator[Members]:
        """The same members with memory and values. Until `finish`, the model itself goes back to the meta device."""
        made = {parameter: self._make(parameter) for _, parameter in members.named if parameter.is_meta}
        if not made:
            yield members
            return
        self._install(made)
        self._initialise()
        yield dataclasses.replace(members, named=tuple((name, made.get(p, p)) for name, p in members.named))
        self._install({new: old for old, new in made.items()})
        self._made |= made

    def finish(self) -> None:
        """Put all that was made into the model."""
        self._install(self._made)

    def _make(self, parameter: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(torch.empty_like(parameter, device=self._device), requires_grad=parameter.requires_grad)

    def _install(self, new_of: dict[nn.Parameter, nn.Parameter]) -> None:
        """Replace parameters wherever they appear, tied ones in every place."""
        for module in self._model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter in new_of:
                    module._parameters[name] = new_of[parameter]

    def _initialise(self) -> None:
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            torch.manual_seed(int(self._seed) + self._num_filled)  # two blocks must not start with the same values
            if hasattr(self._model, "reset_parameters"):
                _reset(self._model)
            else:
                for module in self._model.modules():
                    if any(not parameter.is_meta for parameter in module.parameters(recurse=False)):
                        _reset(module)
        self._num_filled += 1


def _fill_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        if not any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            continue
        if not any(True for _ in module.parameters(recurse=False)):
            module.to_empty(device=device, recurse=False)  # lets a layer compute its tables in `_apply`
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.zeros_like(buffer, device=device)
        if isinstance(module, _NormBase):
            module.reset_running_stats()
        elif hasattr(module, "reset_parameters") and not any(True for _ in module.parameters(recurse=False)):
            _reset(module)


def _reset(module: nn.Module) -> None:
    reset: Callable[[], None] = module.reset_parameters  # type: ignore[assignment]
    reset()


def _refuse_unfillable(model: nn.Module) -> None:
    """Every layer on the meta device that nothing would give its values."""
    has_own = hasattr(model, "reset_parameters")
    problems = []
    for name, module in model.named_modules():
        fills_itself = hasattr(module, "reset_parameters")
        if any(p.is_meta for p in module.parameters(recurse=False)) and not (has_own or fills_itself):
            problems.append(f'parameters of "{name}" ({type(module).__name__})')
        recomputes = fills_itself or type(module)._apply is not nn.Module._apply
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)) and not recomputes:
            problems.append(f'buffers of "{name}" ({type(module).__name__})')
    if problems:
        raise ModelError(
            [
                f"the {problem} are on the meta device and nothing says what values they start with; give the layer or "
                "the model a reset_parameters(), or build the model with memory"
                for problem in problems
            ]
        )
