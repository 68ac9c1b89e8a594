"""Flush-free pipelines on ranks equal the plain loops of `sequential.py`: weights and losses, to the bit in float64."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import gathered, ranks
from streamed import (
    ADAMW,
    LENGTH,
    OPTIMIZERS,
    SGD,
    Net,
    assert_same,
    batch_of,
    batches_of,
    expect,
    make_streaming,
    run,
    stream_plan,
    streaming,
)
from torch.func import functional_call

from weft.blueprint import find_blueprint
from weft.errors import DataError, ModelError
from weft.parallel.state.rng import PlaceSeeds
from weft.plan.pipeline.communication import schedule_of
from weft.plan.plan import Plan
from weft.training.data.trees import split_microbatches
from weft.training.step.pipeline_stream import shift_schedule
from weft.training.trainer import Trainer

SCHEDULES = pytest.mark.parametrize(
    "schedule", ["pipedream", pytest.param("vertical sync", marks=pytest.mark.long), "2bw"]
)
RATE = [1.0, 0.5, 0.25, 0.8, 0.7, 0.1, 0.3, 0.9].__getitem__


def plan_of(schedule: str, num_stages: int, microbatches: int, **changes: Any) -> Plan:
    if schedule == "vertical sync":
        return stream_plan("pipedream", num_stages, microbatches, vertical_sync=True, **changes)
    return stream_plan(schedule, num_stages, microbatches, **changes)


def check(
    plan: Plan, sizes: tuple[int, ...], *, flushes: Collection[int] = (), tolerance: float = 0.0, **settings: Any
) -> Trainer:
    """Train under the plan and by the plain loop; weights and losses must be equal, also between ranks."""
    batches = batches_of(*sizes)
    trainer = make_streaming(plan, **settings)
    losses = run(trainer, batches, flushes=flushes)
    expected = expect(plan, batches, flushes=flushes, **settings)
    assert_same(trainer, expected.run.history[-1], tolerance=tolerance)
    true = torch.tensor(expected.losses(plan, len(batches), flushes), dtype=torch.float64)
    mine = torch.tensor(losses, dtype=torch.float64)
    torch.testing.assert_close(mine, true, rtol=tolerance, atol=0.0, equal_nan=True)
    assert len(set(gathered(str(losses)))) == 1
    return trainer


def check_table(trainer: Trainer) -> None:
    """Weight versions and activations that were live at once: what the table of the methods says, and no more."""
    plan, stage = trainer.plan, trainer.mesh.index("pipeline")
    p = plan.axes.pipeline
    versions = 2 if plan.pipeline.schedule == "2bw" else p if plan.pipeline.vertical_sync else p - stage
    assert streaming(trainer).versions.most_live == versions
    assert streaming(trainer).pipeline.most_in_flight == p - stage


@pytest.mark.sampled(1, long=3)
@ranks(2)
@SCHEDULES
@pytest.mark.parametrize("optimizer", [pytest.param(n, marks=[pytest.mark.long] * (n != "adamw")) for n in OPTIMIZERS])
def test_two_stages(schedule: str, optimizer: str) -> None:
    sizes = (6, 7, 5, 9, 6, 4)
    check_table(check(plan_of(schedule, 2, 3), sizes, optimizer=OPTIMIZERS[optimizer], schedule=RATE, flushes=(4, 5)))


@pytest.mark.long
@ranks(3)
@SCHEDULES
def test_three_stages(schedule: str) -> None:
    check_table(check(plan_of(schedule, 3, 3), (6, 7, 5, 9, 6, 7), optimizer=SGD, schedule=RATE, flushes=(4,)))


@pytest.mark.long
@ranks(4)
@SCHEDULES
def test_four_stages(schedule: str) -> None:
    check_table(check(plan_of(schedule, 4, 4), (8, 9, 11, 8, 8), optimizer=ADAMW, schedule=RATE, flushes=(4,)))


@pytest.mark.sampled(long=3)
@ranks(4, timeout_s=300.0)
@pytest.mark.long
@pytest.mark.parametrize(
    ("schedule", "microbatches"),
    [*itertools.product(["pipedream", "vertical sync"], [1, 2, 5, 8]), ("2bw", 4), ("2bw", 5), ("2bw", 8), ("2bw", 12)],
)
def test_many_steps(schedule: str, microbatches: int) -> None:
    sizes = tuple(2 * microbatches + step % 3 for step in range(12))
    check(plan_of(schedule, 4, microbatches), sizes, optimizer=ADAMW, flushes=(3, 4, 9))


@pytest.mark.long
@ranks(4)
@SCHEDULES
def test_beside_data_parallelism(schedule: str) -> None:
    """Batch norms are synchronised, so that the plain loop sees the microbatches of both data ranks as one."""
    trainer = check(plan_of(schedule, 2, 3, data=2), (12, 15, 13, 12), optimizer=SGD, flushes=(2,), tolerance=1e-11)
    trainer.check_divergence()


@pytest.mark.sampled(1)
@ranks(2)
@SCHEDULES
def test_microbatches_without_samples(schedule: str) -> None:
    """They have no gradient: PipeDream's update leaves the weights as they are, and the loss is the one before."""
    plan, batches = plan_of(schedule, 2, 3), batches_of(6, 1, 2, 7, 1, 6)
    trainer = make_streaming(plan)
    losses = run(trainer, batches)
    expected = expect(plan, batches)
    assert_same(trainer, expected.run.history[-1])
    assert all(loss == loss and loss > 0 for loss in losses[1:]), losses


@ranks(4)
@pytest.mark.long
@SCHEDULES
def test_a_data_rank_without_samples(schedule: str) -> None:
    check(plan_of(schedule, 2, 2, data=2), (8, 9, 2, 8, 3, 9), optimizer=SGD, tolerance=1e-11)


