"""Entries of gradients that are rounding errors are set to zero on both sides of a comparison, before the update.

A bias in front of BatchNorm has a gradient of zero by the maths; what is computed for it is noise, different in every
order of additions. Adam divides by its size, and would turn two different noises into two different weights. It may be
so for some entries of a tensor only: a bias of keys whose second half is not rotated shifts all scores alike there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from weft.comm.collectives import all_reduce
from weft.mesh import Mesh
from weft.training.setup.probe_optimizer import OptimizerFactory

_NOISE = 1e-12
"""An entry below this part of the model's largest gradient is rounding."""


class ZeroNoise:
    """A factory of the same optimizer, with noise in gradients set to zero before each update."""

    def __init__(self, optimizer: OptimizerFactory, *, stages: Sequence[int] = (), by_stage: bool = False) -> None:
        """`by_stage`: pipeline stages update independently, so each compares only with its own gradients; `stages`
        has the stage of every parameter, where one process has those of several."""
        self._optimizer = optimizer
        self._stages = stages
        self._by_stage = by_stage
        self.mesh: Mesh | None = None
        """The mesh of ranks that share gradients: another rank of the replica may have the largest."""

    def __call__(self, parameters: Iterable[Any]) -> torch.optim.Optimizer:
        made = self._optimizer(parameters)
        made.register_step_pre_hook(self._zero)
        return made

    @torch.no_grad()
    def _zero(self, made: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        del args, kwargs
        gradients = [p.grad for group in made.param_groups for p in group["params"]]
        largest = torch.zeros(1 + max(self._stages, default=0), dtype=torch.float64)
        sizes = torch.zeros(len(gradients), dtype=torch.float64)
        stages = torch.tensor(self._stages or [0] * len(gradients), dtype=torch.int64)
        for number, gradient in enumerate(gradients):
            if gradient is not None and gradient.numel():
                sizes[number] = float(gradient.abs().max())
        largest.scatter_reduce_(0, stages, sizes, "amax")
        if self.mesh is not None:
            sharing = (self.mesh.batch_group("control"), self.mesh.group("tensor", "control"))
            for group in sharing if self._by_stage else (self.mesh.whole_replica("control"),):
                all_reduce(largest, group, op="max")
        for gradient, limit in zip(gradients, (_NOISE * largest[stages]).tolist(), strict=True):
            if gradient is not None:
                gradient.masked_fill_(gradient.abs() < limit, 0.0)
