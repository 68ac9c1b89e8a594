"""Pipelines that flush: every schedule gives the losses, gradients, weights and buffers of one process.

Awkward models are in `test_pipeline_models.py`; evaluation, checkpoints and refusals in `test_pipeline_state.py`.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from meshes import verify
from oracle import ADAMW, SGD, Batch, cut_evenly, image_batch, make_trainer, small_convnet, small_gpt, token_batch
from pipelines import FLUSHING, pipeline_plan
from ranks import ranks
from torch import Tensor, nn

from weft.errors import DataError
from weft.plan.pipeline.communication import schedule_of
from weft.plan.plan import Plan

gpt: Callable[..., nn.Module] = functools.partial(small_gpt, num_layers=4)
convnet: Callable[..., nn.Module] = functools.partial(small_convnet, num_blocks=4)


def sum_and_count(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Counts its targets by itself, some of them twice, so that the number is not known beforehand."""
    weight = 1.0 + (targets % 3 == 0).to(logits.dtype)
    losses = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none")
    return (losses * weight.flatten()).sum(), weight.sum()


def mean(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    plan: Plan
    model: Callable[[], nn.Module] = gpt
    batch: Callable[..., Batch] = token_batch
    sizes: tuple[int, ...] = (13, 5, 13)
    """Samples of each global batch."""
    loss: Any = "cross-entropy"
    optimizer: Any = ADAMW
    is_long: bool = False


def on(*plan: Any, **changes: Any) -> Case:
    """A case: the arguments of a plan, and what is special besides."""
    own = {name: changes.pop(name) for name in tuple(changes) if name in Case.__dataclass_fields__}
    return Case(plan=pipeline_plan(*plan, **changes), **own)


def images(*plan: Any, **changes: Any) -> Case:
    return on(*plan, **{"model": convnet, "batch": image_batch, "sizes": (14, 6, 14), **changes})


ZERO_1, ZERO_2, ZERO_3 = {"shard": "optimizer"}, {"shard": "gradients"}, {"shard": "parameters"}

SHORT = {("naive", 2, 3), ("1f1b", 2, 1), ("1f1b", 3, 12), ("zero-bubble", 4, 7)}

CASES: dict[str, Case] = {
    # every schedule, 2, 3 and 4 stages, fewer and more microbatches than stages; a batch of 5 leaves some of them empty
    # (all numbers of microbatches are compared as lists of actions in tests/plan/test_schedules.py)
    **{
        f"{schedule}, {p} stages, {m} microbatches": on(
            p, schedule=schedule, microbatches=m, is_long=(schedule, p, m) not in SHORT
        )
        for schedule in FLUSHING
        if schedule != "interleaved"
        for p in (2, 3, 4)
        for m in sorted({1, p - 1, p, p + 1, 2 * p, *(m for name, q, m in SHORT if (name, q) == (schedule, p))})
    },
    **{
        f"interleaved, {p} ranks of {c}, {m} microbatches": on(
            p, schedule="interleaved", chunks=c, microbatches=m, is_long=(p, c, m) not in ((2, 2, 3), (3, 2, 3)),
            model=functools.partial(small_gpt, num_layers=p * c), sizes=(13, 1, 13),
        )  # fmt: skip
        for p, c in ((2, 2), (2, 3), (3, 2), (4, 2))
        for m in sorted({1, 3, p, 2 * p - 1, 2 * p, 3 * p})
    },
    # the sizes of batches and of parts
    "fewer samples than microbatches": on(2, microbatches=6, sizes=(8, 1, 2), clip_norm=0.1),
    "fewer samples, data 2": on(2, schedule="gpipe", data=2, microbatches=6, sizes=(13, 1, 3), clip_norm=0.1),
    "cuts": on(3, cuts=(1, 2)),
    "sockets": on(2, schedule="zero-bubble", microbatches=4, transport="c10d", is_long=True),
    "sockets, interleaved, data 2": on(2, schedule="interleaved", data=2, microbatches=2, transport="c10d", **ZERO_3),
    # data, ZeRO
    "data 2": on(2, data=2, microbatches=4, clip_norm=0.1, is_long=True),
    "data 2, interleaved": on(2, data=2, schedule="interleaved", microbatches=4, clip_norm=0.1, is_long=True),
    **{
        f"{name}, {schedule}": on(2, data=2, schedule=schedule, microbatches=4, clip_norm=0.1, is_long=True, **zero)
        for name, zero in (("zero 1", ZERO_1), ("zero 2", ZERO_2), ("zero 3", ZERO_3))
        for schedule in FLUSHING
    },
    "zero 3 by microbatch": on(2, data=2, microbatches=3, reshard="microbatch", is_long=True, **ZERO_3),
    "zero 3 by microbatch, interleaved": on(
        2, data=2, schedule="interleaved", microbatches=4, reshard="microbatch", **ZERO_3
    ),
    # convnets: statistics move by microbatch, also through parts without samples
    "convnet": images(3, schedule="gpipe", microbatches=2, is_long=True),
    "convnet, zero-bubble": images(4, schedule="zero-bubble", microbatches=3, clip_norm=0.1, is_long=True),
    "convnet, interleaved": images(2, schedule="interleaved", microbatches=2, is_long=True),
    "convnet, data 2, empty parts": images(2, data=2, microbatches=3, sizes=(14, 4, 1, 14), optimizer=SGD),
    "convnet, empty parts": images(2, microbatches=4, sizes=(8, 2, 8)),
    "convnet, zero 3": images(2, data=2, schedule="zero-bubble", microbatches=2, is_long=True, **ZERO_3),
    # recomputation, losses, heads
    "recompute all": on(2, schedule="1f1b", microbatches=3, recompute="full", is_long=True),
    "recompute all, zero-bubble": on(2, schedule="zero-bubble", microbatches=3, recompute="full", is_long=True),
    "recompute all, zero 3": on(2, data=2, schedule="interleaved", recompute="full", is_long=True, **ZERO_3),
    "recompute some": on(4, schedule="gpipe", microbatches=3, recompute="selective", is_long=True),
    "recompute all, convnet": images(2, schedule="zero-bubble", microbatches=2, recompute="full"),
    "mean": on(2, microbatches=3, loss=mean, sizes=(7, 3, 2), is_long=True),
    "sum and count": on(2, microbatches=3, loss=sum_and_count, clip_norm=0.1, sizes=(7, 3, 2)),
    "sum and count, data 2": on(2, data=2, schedule="zero-bubble", loss=sum_and_count, sizes=(7, 3, 2), is_long=True),
    "sum and count, zero 3": on(2, data=2, loss=sum_and_count, sizes=(7, 3, 2), clip_norm=0.1, is_long=True, **ZERO_3),
    "not tied": on(3, model=lambda: gpt(tied=False, positions="learned", norm="layer", bias=True), is_long=True),
    "compiled blocks": on(2, microbatches=2, compiled=True, sizes=(8, 8), is_long=True),
}  # fmt: skip


def check(name: str) -> None:
    case = CASES[name]
    batches = [case.batch(size, seed=seed) for seed, size in enumerate(case.sizes)]
    model = case.model()
    outcome = verify(
        model, case.plan, loss=case.loss, optimizer=case.optimizer, batches=batches, device="cpu"
    ).require()
    weights = {difference.name for difference in outcome.differences if difference.what == "weight"}
    assert weights == {parameter_name for parameter_name, _ in model.named_parameters()}, "nothing was left out"


ON_RANKS = {world: ranks(world, timeout_s=180)(check) for world in (2, 3, 4)}


@pytest.mark.sampled(3, long=29)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if case.is_long else []) for name, case in CASES.items()]
)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch.compile's own
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_a_pipeline_gives_the_answer_of_one_process(name: str) -> None:
    ON_RANKS[CASES[name].plan.axes.num_ranks](name=name)


