"""The device of a rank: its name and memory, and its speed at matrix products and memory copies.

All ranks measure at the same time, so ranks that share cores or memory find the speeds they will have in training.
"""

from __future__ import annotations

import faulthandler
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

from weft.host_memory import host_memory_bytes, read_proc

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_COPY_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}
_MATRIX_SIZE = {"cpu": 1024, "cuda": 8192}


def describe(device: torch.device, *, num_sharing: int) -> dict[str, Any]:
    """Kind, name and memory, which so many ranks share equally."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return {"kind": "cuda", "name": properties.name, "memory_bytes": properties.total_memory // num_sharing}
    name = read_proc("/proc/cpuinfo", "model name") or platform.processor() or platform.machine() or "CPU"
    return {"kind": "cpu", "name": name, "memory_bytes": host_memory_bytes() // num_sharing}


def measure_speeds(device: torch.device, *, budget_s: float, meet: Callable[[], object]) -> dict[str, float]:
    """Copy and matmul speeds by the names of `Device`; a dtype this device cannot multiply is left out."""
    share_s = budget_s / (len(_DTYPES) + 1)
    speeds = {}
    source = torch.empty(_COPY_BYTES[device.type], dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    meet()
    speeds["copy_bytes_per_s"] = source.nbytes / _median_s(lambda: target.copy_(source), device, share_s)
    for name, dtype in _DTYPES.items():
        meet()
        if can_multiply(dtype, device):
            speeds[f"{name}_flops_per_s"] = _flops_per_s(dtype, device, share_s)
    return speeds


def _flops_per_s(dtype: torch.dtype, device: torch.device, budget_s: float) -> float:
    """Speed of a product large enough for full speed, or of a smaller one where the dtype is slow."""
    size = _MATRIX_SIZE[device.type]
    small = _product(size // 4, dtype, device)
    if 64 * _median_s(small, device, budget_s / 8) > budget_s / 2:
        size //= 4
    return 2 * size**3 / _median_s(_product(size, dtype, device), device, budget_s)


def _product(size: int, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    left = torch.rand(size, size, device=device).to(dtype)
    right, output = left.clone(), torch.empty_like(left)
    return lambda: torch.mm(left, right, out=output)


def _median_s(call: Callable[[], object], device: torch.device, budget_s: float) -> float:
    def once() -> float:
        started = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - started

    once()
    deadline = time.perf_counter() + budget_s
    samples = [once()]
    while time.perf_counter() < deadline:
        samples.append(once())
    return statistics.median(samples)


def can_multiply(dtype: torch.dtype, device: torch.device) -> bool:
    """True if a product in this dtype works here.

    On a CPU a child process tries it: some virtual machines advertise instructions that then end the process.
    """
    if device.type == "cuda" or dtype == torch.float32:
        return True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads; the child touches none
        child = os.fork()
    if child == 0:
        try:
            faulthandler.disable()  # a crash is an answer here, not a fault to report
            torch.set_num_threads(1)
            matrix = torch.ones(256, 256, dtype=dtype)
            torch.mm(matrix, matrix)
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0
