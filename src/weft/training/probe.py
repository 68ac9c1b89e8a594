"""Before the first step: does the split model answer as the whole one does?

Whoever splits a model relies on how its code is written: that a block treats every token by itself, that a mask or a
position is where it is thought to be. One forward pass of an example, taken whole before anything is split and split
after, tells. A difference beyond rounding is refused with both numbers, before a single step was spent on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from weft.comm.collectives import all_reduce, broadcast
from weft.comm.objects import gather_values
from weft.errors import ModelError
from weft.mesh import Mesh
from weft.parallel.materialise import is_on_meta
from weft.training.loss import forward
from weft.training.modes import evaluating
from weft.training.trees import map_tensors

if TYPE_CHECKING:
    from weft.training.trainer import Trainer

_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""How far an answer may be off, as part of the largest entry of the whole one."""


@dataclass(slots=True, kw_only=True)
class Probe:
    """An example, and the whole model's answer to it."""

    inputs: Any
    answer: torch.Tensor | None
    """Rank 0's; None on other ranks, and where it is not one tensor."""

    @staticmethod
    def of(model: nn.Module, mesh: Mesh, example: Any) -> Probe | None:
        """Ask the whole model; collective. None where nothing is split, or there is nothing to ask with."""
        if example is None or mesh.size("tensor") == 1 or is_on_meta(model):
            return None
        answer, problem = None, None
        if mesh.world.rank == 0:  # whose weights will be everybody's
            place = next(model.parameters()).device
            try:
                with evaluating(model):
                    answer = forward(model, map_tensors(lambda tensor: tensor.to(place), example))
            except Exception as error:
                problem = f"the model fails on the example ({type(error).__name__}: {error}); give inputs it can take"
        problem = gather_values(problem, mesh.everyone("control"), mesh.world.device)[0]
        if problem is not None:
            raise ModelError(problem)
        device = mesh.world.device
        return Probe(
            inputs=map_tensors(lambda tensor: tensor.to(device), example),
            answer=answer.to(device) if isinstance(answer, torch.Tensor) else None,
        )

    def compare(self, trainer: Trainer) -> None:
        """Refuse a model that answers differently now; collective."""
        mesh, device = trainer.mesh, trainer.mesh.world.device
        everyone = mesh.everyone("control")
        shape = None if self.answer is None else list(self.answer.shape)
        shape = gather_values(shape, everyone, device)[0]
        if shape is None:
            return
        whole = torch.empty(shape, dtype=torch.float64, device=device)
        if self.answer is not None:
            whole.copy_(self.answer)
        broadcast(whole, everyone)
        found = torch.zeros(2, dtype=torch.float64, device=device)
        allowed = _ROUNDING[torch.float32]

        def look(output: Any) -> None:
            nonlocal allowed
            share = None if trainer.tensor is None else trainer.tensor.output
            expected = whole if share is None else whole[..., share.start : share.stop]
            allowed = _ROUNDING.get(output.dtype, allowed)
            is_same = output.shape == expected.shape
            off = (output.double() - expected).abs().max() if is_same and expected.numel() else torch.zeros(())
            found[0] = off if is_same else float("inf")
            found[1] = allowed

        trainer.look(self.inputs, look)
        found[0] = torch.nan_to_num(found[0], nan=float("inf"), posinf=float("inf"))
        all_reduce(found, everyone, op="max")
        off, allowed = found.tolist()
        largest = float(whole.abs().max()) if whole.numel() else 0.0
        if off > allowed * max(largest, 1e-30):
            raise ModelError(
                f"split over [axes] tensor = {mesh.size('tensor')}, the model's answer to the example is off by "
                f"{off:.1e}, with {largest:.1e} its largest entry; the split changes what the model computes, so "
                "declare regions in weft_blueprint() that leave the layers concerned whole"
                + (", or set [tensor] sequence = false" if trainer.plan.tensor.sequence else "")
            )
