"""Tensors as the bytes of a frame and back, without a copy, and frames that are sent from where they lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from weft.server.protocol.message import Buffer

_NUMPY = {"float32": np.float32, "float64": np.float64, "bfloat16": np.uint16, "float16": np.float16, "uint8": np.uint8}


def tensor_of(frame: Buffer, dtype: str) -> torch.Tensor:
    """The values of a frame, in its own memory where that may be written."""
    if not len(frame):  # which numpy refuses
        return torch.empty(0, dtype=getattr(torch, dtype))
    writable = bytearray(frame) if memoryview(frame).readonly else frame
    values = torch.from_numpy(np.frombuffer(writable, dtype=_NUMPY[dtype]))
    return values.view(torch.bfloat16) if dtype == "bfloat16" else values


def frame_of(tensor: torch.Tensor) -> Buffer:
    """The bytes of a contiguous tensor, in its own memory."""
    if not tensor.numel():
        return b""
    plain = tensor.detach().view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor.detach()
    return plain.numpy().data.cast("B")


@torch.no_grad()
def write_frame(values: torch.Tensor, frame: Buffer, dtype: str) -> None:
    """Write a frame to contiguous values. On the host, and in the same format, this thread does it alone: another one
    may be computing on all cores."""
    if values.device.type != "cpu" or str(values.dtype) != f"torch.{dtype}":
        values.copy_(tensor_of(frame, dtype))
        return
    if len(frame):
        plain = values.view(torch.uint16) if values.dtype == torch.bfloat16 else values
        np.copyto(plain.numpy(), np.frombuffer(frame, dtype=_NUMPY[dtype]))


def send_frames(socket: Any, frames: Sequence[Buffer]) -> Callable[[], bool]:
    """Send a message; returns what says whether none of its frames is read any more. (pyzmq's own `send_multipart`
    tells that of the last frame alone.)"""
    import zmq

    last = len(frames) - 1
    trackers = [
        socket.send(one, 0 if number == last else zmq.SNDMORE, copy=False, track=True)
        for number, one in enumerate(frames)
    ]
    return lambda: all(one.done for one in trackers)
