"""LARS, in the two published variants, which differ in what is normalised.

"scaled-gradient" (You, Gitman, Ginsburg 2017, algorithm 1): the gradient is scaled, momentum comes after it.

    λ = τ · ‖w‖ / (‖g‖ + β‖w‖),   v ← μv + η · λ · (g + βw),   w ← w - v

"normalised-momentum" (You et al. 2020, the LAMB paper, algorithm 1): the momentum itself is normalised.

    m ← μm + (1-μ)(g + βw),   w ← w - η · τ · φ(‖w‖)/‖m‖ · m,   φ(x) = x, or clamped to a range

η is the learning rate, β the weight decay, μ the momentum, τ the trust: 0.001 in the first variant and 1 in the second,
as published. λ, or the ratio, is 1 where a norm is 0, and for groups with `adapt = False` (`exclude_one_dim`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch

from weft.errors import JobError, nearest
from weft.optim.check_settings import require_settings
from weft.optim.layerwise import Batch, LayerwiseOptimizer

VARIANTS = {"scaled-gradient": 0.001, "normalised-momentum": 1.0}
"""The variants, and the trust that each was published with."""


class LARS(LayerwiseOptimizer):
    """LARS, also on parts of tensors: under ZeRO and tensor parallelism the norms are those of whole tensors."""

    state_names = ("momentum_buffer",)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1.0,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        variant: Literal["scaled-gradient", "normalised-momentum"] = "scaled-gradient",
        trust: float | None = None,
        clamp: tuple[float, float] | None = None,
        *,
        fused: bool | None = None,
    ) -> None:
        """`trust`: None for the variant's own. `clamp`: the range of φ(‖w‖), in the second variant only. `fused`: in
        kernels on a GPU; None where that is possible. A parameter group with `adapt` = False has the ratio 1."""
        problems = []
        if variant not in VARIANTS:
            problems.append(f'LARS has no variant "{variant}"; {nearest(str(variant), VARIANTS)}')
        elif variant == "scaled-gradient" and clamp is not None:
            problems.append(
                f'LARS: clamp = {clamp} has no effect in the variant "{variant}"; leave it out, or use '
                '"normalised-momentum"'
            )
        if problems:
            raise JobError(problems)
        trust = VARIANTS[variant] if trust is None else trust
        require_settings("LARS", lr=lr, momentum=momentum, weight_decay=weight_decay, trust=trust, clamp=clamp)
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "variant": variant,
            "trust": trust,
            "clamp": clamp,
        }
        super().__init__(params, defaults, fused)

    def first_pass(self, batch: Batch) -> torch.Tensor:
        settings, (momentum,) = batch.settings, batch.states
        compared = batch.gradients
        batch.updates = batch.gradients
        if settings["weight_decay"]:
            batch.updates = list(torch._foreach_add(batch.gradients, batch.weights, alpha=settings["weight_decay"]))
        if settings["variant"] == "normalised-momentum":
            torch._foreach_lerp_(momentum, batch.updates, 1 - settings["momentum"])
            compared = batch.updates = momentum
        return batch.squares(batch.weights, compared) if batch.adapts else torch.empty(0)

    def ratios(self, squares_SN: torch.Tensor, settings: Mapping[str, Any]) -> torch.Tensor:
        weight, compared = squares_SN.sqrt().unbind()
        if settings["variant"] == "scaled-gradient":
            compared = compared + settings["weight_decay"] * weight
        elif settings["clamp"] is not None:
            weight = weight.clamp(*settings["clamp"])
        return (weight / compared).mul_(settings["trust"])

    def second_pass(self, batch: Batch, ratios: list[torch.Tensor] | None) -> None:
        settings, (momentum,) = batch.settings, batch.states
        updates = batch.updates if ratios is None else torch._foreach_mul(batch.updates, ratios)
        batch.updates = []
        if settings["variant"] == "normalised-momentum":
            torch._foreach_add_(batch.weights, updates, alpha=-settings["lr"])
            return
        torch._foreach_mul_(momentum, settings["momentum"])
        torch._foreach_add_(momentum, updates, alpha=settings["lr"])
        torch._foreach_sub_(batch.weights, momentum)

    def kernel_settings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        low, high = settings["clamp"] or (0.0, float("inf"))
        rule = 1 if settings["variant"] == "scaled-gradient" else 2
        return {"rule": rule, "momentum": settings["momentum"], "trust": settings["trust"], "low": low, "high": high}