@pytest.mark.long
@pytest.mark.sampled(1)
@ranks(2)
@SCHEDULES
def test_dropout_and_recomputation(schedule: str) -> None:
    """Random numbers are those of the model in one piece, and the same when a block is computed again."""
    batches = batches_of(6, 7, 6, 5)
    for recompute in ("none", "full"):
        plan = plan_of(schedule, 2, 3, recompute=recompute)
        trainer = make_streaming(plan, Net(dropout=0.3))
        run(trainer, batches)
        net = Net(dropout=0.3)
        draws = PlaceSeeds(net, find_blueprint(net), trainer.seeds)
        assert_same(trainer, expect(plan, batches, model=net, draws=draws).run.history[-1])


@ranks(3)
def test_clipping_with_2bw() -> None:
    plan = stream_plan("2bw", 3, 3, clip_norm=0.4)
    trainer = check(plan, (6, 7, 6, 9), optimizer=SGD, tolerance=1e-11)
    assert trainer.grad_norm is not None and float(trainer.grad_norm) > 0.4, "some gradient was clipped"


@ranks(2)
@SCHEDULES
def test_a_batch_without_targets_is_refused_on_all_ranks_in_one_call(schedule: str) -> None:
    plan, batches = plan_of(schedule, 2, 3), batches_of(6, 6, 6, 6)
    batches[1][1].fill_(-100)
    batches[2][1][:2] = -100
    trainer = make_streaming(plan)
    refused = []
    for step, batch in enumerate(batches):
        try:
            trainer.step(*batch)
        except DataError:
            refused.append(step)
    trainer.flush()
    assert gathered(refused) == [[2]] * 2
    assert_same(trainer, expect(plan, batches).run.history[-1])


@ranks(2)
def test_looking_changes_nothing_with_2bw() -> None:
    """Evaluation and generation empty the pipeline, and the next batches still use the weights they would have."""
    plan, batches = stream_plan("2bw", 2, 3), batches_of(6, 7, 6, 5)
    trainer = make_streaming(plan)
    for step, batch in enumerate(batches):
        if step == 2:
            inputs, targets = batch_of(6, seed=9)
            newest = expect(plan, batches[:2]).run.history[-1]
            # Without running statistics batch norms see the microbatches, whose sizes are the same.
            logits = [functional_call(Net(), newest, (part,)) for part in split_microbatches(inputs, 3)]
            true = F.cross_entropy(torch.cat(logits), targets)
            assert abs(trainer.evaluate([(inputs, targets)]) - float(true.detach())) < 1e-12
        trainer.step(*batch)
    trainer.flush()
    assert_same(trainer, expect(plan, batches).run.history[-1])


@pytest.mark.sampled(1)
@ranks(2)
@SCHEDULES
def test_generation_in_the_middle(schedule: str) -> None:
    """Tokens of the newest weights, the same on all ranks; with 2bw training is not affected."""
    plan, batches = plan_of(schedule, 2, 3), batches_of(6, 7, 6, 5, next_token=True)
    model = functools.partial(Net, next_token=True)
    trainer = make_streaming(plan, model())
    run(trainer, batches[:2])
    tokens = trainer.generate([1, 2, 3], num_tokens=4, context=LENGTH, temperature=0.0)
    newest, true = expect(plan, batches[:2], model=model()).run.history[-1], [1, 2, 3]
    for _ in range(4):
        logits = functional_call(model(), newest, (torch.tensor([true[-LENGTH:]]),))
        true.append(int(logits[0, -1].argmax()))
    assert gathered(tokens) == [true] * 2
    run(trainer, batches[2:])
    assert_same(trainer, expect(plan, batches, model=model(), flushes=(2,)).run.history[-1])


@pytest.mark.sampled(1)
@ranks(3)
@pytest.mark.parametrize("clip_norm", [0.0, 0.4])
def test_a_tied_embedding_with_2bw(clip_norm: float) -> None:
    """First and last stage hold it, use the same version of it, and add up their gradients; a norm counts it once."""
    plan, batches = stream_plan("2bw", 3, 4, clip_norm=clip_norm), batches_of(8, 9, 8, 7, next_token=True)
    trainer = make_streaming(plan, Net(next_token=True, tied=True))
    run(trainer, batches, flushes=(2,))
    expected = expect(plan, batches, model=Net(next_token=True, tied=True))
    assert_same(trainer, expected.run.history[-1], tolerance=1e-11)


@ranks(2)
def test_a_tied_embedding_with_pipedream_is_refused() -> None:
    with pytest.raises(ModelError, match='updates every stage by itself, and "embedding.weight" is on the stages of'):
        make_streaming(plan_of("pipedream", 2, 3), Net(next_token=True, tied=True))


@pytest.mark.parametrize("schedule", ["pipedream", "vertical sync", "2bw"])
def test_a_later_step_is_an_earlier_one_with_other_numbers(schedule: str) -> None:
    for p, m in itertools.product((2, 3, 4), (1, 2, 4, 5, 8)):
        if schedule == "2bw" and m < p:
            continue
        plan, at_once = plan_of(schedule, p, m), m if schedule == "2bw" else 1
        full = 2 * max(p - 1, at_once)
        first = -(-full // m) * m
        for start, num_steps in itertools.product((0, m, 3 * m), (1, 2, 7)):
            begin = functools.partial(schedule_of, plan, num_microbatches=m, drain=False)
            moved = start + num_steps * m
            for mine, true in zip(begin(first=first, start=0), begin(first=first + moved, start=start), strict=True):
                assert shift_schedule(mine, num_microbatches=moved, num_updates=moved // at_once) == true
