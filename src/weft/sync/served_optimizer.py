"""What this rank's optimizer says of the parts that servers hold: its state where training goes on, and momenta."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from weft.parallel.zero.flat_parameters import Piece
from weft.server.protocol.optimizer_state import PartState
from weft.sync.served_buckets import Place


def state_of(optimizer: torch.optim.Optimizer, pieces: Sequence[Piece], place: Place) -> PartState:
    """The optimizer's state of a server's part, as this rank has it."""
    number, start, stop = place
    singles = {"step"}  # of a parameter of no dims, all states have none
    for piece, state in optimizer.state.items():
        singles |= {name for name, one in state.items() if piece.dim() and _is_single(one)}
    found = optimizer.state.get(pieces[number].tensor, {})
    return {name: one if name in singles else one.reshape(-1)[start:stop] for name, one in found.items()}


def momentum_of(optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], tuple[float, bool]]:
    """What says the momentum of a piece, and whether it is Nesterov's."""
    group_of = {id(one): group for group in optimizer.param_groups for one in group["params"]}

    def momentum(piece: torch.Tensor) -> tuple[float, bool]:
        group = group_of[id(piece)]
        return float(group["momentum"]), bool(group["nesterov"])

    return momentum


def _is_single(state: object) -> bool:
    return not isinstance(state, torch.Tensor) or state.dim() == 0
