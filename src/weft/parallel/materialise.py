"""Giving a model that was built on the meta device memory and first values, if need be one flat buffer at a time.

A model larger than a rank's memory is built under `torch.device("meta")`: all shapes, no memory. While a flat buffer is
made, only its parameters have memory, and `reset_parameters()` of every layer concerned runs, inner layers first, the
model's own last. Everything else is on the meta device meanwhile, where it does nothing. New memory is full of NaN, so
what nobody filled is found and named. Random numbers start from one seed on all ranks: every rank computes the same
values and keeps its part of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from weft.comm.collectives import broadcast
from weft.errors import ModelError
from weft.mesh import Mesh
from weft.parallel.units import Members

_SEEDS_A_STAGE = 1_000_003
"""Two blocks on different stages must not start with the same values."""

Replacements = dict[nn.Parameter, nn.Parameter]
Cut = Callable[[str, torch.Tensor], torch.Tensor]


def is_on_meta(model: nn.Module) -> bool:
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


class Materialiser:
    """Fills the parameters and buffers of a model that are on the meta device; what is elsewhere is left alone."""

    def __init__(self, model: nn.Module, mesh: Mesh, cut: Cut | None = None) -> None:
        """Collective. Buffers get memory at once. `cut`: of a tensor by name, what of it this rank keeps."""
        self._cut = cut
        self._model = model
        self._device = mesh.world.device
        self._num_filled = 0
        self._made: Replacements = {}
        self._stand_ins: Replacements = {}
        self._is_needed = is_on_meta(model)
        if not self._is_needed:
            return
        self._seed = torch.randint(2**31, (1,)).to(self._device)
        for group in (mesh.batch_group("control"), mesh.group("tensor", "control")):
            broadcast(self._seed, group)
        self._seed += mesh.index("pipeline") * _SEEDS_A_STAGE
        self._stand_ins = {p: _make_like(p, torch.device("meta")) for p in model.parameters() if not p.is_meta}
        empty = {name for name, buffer in model.named_buffers() if buffer.is_meta}
        _fill_buffers(model, self._device)
        self._keep_shares({name: buffer for name, buffer in model.named_buffers() if name in empty})

    def fill_all(self) -> None:
        """Give the whole model memory and values."""
        self._fill({p: _make_like(p, self._device) for p in self._model.parameters() if p.is_meta})
        self._refuse_unfilled(dict(self._model.named_buffers()))

    def fill(self, parameters: Collection[nn.Parameter]) -> None:
        """Give some of the parameters memory and values; they stay in the model."""
        self._fill({p: _make_like(p, self._device) for p in parameters if p.is_meta})

    @contextmanager
    def filling(self, members: Members) -> Iterator[Members]:
        """The same members with memory and values. Until `finish`, the model itself goes back to the meta device."""
        made = {p: _make_like(p, self._device) for _, p in members.named if p.is_meta}
        if not made:
            yield members
            return
        self._fill(made)
        yield dataclasses.replace(members, named=tuple((name, made.get(p, p)) for name, p in members.named))
        self._install({new: old for old, new in made.items()})
        self._made |= made

    def finish(self) -> None:
        """Put all that was made into the model."""
        self._install(self._made)
        self._refuse_unfilled(dict(self._model.named_buffers()))

    def _fill(self, made: Replacements) -> None:
        if not made:
            return
        self._install(made)
        self._install(self._stand_ins)
        self._initialise()
        self._install({stand_in: own for own, stand_in in self._stand_ins.items()})
        new = set(made.values())
        filled = {name: p for name, p in self._model.named_parameters() if p in new}
        self._refuse_unfilled(filled)
        self._keep_shares(filled)

    def _keep_shares(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Whole tensors were filled, so that their values do not depend on who keeps what of them."""
        if self._cut is not None:
            for name, tensor in tensors.items():
                tensor.data = self._cut(name, tensor.data)

    def _install(self, new_of: Replacements) -> None:
        """Replace parameters wherever they appear, tied ones in every place."""
        if not new_of:
            return
        for module in self._model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter in new_of:
                    module._parameters[name] = new_of[parameter]

    def _initialise(self) -> None:
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            torch.manual_seed(int(self._seed) + self._num_filled)  # two blocks must not start with the same values
            for module in reversed(list(self._model.modules())):
                if any(not parameter.is_meta for parameter in module.parameters()):
                    _reset(module)
        self._num_filled += 1

    def _refuse_unfilled(self, tensors: Mapping[str, torch.Tensor]) -> None:
        if not self._is_needed:
            return
        empty = [name for name, t in tensors.items() if t.is_floating_point() and bool(t.detach().isnan().any())]
        if empty:
            raise ModelError(
                [
                    f'"{name}" was on the meta device, and no reset_parameters() of its layer or of the model gives it '
                    "its first values; write one, or build the model with memory"
                    for name in empty
                ]
            )


def _make_like(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    memory = torch.empty_like(parameter, device=device)
    if parameter.is_floating_point():
        memory.fill_(float("nan"))
    return nn.Parameter(memory, requires_grad=parameter.requires_grad)


def _fill_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        if not any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            continue
        is_bare = not any(True for _ in module.parameters(recurse=False))
        if is_bare and type(module)._apply is not nn.Module._apply:
            module.to_empty(device=device, recurse=False)  # a layer that computes its tables when it is moved
            continue
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                value = float("nan") if buffer.is_floating_point() else 0
                module._buffers[name] = torch.full_like(buffer, value, device=device)
        if isinstance(module, _NormBase):
            module.reset_running_stats()
        elif is_bare:
            _reset(module)


def _reset(module: nn.Module) -> None:
    reset: Callable[[], None] | None = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))
    if reset is not None:
        reset()
