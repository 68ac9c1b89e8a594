"""State of the user's own in checkpoints: objects and plain values, under other plans, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from oracle import cut_evenly, data_plan, make_trainer, pipeline_plan, small_gpt, token_batch
from ranks import ranks

from weft.errors import CheckpointError
from weft.plan.plan import Plan
from weft.training.trainer import Trainer


class Curriculum:
    """An object with state as torch's have it."""

    def __init__(self) -> None:
        self.stage, self.means = 0, torch.zeros(3)

    def state_dict(self) -> dict[str, Any]:
        return {"stage": self.stage, "means": self.means, 7: ("a tuple", [None, True, 2.5])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state[7] == ("a tuple", [None, True, 2.5])
        self.stage, self.means = state["stage"], state["means"]


def make(plan: Plan) -> Trainer:
    return make_trainer(small_gpt().double(), plan, example=token_batch(2)[0])


VALUES: dict[str, Any] = {
    "best": float("inf"),
    "seen": 2**70,
    "generator": np.random.default_rng(3).bit_generator.state,
    "weights": np.arange(6, dtype=np.uint32).reshape(2, 3),
    "masks": {"all": torch.tensor([True, False]), "none": torch.zeros(0, 2)},
}


def is_same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    return type(one) is type(other) and bool(one == other)


@ranks(2)
@pytest.mark.parametrize("wait", [True, False])
def test_any_plan_loads_rank_0s(tmp_path: Path, wait: bool) -> None:
    trainer, curriculum = make(data_plan(2, shard="parameters")), Curriculum()
    trainer.extra_state |= {"curriculum": curriculum, **VALUES}
    curriculum.stage, curriculum.means = 4 + dist.get_rank(), torch.full((3,), 2.0 + dist.get_rank())
    trainer.step(*cut_evenly(token_batch(4), 2)[trainer.data_rank])
    trainer.save(tmp_path / "saved", wait=wait)
    curriculum.means.zero_()  # the checkpoint has what was there at the call
    trainer.wait_for_save()
    for plan in (data_plan(2, shard="parameters"), pipeline_plan(2, microbatches=2)):
        other, registered = make(plan), Curriculum()
        other.extra_state |= {"curriculum": registered, **dict.fromkeys(VALUES)}
        other.load(tmp_path / "saved")
        assert other.extra_state["curriculum"] is registered
        assert registered.stage == 4 and torch.equal(registered.means, torch.full((3,), 2.0))
        assert all(is_same(other.extra_state[name], value) for name, value in VALUES.items())


@ranks(2)
def test_names_that_differ_are_refused_before_anything_changes(tmp_path: Path) -> None:
    trainer = make(data_plan(2))
    trainer.extra_state |= {"epoch": 3, "old": 1}
    trainer.step(*cut_evenly(token_batch(4), 2)[trainer.data_rank])
    trainer.save(tmp_path / "saved")
    other = make(data_plan(2))
    other.extra_state |= {"epoch": 0, "new": 2}
    with pytest.raises(CheckpointError) as caught:
        other.load(tmp_path / "saved")
    for words in (
        'holds no state for trainer.extra_state "new"',
        'holds state that is not registered in trainer.extra_state: "old"',
        "register the same names before load(), or call load(directory, extra_state=False)",
    ):
        assert words in str(caught.value)
    assert other.steps_done == 0 and other.extra_state == {"epoch": 0, "new": 2}
    other.load(tmp_path / "saved", extra_state=False)
    assert other.steps_done == 1 and other.extra_state == {"epoch": 0, "new": 2}


class Unsaveable(Curriculum):
    def state_dict(self) -> dict[str, Any]:
        raise ValueError("planted")


@ranks(2)
def test_what_cannot_be_saved_is_refused_on_all_ranks(tmp_path: Path) -> None:
    trainer = make(data_plan(2))
    trainer.extra_state = {"path": [1, {"inside": Path("x")}], "keys": {(1, 2): 3}}
    with pytest.raises(CheckpointError) as caught:
        trainer.save(tmp_path / "saved")
    assert "path.1.inside is a PosixPath, which weft cannot save" in str(caught.value)
    assert "keys has a key of type tuple" in str(caught.value)
    trainer.extra_state = {f"rank {dist.get_rank()}": 1}
    with pytest.raises(CheckpointError, match='has the names "rank 1" on rank 1 and "rank 0" on rank 0'):
        trainer.save(tmp_path / "saved")
    trainer.extra_state = {"broken": Unsaveable()}
    with pytest.raises(CheckpointError, match=r'state_dict\(\) of "broken" raised ValueError on rank 0: planted'):
        trainer.save(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


class Broken(Curriculum):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        if dist.get_rank() == 1:
            raise ValueError("planted")


@ranks(2)
def test_an_object_that_fails_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    trainer = make(data_plan(2))
    trainer.extra_state["broken"] = Broken()
    trainer.save(tmp_path / "saved")
    with pytest.raises(CheckpointError, match=r"rank 1 cannot load the extra state of .*ValueError: planted"):
        trainer.load(tmp_path / "saved")
