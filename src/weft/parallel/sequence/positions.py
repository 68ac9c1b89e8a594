"""Global positions for a model that counts its local tokens from 0, as its blueprint declares (`Positions`).

During a pass, modules that are given positions are given the global ones, and tables of which the model takes the first
rows have the rows of this rank's positions in front.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from weft.blueprint import Positions
from weft.errors import ModelError
from weft.parallel.tracing.placeholder import Placeholder


class Tables:
    """Buffers with one row per position, of which the model uses the first."""

    def __init__(self, model: nn.Module, positions: Positions | None) -> None:
        self._tables: list[tuple[nn.Module, str, int]] = []
        for path, dim in positions.tables if positions is not None else ():
            owner, _, name = path.rpartition(".")
            self._tables.append((model.get_submodule(owner), name, dim))
        self._whole: list[Tensor] = []

    def lend(self, numbers: Callable[[torch.device], Tensor]) -> None:
        """Put the rows of these positions, made on the device they are asked for, in front."""
        self.give_back()
        for owner, name, dim in self._tables:
            whole = owner._buffers[name]
            assert whole is not None
            self._whole.append(whole)
            owner._buffers[name] = whole.index_select(dim, numbers(whole.device))

    def give_back(self) -> None:
        for (owner, name, _), whole in zip(self._tables, self._whole, strict=False):
            owner._buffers[name] = whole
        self._whole = []


class Numbered:
    """Hook that replaces local positions, 0 to T - 1, by global ones."""

    def __init__(self, name: str, numbers: Callable[[torch.device], Tensor | None]) -> None:
        """`numbers`: the global positions of this rank's tokens, on a device; None outside of passes."""
        self._name = name
        self._numbers = numbers

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        given = next((one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)), None)
        numbers = self._numbers(torch.device("cpu") if given is None else given.device)
        if numbers is None or any(isinstance(one, Placeholder) for one in (*args, *kwargs.values())):
            return None
        if given is None or not given.dim() or given.shape[-1] != len(numbers):
            what = "no tensor" if given is None else f"a tensor of {tuple(given.shape)}"
            raise ModelError(
                f'"{self._name}", which weft_blueprint() says is given positions, was given {what} for {len(numbers)} '
                "tokens; name modules that are called with one number per token"
            )
        numbers = numbers.to(given.dtype)
        # Positions that the user gave stay. This is decided on the device, so that the host does not wait for it.
        is_counted = (given == torch.arange(len(numbers), device=given.device)).all()
        right = torch.where(is_counted, numbers.expand(given.shape), given)
        return (
            tuple(right if one is given else one for one in args),
            {name: right if one is given else one for name, one in kwargs.items()},
        )
