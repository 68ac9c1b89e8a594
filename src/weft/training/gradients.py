"""What is done to gradients between the exchange and the update: one norm, one pass of scaling."""

from __future__ import annotations

import torch


def global_norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """The 2-norm of all gradients together, without waiting for a device."""
    norms = torch._foreach_norm(gradients)
    wide = [norm.float() if norm.element_size() < 4 else norm for norm in norms]
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(wide))
    return total


@torch.no_grad()
def scale_and_clip(
    gradients: list[torch.Tensor], *, factor: float | torch.Tensor | None, clip_norm: float
) -> torch.Tensor | None:
    """Multiply gradients by a factor, then clip them by global norm, in one pass over them; returns the norm if taken.

    Clipping follows `torch.nn.utils.clip_grad_norm_`, the 1e-6 included.
    """
    if not gradients:
        return None
    if clip_norm == 0:
        if factor is not None:
            _multiply(gradients, factor)
        return None
    norm = global_norm(gradients)
    if factor is not None:
        norm = norm * factor
    coefficient = torch.clamp(clip_norm / (norm + 1e-6), max=1.0)
    _multiply(gradients, coefficient if factor is None else coefficient * factor)
    return norm


def _multiply(gradients: list[torch.Tensor], factor: float | torch.Tensor) -> None:
    if isinstance(factor, torch.Tensor):
        # torch multiplies one by one, a kernel each, unless the factor has the gradients' dtype
        factor = factor.to(max((gradient.dtype for gradient in gradients), key=lambda dtype: dtype.itemsize))
    torch._foreach_mul_(gradients, factor)
