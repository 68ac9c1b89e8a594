"""LAMB (You et al. 2020, "Large Batch Optimization for Deep Learning", algorithm 2): Adam with a ratio per tensor.

    m ← β₁m + (1-β₁)g,   v ← β₂v + (1-β₂)g²,   r = m̂ / (√v̂ + ε)      with bias correction
    w ← w - η · φ(‖w‖)/‖r + λw‖ · (r + λw)                              φ(x) = x, or clamped to a range

The ratio is 1 where a norm is 0, and for tensors of groups with `adapt = False` (`exclude_one_dim`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from weft.optim.check_settings import require_settings
from weft.optim.layerwise import Batch, LayerwiseOptimizer, bias_corrections


class LAMB(LayerwiseOptimizer):
    """LAMB, also on parts of tensors: under ZeRO and tensor parallelism the norms are those of whole tensors."""

    state_names = ("exp_avg", "exp_avg_sq")
    counts_steps = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        clamp: tuple[float, float] | None = None,
        *,
        fused: bool | None = None,
    ) -> None:
        """`clamp`: the range of φ(‖w‖); None for none. `fused`: in kernels on a GPU; None where that is possible.

        A parameter group with `adapt` = False has the ratio 1: AdamW's step, with its decay inside the learning rate.
        """
        require_settings("LAMB", lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, clamp=clamp)
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay, "clamp": clamp}
        super().__init__(params, defaults, fused)

    def first_pass(self, batch: Batch) -> torch.Tensor:
        (beta1, beta2), decay = batch.settings["betas"], batch.settings["weight_decay"]
        mean, square = batch.states
        torch._foreach_lerp_(mean, batch.gradients, 1 - beta1)
        torch._foreach_mul_(square, beta2)
        torch._foreach_addcmul_(square, batch.gradients, batch.gradients, 1 - beta2)
        corrections_SN = bias_corrections(batch)
        denominators = torch._foreach_sqrt(square)
        torch._foreach_div_(denominators, list(corrections_SN[1].sqrt().unbind()))
        torch._foreach_add_(denominators, batch.settings["eps"])
        batch.updates = list(torch._foreach_div(mean, denominators))
        torch._foreach_div_(batch.updates, list(corrections_SN[0].unbind()))
        if decay:
            torch._foreach_add_(batch.updates, batch.weights, alpha=decay)
        return batch.squares(batch.weights, batch.updates) if batch.adapts else torch.empty(0)

    def ratios(self, squares_SN: torch.Tensor, settings: Mapping[str, Any]) -> torch.Tensor:
        weight, update = squares_SN.sqrt().unbind()
        if settings["clamp"] is not None:
            weight = weight.clamp(*settings["clamp"])
        return weight / update

    def second_pass(self, batch: Batch, ratios: list[torch.Tensor] | None) -> None:
        if ratios is not None:
            torch._foreach_mul_(batch.updates, ratios)
        torch._foreach_add_(batch.weights, batch.updates, alpha=-batch.settings["lr"])
        batch.updates = []

    def kernel_settings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        beta1, beta2 = settings["betas"]
        low, high = settings["clamp"] or (0.0, float("inf"))
        return {"rule": 0, "momentum": beta1, "beta2": beta2, "eps": settings["eps"], "low": low, "high": high}
