"""Messages of batches of a new shape, which on GPUs go through host memory: same losses, and only those."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from oracle import make_trainer, pipeline_plan, small_gpt, token_batch
from ranks import ranks

from weft.comm.group import Group
from weft.parallel.pipeline import stage_messages

SCHEDULES = {
    "1f1b": pipeline_plan(2, microbatches=4),
    "interleaved": pipeline_plan(2, microbatches=4, schedule="interleaved", chunks=2),
    "2bw": pipeline_plan(2, microbatches=2, schedule="2bw"),
}
NUM_STEPS = 8


def train(name: str, *, through_host: bool) -> tuple[list[float], list[set[str]]]:
    """The losses of some steps, and the purposes of the groups that each sent messages on; the last has a new shape."""
    inputs, targets = token_batch(8)
    torch.manual_seed(0)
    trainer = make_trainer(small_gpt(num_layers=4, tied=False).double(), SCHEDULES[name], example=inputs[:2])
    assert trainer.pipeline_step is not None
    if through_host:
        trainer.pipeline_step.pipeline.messages._host = trainer.mesh.group("pipeline", "control")
    purposes: list[set[str]] = []
    send = stage_messages.send

    def watched(tensor: object, group: Group, **given: object) -> object:
        purposes[-1].add(group.purpose)
        return send(tensor, group, **given)  # type: ignore[arg-type]

    losses = []
    with mock.patch("weft.parallel.pipeline.stage_messages.send", watched):
        for number in range(NUM_STEPS):
            purposes.append(set())
            size = 4 if number == NUM_STEPS - 1 else 8
            losses.append(float(trainer.step(inputs[:size], targets[:size])))
        trainer.flush()
    return losses, purposes


@pytest.mark.sampled(1)
@ranks(2)
@pytest.mark.parametrize("name", SCHEDULES)
def test_first_messages_go_through_the_host_and_losses_are_the_same(name: str) -> None:
    plain, ways = train(name, through_host=False)
    assert all("control" not in purposes for purposes in ways)
    staged, ways = train(name, through_host=True)
    assert list(map(str, staged)) == list(map(str, plain))  # 2bw has nan until the first microbatches have passed
    assert "control" in ways[0] and "control" not in ways[NUM_STEPS - 2]
    if name != "2bw":
        assert ways[0] <= {"control", "gradients"}  # the totals follow gradients
        assert "control" in ways[-1] and "control" not in ways[1]
