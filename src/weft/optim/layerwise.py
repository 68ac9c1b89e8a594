"""The part that LARS and LAMB have in common: optimizers whose step for a tensor is scaled by norms of that tensor.

A step has two passes with one exchange between them at most (`tensor_norms.py`):

    first     moments are updated, and squares of the weight and of its update summed, tensor by tensor
    second    weights are updated, with a ratio per tensor

Both work on lists of tensors (`torch._foreach_*`), or on a GPU in Triton kernels (`layerwise_triton.py`), which also
leave everything as it is where `found_inf` says so, like torch's fused optimizers: the host never waits.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from weft.errors import JobError
from weft.layout import Range
from weft.optim.fused_kernels import find_kernels
from weft.optim.tensor_norms import TensorNorms

if TYPE_CHECKING:
    from weft.optim.layerwise_triton import Kernels


@dataclass(slots=True, kw_only=True)
class Batch:
    """Tensors of one parameter group, dtype and device that are updated together."""

    settings: Mapping[str, Any]
    """Of their parameter group."""
    numbers: tuple[int, ...]
    """Their places among all of the optimizer's parameters."""
    weights: list[torch.Tensor]
    gradients: list[torch.Tensor]
    states: tuple[list[torch.Tensor], ...]
    """The optimizer's own tensors, by kind: the momentum, or both moments of LAMB."""
    steps: torch.Tensor | None
    """Updates of each tensor, this one included, where the optimizer counts them."""
    counted: tuple[tuple[Range, ...] | None, ...]
    """The elements of each that count in its norm; None: all."""
    updates: list[torch.Tensor] = field(default_factory=list)
    """What the first pass hands to the second."""

    @property
    def adapts(self) -> bool:
        return bool(self.settings["adapt"])

    def squares(self, *lists: list[torch.Tensor]) -> torch.Tensor:
        """The sum of squares of each tensor's counted elements, one row per list, in float64."""
        widest = torch.float64 if self.weights[0].dtype == torch.float64 else torch.float32
        if all(ranges is None for ranges in self.counted):
            norms = torch._foreach_norm([tensor for tensors in lists for tensor in tensors], 2, dtype=widest)
            return torch.stack(norms).double().square_().view(len(lists), -1)
        totals = torch.zeros(len(lists), len(self.weights), dtype=torch.float64, device=self.weights[0].device)
        for row, tensors in zip(totals, lists, strict=True):
            for total, tensor, ranges in zip(row, tensors, self.counted, strict=True):
                parts = [tensor] if ranges is None else [tensor.flatten()[a:b] for a, b in ranges]
                for norm in torch._foreach_norm(parts, 2, dtype=widest) if parts else ():
                    total += norm.double() ** 2
        return totals


def bias_corrections(batch: Batch) -> torch.Tensor:
    """1 - β^steps of both moments, for every tensor, in float64."""
    assert batch.steps is not None
    steps = batch.steps.double()
    return torch.stack([1 - beta**steps for beta in batch.settings["betas"]])


