"""Copies batches from the host to a GPU while the GPU still computes the previous step.

A copy from pageable memory makes the host wait for all work that was launched before. So a tensor is first written to
pinned memory, from which the GPU copies it by itself, on a stream of its own: it need not wait for the step under way,
and only the step that uses the tensor waits for the copy. torch reuses pinned memory only after its copies are done.
"""

from __future__ import annotations

import functools

import torch

from weft.training.data.trees import Tree, map_tensors


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on a device, for work on the current stream. The host waits for nothing."""
    if device.type != "cuda" or not _can_be_pinned(tensor):
        return tensor.to(device, non_blocking=True)
    stream, current = _copy_stream(device), torch.cuda.current_stream(device)
    with torch.cuda.stream(stream):
        copied = _pinned(tensor).to(device, non_blocking=True)
    current.wait_stream(stream)
    copied.record_stream(current)  # its memory is the copy stream's, which must not reuse it while a step does
    return copied


def pin(tree: Tree) -> Tree:
    """The same batch in pinned memory if this process uses a GPU, so that `to_device` finds it there."""
    return map_tensors(_pinned, tree) if torch.cuda.is_initialized() else tree


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    if not _can_be_pinned(tensor) or (tensor.is_contiguous() and tensor.is_pinned()):
        return tensor
    # Not `pin_memory()`, which keeps gaps between rows: a GPU copies only contiguous memory without the host.
    return torch.empty_like(tensor, pin_memory=True).copy_(tensor)


def _can_be_pinned(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout is torch.strided and not tensor.is_nested


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    # torch has 32 streams of each priority, and goes round: this one must never be that of a communicator as well.
    return torch.cuda.Stream(device, priority=-1)
