"""Small trainers, and faults that make a checkpoint fail at a chosen moment, for the tests of damage and of kills."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from oracle import ADAMW, cut_evenly, data_plan, make_trainer, small_gpt, token_batch
from torch import Tensor

from weft.checkpoint import folders as checkpoint_folders
from weft.checkpoint import save as saving
from weft.errors import CheckpointError
from weft.training.trainer import Trainer


def trainer_of(num_ranks: int, *, seed: int = 0, **changes: Any) -> Trainer:
    torch.manual_seed(seed)
    return make_trainer(small_gpt(**changes), data_plan(num_ranks), optimizer=ADAMW)


def train(trainer: Trainer, num_steps: int = 1) -> float:
    for _ in range(num_steps):
        batch = token_batch(8, seed=trainer.steps_done)
        loss = trainer.step(*cut_evenly(batch, trainer.data_size)[trainer.data_rank])
    return float(loss)


def state(trainer: Trainer) -> dict[str, Tensor]:
    tensors = {name: p.detach() for name, p in trainer.named_model.named_parameters()}
    for number, values in enumerate(trainer.optimizer.state.values()):
        tensors |= {f"{number} {key}": value for key, value in values.items()}
    tensors |= {"rng": torch.get_rng_state(), "step": torch.tensor([trainer.steps_done, trainer.data_position])}
    return {name: tensor.clone() for name, tensor in tensors.items()}


@contextmanager
def refused(trainer: Trainer, *words: str) -> Iterator[None]:
    """Check that the body raises a CheckpointError with these words and leaves the trainer exactly as it was."""
    before = state(trainer)
    with pytest.raises(CheckpointError) as caught:
        yield
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)
    after = state(trainer)
    assert before.keys() == after.keys()
    assert [name for name, value in before.items() if not torch.equal(value, after[name])] == []


def failing(function: Callable[..., Any], *, at_call: int, then: Callable[[], None]) -> Callable[..., Any]:
    """A function whose n-th call runs something else, before or instead of its work."""
    calls = 0

    def wrapped(*arguments: Any, **settings: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at_call:
            then()
        return function(*arguments, **settings)

    return wrapped


MOMENTS = {
    "headers": (saving, "_create_files", 1),
    "first tensor": (saving, "write_runs", 1),
    "later tensor": (saving, "write_runs", 20),
    "checksums": (saving, "checksums", 1),
    "index": (saving, "_write_index", 1),
    "before the renames": (checkpoint_folders, "force_to_disk", 1),
    "after the renames": (checkpoint_folders, "force_to_disk", 2),
}
"""Points at which a save can be interrupted: what is patched, and at which of its calls."""
