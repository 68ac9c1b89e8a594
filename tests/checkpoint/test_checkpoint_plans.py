"""Save here, load there: whatever plan wrote a checkpoint, any other goes on from it, and would write the same files.

Functions that are decorated with `@ranks` but not called test_... are parts of a test that needs several world sizes:
each plan writes once, then each plan reads what three others wrote.
"""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest
import torch
from oracle import (
    ADAMW,
    data_plan,
    make_trainer,
    pipeline_plan,
    sequence_plan,
    small_gpt,
    tensor_plan,
    token_batch,
    train_on_tokens,
)
from ranks import ranks

from weft.checkpoint import load as checkpoint
from weft.checkpoint import snapshot
from weft.plan.plan import Plan
from weft.training.trainer import Trainer

NUM_BEFORE, NUM_AFTER = 2, 2
PLANS = {
    "alone": data_plan(1),
    "data 2": data_plan(2),
    "zero 3": data_plan(2, shard="parameters"),
    "tensor 2": tensor_plan(2),
    "pipeline 2": pipeline_plan(2, microbatches=2, cuts=(1,)),
    "ring 2": sequence_plan(ring=2),
    "hybrid": data_plan(2, replicate=2, shard="parameters"),
    "tensor 2 x zero 2": tensor_plan(2, data=2, shard="gradients"),
    "pipeline 2 x tensor 2": tensor_plan(2, pipeline=2, microbatches=2, cuts=(1,)),
    "ring 2 x zero 3": sequence_plan(ring=2, data=2, shard="parameters"),
    "pipeline 2 x zero 1 x tensor 2": tensor_plan(2, pipeline=2, data=2, microbatches=2, cuts=(1,), shard="optimizer"),
}
OFFSETS = 1, 4
"""How far down the list the plans are that each plan reads from: 33 pairs, every plan once with all kinds of others."""


def make(name: str) -> Trainer:
    torch.manual_seed(3)
    model = small_gpt(heads=4, kv_heads=2, bias=True, norm="layer").double()
    return make_trainer(model, PLANS[name], optimizer=ADAMW, example=token_batch(2)[0])


def plans_of(num_ranks: int) -> list[tuple[str, Plan]]:
    return [(name, plan) for name, plan in PLANS.items() if plan.axes.num_ranks == num_ranks]


def write(folder: Path, num_ranks: int) -> None:
    for name, _ in plans_of(num_ranks):
        trainer = make(name)
        train_on_tokens(trainer, NUM_BEFORE)
        trainer.data_position = 17
        with mock.patch.object(snapshot, "MOST_FILE_BYTES", 20_000):
            trainer.save(folder / name)
        losses = train_on_tokens(trainer, NUM_AFTER)
        if trainer.mesh.world.rank == 0:
            (folder / f"{name}.json").write_text(json.dumps(losses))


def portable_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name.startswith(("model", "optimizer"))}


def read(folder: Path, num_ranks: int) -> None:
    names = list(PLANS)
    for name, _ in plans_of(num_ranks):
        trainer = make(name)
        for offset in OFFSETS:
            saved = names[(names.index(name) + offset) % len(names)]
            with mock.patch.object(checkpoint.log, "warning") as warned:
                trainer.load(folder / saved)
            said = ["another plan" in call.args[0] for call in warned.call_args_list]
            assert said == [True] * (trainer.mesh.world.rank == 0)
            assert (trainer.steps_done, trainer.data_position) == (NUM_BEFORE, 17)
            with mock.patch.object(snapshot, "MOST_FILE_BYTES", 20_000):
                trainer.save(folder / f"{saved} by {name}")
            assert portable_files(folder / f"{saved} by {name}") == portable_files(folder / saved), (saved, name)
            losses = json.loads((folder / f"{saved}.json").read_text())
            assert train_on_tokens(trainer, NUM_AFTER) == pytest.approx(losses, rel=1e-10), (saved, name)


ACTIONS = {"write": write, "read": read}


@ranks(2)
def on_two(action: str, folder: Path) -> None:
    ACTIONS[action](folder, 2)


@ranks(4)
def on_four(action: str, folder: Path) -> None:
    ACTIONS[action](folder, 4)


@ranks(8)
def on_eight(action: str, folder: Path) -> None:
    ACTIONS[action](folder, 8)


@pytest.mark.long
def test_any_plan_goes_on_from_what_any_other_saved(tmp_path: Path) -> None:
    assert sum(len(plans_of(num_ranks)) for num_ranks in (1, 2, 4, 8)) == len(PLANS)
    for action in ACTIONS:
        ACTIONS[action](tmp_path, 1)
        for on_ranks in (on_two, on_four, on_eight):
            on_ranks(action=action, folder=tmp_path)
