"""Memory and first values for a model that was built on the meta device, if need be one flat buffer at a time.

While a flat buffer is made, only its parameters have memory, and the layers concerned initialise them
(`init_values.py`), inner layers first, the model itself last. Everything else stays on the meta device meanwhile, where
initialisation has no effect. New memory is full of NaN, so that tensors nothing initialises are found and named. Random
numbers follow from torch's seed, the same on all ranks, and from a tensor's name: every rank computes the same values,
under any plan (except layers that draw elsewhere and copy in, see `init_values.py`), and keeps its part of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from weft.comm.collectives import broadcast
from weft.comm.objects import gather_values
from weft.errors import ModelError
from weft.mesh import Mesh
from weft.parallel.state.init_values import InitValues, is_unfilled, unfilled_like

_PORTION_BYTES = 256 * 2**20
"""Most bytes of whole tensors in memory at once, where a rank keeps a part of each."""

Replacements = dict[nn.Parameter, nn.Parameter]
Cut = Callable[[str, torch.Tensor], torch.Tensor]
Draws = Callable[[str], bool]
"""Tells by a parameter's name whether it gets first values; others are read from a file later."""


def model_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers by name."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def is_on_meta(model: nn.Module) -> bool:
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


@contextmanager
def agreed_seed(model: nn.Module, mesh: Mesh) -> Iterator[None]:
    """Context in which all ranks have one random state, drawn from the first rank's, if the model needs first values;
    collective."""
    if mesh.world.is_fake:
        yield
        return
    device = mesh.world.device
    num_empty = sum(tensor.is_meta for _, tensor in model_tensors(model))
    counts = set(gather_values(num_empty, mesh.everyone("control")))
    if len(counts) > 1:
        raise ModelError(
            "some ranks built the model on the meta device and others did not; build it the same way on all"
        )
    if counts == {0}:
        yield
        return
    seed = torch.tensor([draw_seed()])
    broadcast(seed, mesh.everyone("control"))
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(int(seed))
        yield


def draw_seed() -> int:
    """A seed of first values, drawn from torch's random state."""
    return int(torch.randint(2**31, (1,)))


def fill_alone(model: nn.Module, seed: int, device: torch.device) -> None:
    """Give a whole model on the meta device the first values that ranks give their parts of it."""
    Materialiser(model, device, seed=seed).fill_all()


