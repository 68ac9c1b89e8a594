"""Norms of whole tensors for LARS and LAMB, where one server holds all parts of each tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch


class PartNorms:
    """Adds up sums of squares over the parts of a tensor, in the place of `optim/tensor_norms.py`."""

    exchanges = True
    """The optimizer asks for whole sums between its passes."""

    def __init__(self, tensor_of: Sequence[int]) -> None:
        """`tensor_of`: the tensor that each of the optimizer's parameters is a part of, by number."""
        self.counted = (None,) * len(tensor_of)
        self._tensor_of = torch.tensor(tensor_of, dtype=torch.int64)
        self._num_tensors = max(tensor_of, default=-1) + 1

    def complete(self, squares_SN: torch.Tensor, parameters: tuple[int, ...]) -> torch.Tensor:
        """The sums of whole tensors, for some of the optimizer's parameters."""
        tensors = self._tensor_of[list(parameters)]
        whole = squares_SN.new_zeros((squares_SN.shape[0], self._num_tensors), dtype=torch.float64)
        return whole.index_add_(1, tensors, squares_SN.double()).index_select(1, tensors)


def give_norms(optimizer: torch.optim.Optimizer, held: Mapping[str, Sequence[torch.Tensor]]) -> None:
    """Tell an optimizer that needs them the norms of whole tensors; any other is left alone. `held`: all parts of
    every tensor, by its name."""
    use_norms = getattr(optimizer, "use_norms", None)
    if use_norms is None:
        return
    number = {id(part): number for number, parts in enumerate(held.values()) for part in parts}
    use_norms(PartNorms([number[id(one)] for group in optimizer.param_groups for one in group["params"]]))
