"""weft over the strict stand-in for NCCL: every group of device tensors gets that backend, as on GPUs it gets NCCL."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from strict_nccl.mode import StrictMode
from strict_nccl.world import strict_world

from weft.mesh import Mesh
from weft.parallel.spatial import rules
from weft.plan.plan import Axes, Comm, Plan
from weft.verification.verdict import Verification
from weft.verification.verify import verify
from weft.world import join_world


def _forget_rules() -> None:
    """Rules of image rows are kept by torch's functions, of which the stand-in replaces some."""
    rules._table.cache_clear()
    rules.rule_for.cache_clear()


@contextmanager
def _strict(mode: StrictMode | None, *, keep: bool = False) -> Iterator[None]:
    with strict_world(mode, keep=keep), mock.patch("weft.world.backend_of", lambda *_: "strict"):
        _forget_rules()
        try:
            yield
        finally:
            _forget_rules()


@contextmanager
def weft_over_strict(mode: StrictMode | None = None) -> Iterator[None]:
    """Inside, `join_world` gives a world whose tensors move over the stand-in; collective."""
    with _strict(mode):
        yield


@functools.cache
def _kept_mesh(axes: Axes, transport: str, mode: StrictMode) -> Mesh:
    """Made once per rank and mode, like those of `meshes.py`."""
    return Mesh(Plan(axes=axes, comm=Comm(transport=transport)), join_world("cpu"))  # type: ignore[arg-type]


def verify_over_strict(model: Any, plan: Plan, mode: StrictMode, **settings: Any) -> Verification:
    """`weft.verify` on groups that keep NCCL's rules; collective."""
    with _strict(mode, keep=True):
        mesh = _kept_mesh(plan.axes, plan.comm.transport, mode)
        assert mesh.world.backend == "strict"
        return verify(model, plan, device="cpu", mesh=mesh, **settings)