class Materialiser:
    """Initialises the parameters and buffers of a model that are on the meta device, and no others."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        cut: Cut | None = None,
        *,
        seed: int | None = None,
        draws: Draws = lambda name: True,
        with_buffers: bool = True,
    ) -> None:
        """Give buffers memory and values, unless `with_buffers` leaves them to a second materialiser.

        `cut` takes this rank's part of a whole tensor, by name. The seed, by default torch's, must be the same on all
        ranks. Parameters of which `draws` says no are zero until they are read from a file.
        """
        self._cut = cut
        self._model = model
        self._device = device
        self._draws = draws
        self._made: Replacements = {}
        self._buffers: dict[str, torch.Tensor] = {}
        is_fake = device.type == "meta"
        self._is_needed = is_on_meta(model) and not is_fake
        if is_fake:  # nothing gets values, but everything its shape
            self._keep_shares(dict(model_tensors(model)))
        if not self._is_needed:
            return
        self._places = _find_places(model)
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        self._placeholders = {p: _make_like(p, torch.device("meta")) for p in model.parameters() if not p.is_meta}
        self._values = InitValues(model, torch.initial_seed() if seed is None else seed)
        if not with_buffers:
            return
        empty = [name for name, buffer in model.named_buffers() if buffer.is_meta]
        self._install(self._placeholders)  # or layers would initialise these again
        self._values.fill_buffers(self._device)
        self._install({placeholder: own for own, placeholder in self._placeholders.items()})
        self._buffers = {name: model.get_buffer(name) for name in empty}
        self._keep_shares(self._buffers)

    def fill_all(self) -> None:
        """Give the whole model memory and values, with little more memory at any time than this rank keeps."""
        for some in self._portions():
            made = self.fill(some)
            self._install({new: old for old, new in made.items()})  # or later portions would initialise these again
            self._made |= made
        self.finish()

    @contextmanager
    def filling(self, parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
        """The same parameters with memory and values. Until `finish`, the model itself goes back to the meta device."""
        made = self.fill(parameters)
        yield [made.get(parameter, parameter) for parameter in parameters]
        self._install({new: old for old, new in made.items()})
        self._made |= made

    def finish(self) -> None:
        """Put all initialised parameters into the model."""
        self._install(self._made)
        self._made = {}
        _refuse_unfilled(self._buffers)

    def _portions(self) -> Iterator[list[nn.Parameter]]:
        """Parameters without memory: all at once, if this rank keeps whole tensors."""
        empty = [parameter for parameter in self._model.parameters() if parameter.is_meta]
        if self._cut is None:
            yield empty
            return
        portion: list[nn.Parameter] = []
        for parameter in empty:
            if portion and sum(one.nbytes for one in portion) + parameter.nbytes > _PORTION_BYTES:
                yield portion
                portion = []
            portion.append(parameter)
        yield portion

    def fill(self, parameters: Collection[nn.Parameter]) -> Replacements:
        """Give some parameters memory and values, in the model; returns the new one for each that had none."""
        empty = [parameter for parameter in parameters if self._is_needed and parameter.is_meta]
        if not empty:
            return {}
        made = self._fill_drawn([p for p in empty if self._draws(self._names[p])])
        read = {p: self._make_share(p) for p in empty if p not in made}
        self._install(read)
        return made | read

    def _fill_drawn(self, empty: list[nn.Parameter]) -> Replacements:
        if not empty:
            return {}
        made = {p: _make_like(p, self._device) for p in empty}
        self._install(made)
        self._install(self._placeholders)
        new = set(made.values())
        named = {name: p for name, p in self._model.named_parameters(remove_duplicate=False) if p in new}
        self._values.fill(named, self._device)
        self._install({placeholder: own for own, placeholder in self._placeholders.items()})
        filled = {self._names[old]: p for old, p in made.items()}
        _refuse_unfilled(filled)
        self._keep_shares(filled)
        return made

    def _make_share(self, parameter: nn.Parameter) -> nn.Parameter:
        """This rank's part of a parameter, zero."""
        kept = parameter.detach() if self._cut is None else self._cut(self._names[parameter], parameter.detach())
        return nn.Parameter(torch.zeros_like(kept, device=self._device), requires_grad=parameter.requires_grad)

    def _keep_shares(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Cut tensors that were initialised whole, so that values do not depend on the plan."""
        if self._cut is not None:
            for name, tensor in tensors.items():
                tensor.data = self._cut(name, tensor.data)

    def _install(self, new_of: Replacements) -> None:
        """Replace parameters wherever they appear, tied ones in every place."""
        for old, new in new_of.items():
            places = self._places.pop(old)
            for module, name in places:
                module._parameters[name] = new
            self._places[new] = places


def _refuse_unfilled(tensors: Mapping[str, torch.Tensor]) -> None:
    if empty := [name for name, tensor in tensors.items() if is_unfilled(tensor.detach())]:
        raise ModelError(
            [
                f'"{name}" was on the meta device, and no reset_parameters() of its layer or of the model, nor a '
                "Hugging Face model's _init_weights(), gives it its first values; write one, or build the model with "
                "memory"
                for name in empty
            ]
        )


def _find_places(model: nn.Module) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
    """Modules and names under which each parameter is registered."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(parameter, []).append((module, name))
    return places


def _make_like(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    return nn.Parameter(unfilled_like(parameter.detach(), device), requires_grad=parameter.requires_grad)
