"""weft over the strict stand-in for NCCL: every group of device tensors gets that backend, as on GPUs it gets NCCL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from strict_nccl.mode import Mode
from strict_nccl.world import strict_world


@contextmanager
def weft_over_strict(mode: Mode | None = None) -> Iterator[None]:
    """Inside, `join_world` gives a world whose tensors move over the stand-in; collective."""
    with strict_world(mode), mock.patch("weft.mesh.backend_of", lambda *_: "strict"):
        yield
