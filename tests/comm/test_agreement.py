"""Ranks with different versions, or with different plans, are refused on all of them, before anything is exchanged."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from ranks import ranks
from torch import nn

from weft.comm.world import agreement, binding
from weft.errors import LaunchError, PlanError
from weft.plan.plan import Axes, Comm, Plan, Step
from weft.training.parallelize import parallelize
from weft.world import join_world


@ranks(2)
def test_different_plans_are_refused_with_every_field_that_differs() -> None:
    plans = (
        Plan(axes=Axes(data=2)),
        Plan(axes=Axes(pipeline=2), step=Step(clip_norm=1.0), comm=Comm(bucket_bytes=7)),
    )
    with pytest.raises(PlanError) as refusal:
        parallelize(
            nn.Linear(4, 4),
            plans[dist.get_rank()],
            loss="cross-entropy",
            optimizer=partial(torch.optim.SGD, lr=0.1),
            device="cpu",
        )
    fields = {
        "[axes] data": ("2", "1"),
        "[axes] pipeline": ("1", "2"),
        "[step] clip_norm": ("0.0", "1.0"),
        "[comm] bucket_bytes": ("26214400", "7"),
    }
    said = ", and ".join(f"rank 0: {name} = {a}; rank 1: {name} = {b}" for name, (a, b) in fields.items())
    assert str(refusal.value) == f"ranks were given different plans ({said}); give every rank the same one"


@ranks(2)
def test_different_versions_are_refused() -> None:
    rank, mine = dist.get_rank(), agreement.own_versions()
    binding.own_versions = lambda: {**mine, "weft": f"0.{rank}"}  # type: ignore[attr-defined]
    try:
        with pytest.raises(LaunchError) as refusal:
            join_world("cpu")
    finally:
        binding.own_versions = agreement.own_versions  # type: ignore[attr-defined]
    expected = "ranks have different versions of weft (rank 0: 0.0; rank 1: 0.1); install the same on every host"
    assert str(refusal.value) == expected


def test_all_differing_versions_are_named_at_once_and_a_rank_that_says_none_is_old() -> None:
    with pytest.raises(LaunchError) as refusal:
        agreement.require_same_versions([{"weft": "2", "torch": "2.13"}, {"weft": "2", "torch": "2.11"}, {}])
    assert refusal.value.problems == (
        "ranks have different versions of weft (ranks 0, 1: 2; rank 2: an older one); install the same on every host",
        "ranks have different versions of torch (rank 0: 2.13; rank 1: 2.11; rank 2: an older one); "
        "install the same on every host",
    )


def test_a_rank_that_has_no_plan_yet_differs_from_none() -> None:
    agreement.require_same_plans(["", "[axes]\ndata = 2\n", ""])
