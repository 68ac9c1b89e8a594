"""Planted faults and the verdicts of `verify` on them.

A plant has the effect of a real mistake: gradients that were summed instead of averaged, an exchange that was left out,
a shard on the wrong rank. Each is a patch that is undone before the test ends, because the ranks run other tests
afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from meshes import verify
from oracle import SGD, image_batch, small_convnet, small_gpt, token_batch

from weft.comm.collectives import Pending
from weft.comm.group import Group, Traffic
from weft.plan.plan import Plan
from weft.training.parallelize import parallelize
from weft.training.trainer import Trainer
from weft.verification import verify as verify_module
from weft.verification.verdict import Finding

Patch = pytest.MonkeyPatch
Plant = Callable[[Patch, Trainer], None]
"""A change of the trainer that verify has made, or of weft itself."""


def find(
    plan: Plan, plant: Plant, *, num_steps: int = 1, optimizer: Any = SGD, images: bool = False, **model: Any
) -> Finding:
    """The verdict of verify on a plan with a plant; without the plant it passes. `images`: with batch norms."""

    def run() -> Any:
        made = small_convnet(**model) if images else small_gpt(**{"num_layers": 2, **model})
        batches = [(image_batch if images else token_batch)(8, seed=seed) for seed in range(num_steps)]
        return verify(made, plan, loss="cross-entropy", optimizer=optimizer, batches=batches, device="cpu")

    assert run().require().first is None
    with pytest.MonkeyPatch.context() as patch:

        def planted(*args: Any, **kwargs: Any) -> Trainer:
            # After `parallelize`, which itself compares the forward pass of a split model.
            trainer = parallelize(*args, **kwargs)
            plant(patch, trainer)
            return trainer

        patch.setattr(verify_module, "parallelize", planted)
        outcome = run()
    assert not outcome.ok and outcome.first is not None
    everybodys: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybodys, str(outcome.first))
    assert len(set(everybodys)) == 1
    return outcome.first


def after_exchange(change: Callable[[Trainer], None]) -> Plant:
    """A change of gradients after their exchange."""

    def plant(patch: Patch, trainer: Trainer) -> None:
        finish = trainer.sync.finish

        def finish_and_change(*args: Any, **kwargs: Any) -> Any:
            totals = finish(*args, **kwargs)
            with torch.no_grad():
                change(trainer)
            return totals

        trainer.sync.finish = finish_and_change  # type: ignore[method-assign]

    return plant


def scaled(factor: float) -> Plant:
    def scale(trainer: Trainer) -> None:
        for piece in trainer.sync.pieces:
            if piece.tensor.grad is not None:
                piece.tensor.grad *= factor

    return after_exchange(scale)


def in_exchange(where: str, factor: float, *, axis: str, position: int = 0, **given: Any) -> Plant:
    """Give a tensor that is too large to a collective along one axis, as one file of weft calls it.

    `given` restricts it to calls with these keyword arguments.
    """

    def plant(patch: Patch, trainer: Trainer) -> None:
        *module, name = where.split(".")
        real = getattr(__import__(".".join(module), fromlist=["_"]), name)

        def exchange(*args: Any, **kwargs: Any) -> Any:
            group = next(one for one in args if isinstance(one, Group))
            if axis in group.axis and all(kwargs.get(key) == value for key, value in given.items()):
                args[position].mul_(factor)
            return real(*args, **kwargs)

        patch.setattr(where, exchange)

    return plant


def without(where: str, axis: str) -> Plant:
    """Leave out an exchange along an axis."""

    def plant(patch: Patch, trainer: Trainer) -> None:
        *module, name = where.split(".")
        real = getattr(__import__(".".join(module), fromlist=["_"]), name)

        def exchange(tensor: Any, group: Group, **kwargs: Any) -> Any:
            is_skipped = axis in group.axis and group.purpose == "gradients"
            return Pending(None, Traffic()) if is_skipped else real(tensor, group, **kwargs)

        patch.setattr(where, exchange)

    return plant
