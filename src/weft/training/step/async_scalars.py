"""Scalars copied between device and host without either waiting for the other.

`float(tensor)` waits for everything that was launched before it. With a copy into pinned memory, followed by an
event, a reader waits for that scalar alone: one step later it has arrived, while the device computes the next step.
"""

from __future__ import annotations

import torch


class AsyncScalars:
    """Scalars of a device that are being copied to the host."""

    def __init__(self, *numbers: torch.Tensor | float) -> None:
        """At least one is a tensor, perhaps of several numbers; the others are put on its device."""
        device = next(number.device for number in numbers if isinstance(number, torch.Tensor))
        self._host = torch.cat([scalar_on_device(number, device, torch.float64).reshape(-1) for number in numbers])
        self._arrived: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._host = torch.empty_like(self._host, device="cpu", pin_memory=True).copy_(
                self._host, non_blocking=True
            )
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(device))

    @property
    def is_ready(self) -> bool:
        """True if `read` does not wait."""
        return self._arrived is None or self._arrived.query()

    def read(self) -> list[float]:
        """The scalars, once the device has computed them; work launched later is not waited for."""
        if self._arrived is not None:
            self._arrived.synchronize()
        found: list[float] = self._host.tolist()
        return found


def scalar_on_device(
    number: torch.Tensor | float, device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """A number as a tensor that is made on the device: a copy of one from the host would make the host wait.

    A float becomes float64 unless a dtype is given, so that nothing is lost.
    """
    if isinstance(number, torch.Tensor):
        if number.device.type == device.type:
            return number.to(dtype=dtype or number.dtype)
        dtype, number = dtype or number.dtype, number.item()
    if dtype is None and isinstance(number, float):
        dtype = torch.float64
    return torch.full((), number, dtype=dtype, device=device)