@ranks(2)
@pytest.mark.parametrize("schedule", ["zero-bubble", pytest.param("1f1b", marks=pytest.mark.long)])
def test_bf16_is_close_to_one_process_in_bf16(schedule: str) -> None:
    torch.manual_seed(0)
    model = gpt()
    losses = {}
    for name, plan in {
        "alone": pipeline_plan(1, microbatches=4, data=2, compute="bf16"),
        "pipeline": pipeline_plan(2, microbatches=4, compute="bf16", schedule=schedule, clip_norm=1.0),
    }.items():
        trainer = make_trainer(copy.deepcopy(model), plan, optimizer=ADAMW, example=token_batch(2)[0])
        batches = [token_batch(8, seed=number) for number in range(5)]
        losses[name] = [
            float(trainer.step(*cut_evenly(batch, trainer.data_size)[trainer.data_rank])) for batch in batches
        ]
    assert losses["pipeline"] == pytest.approx(losses["alone"], rel=5e-3)


@ranks(4)
@pytest.mark.parametrize("schedule", ["interleaved", "zero-bubble"])
def test_the_trace_tells_what_every_rank_did_in_the_order_of_the_schedule(schedule: str) -> None:
    pipeline, data = (2, 2) if schedule == "interleaved" else (4, 1)
    plan = pipeline_plan(pipeline, schedule=schedule, data=data, microbatches=4)
    trainer = make_trainer(gpt(), plan, example=token_batch(2)[0])
    for seed in range(2):
        trainer.step(*token_batch(8, seed=seed))
    timeline = trainer.trace()
    assert timeline.num_ranks == pipeline
    assert all(span.start_s < span.stop_s for span in timeline.spans)
    for rank, actions in enumerate(schedule_of(trainer.plan)):
        own = [span for span in timeline.spans if span.rank == rank]
        spans = [span for span in own if span.action.kind not in ("send", "receive")]
        planned = [action for action in actions if action.kind not in ("send", "receive")]
        assert [span.action for span in spans] == planned
        assert all(one.stop_s <= next_one.start_s for one, next_one in zip(spans, spans[1:], strict=False))
        moved = {kind: sum(s.action.kind == kind for s in own) for kind in ("send", "receive")}
        assert moved == {kind: sum(a.kind == kind for a in actions) for kind in moved}


@pytest.mark.long
@pytest.mark.sampled(1)
@ranks(4)
@pytest.mark.parametrize("shard", ["nothing", "parameters"])
def test_a_refused_step_leaves_nothing_behind(shard: str) -> None:
    """No targets at all, then inputs that do not fit: refused on every rank, and the next step is as if never asked."""
    torch.manual_seed(0)
    model, batches = gpt().double(), [token_batch(size, seed=size) for size in (8, 6, 9)]
    plan = pipeline_plan(2, data=2, schedule="zero-bubble", microbatches=3, shard=shard, clip_norm=0.1)
    trainers = [make_trainer(copy.deepcopy(model), plan, optimizer=ADAMW, example=batches[0][0]) for _ in range(2)]
    for inputs, targets in batches:
        losses = []
        for trainer, is_disturbed in zip(trainers, (False, True), strict=True):
            mine = cut_evenly((inputs, targets), 2)[trainer.data_rank]
            if is_disturbed:
                with pytest.raises(DataError, match="no rank has a target"):
                    trainer.step(mine[0], torch.full_like(mine[1], -100))
                with pytest.raises(DataError, match="dim 0 is samples"):
                    trainer.step(mine[0], mine[1][:-1])
                trainer.evaluate([mine])
            losses.append(float(trainer.step(*mine)))
        assert losses[1] == pytest.approx(losses[0], rel=1e-12)