class LayerwiseOptimizer(torch.optim.Optimizer):
    """An optimizer that scales the step of each tensor by norms of it."""

    state_names: tuple[str, ...]
    """Tensors that are kept per parameter, elementwise."""
    counts_steps = False
    """Each parameter's updates are counted too, as "step"."""

    _step_supports_amp_scaling = True  # where every group is fused

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any], fused: bool | None) -> None:
        super().__init__(params, {**defaults, "adapt": True, "fused": fused})
        self._norms: TensorNorms | None = None
        self._forget()
        for group in self.param_groups:
            if group["fused"] is None:
                group["fused"] = all(_fits_kernels(one) for one in group["params"]) and find_kernels() is not None
            elif group["fused"] and find_kernels() is None:
                raise JobError(
                    f"{type(self).__name__}: fused = True needs a GPU and Triton, and here its kernels do not run; "
                    "leave it out"
                )

    def use_norms(self, norms: TensorNorms) -> None:
        """Take the norms of whole tensors from all ranks that hold parts of them (`tensor_norms.give_norms`)."""
        self._norms = norms
        held = [parameter for group in self.param_groups for parameter in group["params"]]
        for parameter, ranges in zip(held, norms.counted, strict=True):
            if ranges and not parameter.is_contiguous():  # kernels count elements in the order of memory
                for group in self.param_groups:
                    group["fused"] = False

    @abstractmethod
    def first_pass(self, batch: Batch) -> torch.Tensor:
        """Update moments; the squares (2, tensors) of weights and of what they are compared with."""

    @abstractmethod
    def second_pass(self, batch: Batch, ratios: list[torch.Tensor] | None) -> None:
        """Update weights; `ratios` is None where every tensor has the ratio 1."""

    @abstractmethod
    def ratios(self, squares_SN: torch.Tensor, settings: Mapping[str, Any]) -> torch.Tensor:
        """The ratio of each tensor from the squares of whole ones; not yet 1 where a norm is 0."""

    @abstractmethod
    def kernel_settings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The rule and its numbers, as `layerwise_triton` takes them."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found_inf = getattr(self, "found_inf", None)
        batches = self._batches(found_inf)
        exchanges = self._norms is not None and self._norms.exchanges
        squares = [self._first(batch, found_inf) for batch in batches]
        if exchanges and any(group["adapt"] for group in self.param_groups):
            squares = self._complete(batches, squares)
        for batch, sums in zip(batches, squares, strict=True):
            self._second(batch, sums, found_inf)
        return loss

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._forget()
        for parameter, kept in self.state.items():
            for name in self.state_names:
                if name in kept and kept[name].stride() != parameter.stride():  # kernels go through memory in its order
                    kept[name] = torch.empty_like(parameter).copy_(kept[name])

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._norms = getattr(self, "_norms", None)
        self._forget()

    def _forget(self) -> None:
        self._steps: dict[tuple[Any, ...], tuple[tuple[int, ...], torch.Tensor]] = {}
        self._kernels: dict[tuple[Any, ...], Kernels] = {}

    def _complete(self, batches: list[Batch], squares: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The squares of whole tensors; collective."""
        assert self._norms is not None
        having = [(batch, one) for batch, one in zip(batches, squares, strict=True) if one is not None]
        numbers = tuple(number for batch, _ in having for number in batch.numbers)
        if having:
            mine = torch.cat([one for _, one in having], dim=1)
        else:  # other ranks wait for this one
            device = self.param_groups[0]["params"][0].device if self.param_groups[0]["params"] else None
            mine = torch.zeros(2, 0, dtype=torch.float64, device=device)
        found = iter(self._norms.complete(mine, numbers).split([len(batch.numbers) for batch, _ in having], dim=1))
        return [None if one is None else next(found) for one in squares]

    def _first(self, batch: Batch, found_inf: torch.Tensor | None) -> torch.Tensor | None:
        if not batch.settings["fused"]:
            squares = self.first_pass(batch)
            return squares if batch.adapts else None
        return self._kernels_of(batch).first(batch, found_inf)

    def _second(self, batch: Batch, squares: torch.Tensor | None, found_inf: torch.Tensor | None) -> None:
        if batch.settings["fused"]:
            if squares is not None:
                self._kernels_of(batch).second(batch, squares, found_inf)
            return
        ratios = None
        if squares is not None:
            found = self.ratios(squares, batch.settings)
            found = torch.where((squares > 0).all(0), found, 1.0)
            ratios = list(found.to(batch.weights[0].device).unbind())
        self.second_pass(batch, ratios)

    def _kernels_of(self, batch: Batch) -> Kernels:
        key = (id(batch.settings), batch.weights[0].dtype, batch.weights[0].device)
        if key not in self._kernels:
            make = find_kernels()
            assert make is not None
            self._kernels[key] = make()
        kernels = self._kernels[key]
        kernels.settings = self.kernel_settings(batch.settings)
        return kernels

    def _batches(self, found_inf: torch.Tensor | None) -> list[Batch]:
        """All parameters that have a gradient, with their state."""
        made: dict[tuple[Any, ...], list[tuple[int, torch.Tensor]]] = {}
        number = 0
        for place, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                if parameter.grad is not None:
                    made.setdefault((place, parameter.dtype, parameter.device), []).append((number, parameter))
                number += 1
        batches = []
        for key, members in made.items():
            numbers, weights = tuple(n for n, _ in members), [one for _, one in members]
            settings = self.param_groups[key[0]]
            counted = (None,) * len(numbers) if self._norms is None else tuple(self._norms.counted[n] for n in numbers)
            batches.append(
                Batch(
                    settings=settings,
                    numbers=numbers,
                    weights=weights,
                    gradients=_alike(weights) if settings["fused"] else [one.grad for one in weights],  # type: ignore[misc]
                    states=self._states_of(weights),
                    steps=self._count(key, numbers, weights, found_inf) if self.counts_steps else None,
                    counted=counted,
                )
            )
        return batches

    def _states_of(self, weights: list[torch.Tensor]) -> tuple[list[torch.Tensor], ...]:
        for weight in weights:
            kept = self.state[weight]
            for name in self.state_names:
                if name not in kept:
                    kept[name] = torch.zeros_like(weight, memory_format=torch.preserve_format)
        return tuple([self.state[weight][name] for weight in weights] for name in self.state_names)

    def _count(
        self, key: tuple[Any, ...], numbers: tuple[int, ...], weights: list[torch.Tensor], found_inf: Any
    ) -> torch.Tensor:
        """The numbers of updates, one tensor for all, of which each parameter's state has its entry."""
        known = self._steps.get(key)
        if known is None or known[0] != numbers:
            device = weights[0].device if self.param_groups[key[0]]["fused"] else torch.device("cpu")
            zero = torch.zeros((), device=device)
            steps = torch.stack([self.state[weight].get("step", zero).to(device) for weight in weights])
            for weight, step in zip(weights, steps.unbind(), strict=True):
                self.state[weight]["step"] = step
            known = self._steps[key] = (numbers, steps)
        known[1].add_(1 if found_inf is None else 1 - found_inf)
        return known[1]


def _fits_kernels(parameter: torch.Tensor) -> bool:
    is_dense = parameter.is_contiguous() or (
        parameter.dim() == 4 and parameter.is_contiguous(memory_format=torch.channels_last)
    )
    return parameter.is_cuda and is_dense and parameter.dtype in (torch.float32, torch.bfloat16, torch.float16)


def _alike(weights: list[torch.Tensor]) -> list[torch.Tensor]:
    """Gradients laid out in memory like their weights."""
    made = []
    for weight in weights:
        assert weight.grad is not None
        is_alike = weight.grad.stride() == weight.stride()
        made.append(weight.grad if is_alike else torch.empty_like(weight).copy_(weight.grad))
    return made
