"""From numbers to a cause: every kind of mistake, by what ranks would have seen of it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from weft.plan.plan import Axes, Data, Plan, Step
from weft.verification.diagnosis import Evidence, GradientErrors, diagnose, diagnose_loss, places
from weft.verification.verdict import Cause

TWO_BY_TWO = Plan(axes=Axes(data=2, tensor=2))


def off(rank: int = 0, **seen: Any) -> Evidence:
    return Evidence(rank=rank, is_off=True, **{"mine": 1.0, "true": 2.0, "worst": (0,), **seen})


def cause_of(*evidence: Evidence, plan: Plan = TWO_BY_TWO, what: str = "gradient") -> Cause:
    return diagnose(evidence, GradientErrors(), plan, what=what, num_targets=8)


def factor(
    ratio: float, plan: Plan, *, gradients: GradientErrors | None = None, num_targets: float = math.nan
) -> Cause:
    evidence = [off(rank, ratio=ratio, ratio_left=1e-9) for rank in range(plan.axes.num_ranks)]
    return diagnose(evidence, gradients or GradientErrors(), plan, what="gradient", num_targets=num_targets)


def all_off(plan: Plan, ratio: float, *, right: tuple[int, ...] = ()) -> GradientErrors:
    """Every gradient by the same factor, but on the ranks that are right."""
    everyone = range(plan.axes.num_ranks)
    return GradientErrors(
        off={rank: {} if rank in right else {"a": ratio, "b": ratio} for rank in everyone},
        right={rank: ["a", "b"] if rank in right else [] for rank in everyone},
    )


# ---- factors ----


@pytest.mark.parametrize("axis", ["data", "replicate", "pipeline", "tensor", "ulysses", "ring"])
@pytest.mark.parametrize("degree", [2, 3])
def test_a_factor_is_the_degree_of_an_axis(axis: str, degree: int) -> None:
    plan = Plan(axes=Axes(**{axis: degree}))
    for ratio, word in ((float(degree), "large"), (1 / degree, "small")):
        cause = factor(ratio, plan)
        assert (cause.kind, cause.axes) == ("factor", (axis,))
        assert f"too {word} by exactly {degree}, the degree of [axes] {axis}" in cause.text


def test_microbatches_and_targets_have_a_degree_too() -> None:
    plan = Plan(axes=Axes(data=2), step=Step(microbatches=5))
    assert factor(5.0, plan).axes == ("microbatches",) and "[step] microbatches" in factor(5.0, plan).text
    cause = factor(56.0, plan, num_targets=56.0)
    assert cause.axes == ("targets",) and "the targets in the batch" in cause.text


def test_products_are_named_only_where_no_single_axis_fits() -> None:
    plan = Plan(axes=Axes(ring=2, ulysses=3, data=5))
    assert factor(6.0, plan).axes == ("ring", "ulysses")
    assert "[axes] ring × [axes] ulysses" in factor(6.0, plan).text
    assert factor(3.0, plan).axes == ("ulysses",)
    assert set(factor(30.0, plan).axes) == {"ring", "ulysses", "data"}


def test_what_else_is_off_decides_between_axes_of_one_degree() -> None:
    cause = factor(2.0, TWO_BY_TWO, gradients=all_off(TWO_BY_TWO, 2.0))
    assert cause.axes == ("data", "tensor") and "every gradient is off by it" in cause.text
    some = GradientErrors(off={rank: {"a": 2.0} for rank in range(4)}, right={rank: ["b"] for rank in range(4)})
    cause = factor(2.0, TWO_BY_TWO, gradients=some)
    assert cause.axes == ("tensor", "data") and "1 of 2 gradients are off" in cause.text
    assert "the degree of [axes] tensor (also of [axes] data)" in cause.text


def test_a_stage_whose_gradients_are_all_off_points_to_the_pipeline() -> None:
    plan = Plan(axes=Axes(data=2, pipeline=2))
    cause = factor(2.0, plan, gradients=all_off(plan, 2.0, right=(2, 3)))
    assert cause.axes[0] == "pipeline" and "all gradients of pipeline stage 0 are off by it" in cause.text


def test_a_factor_that_is_no_degree_is_said_as_it_is() -> None:
    cause = factor(1.25, TWO_BY_TWO)
    assert (cause.kind, cause.axes) == ("factor", ()) and "exactly 1.25 times the true one" in cause.text
    assert "clips" not in cause.text
    clipped = Plan(axes=Axes(data=2), step=Step(clip_norm=0.1))
    cause = factor(0.8, clipped, gradients=all_off(clipped, 0.8))
    assert "the norm it clips by may be 1.25 times too large" in cause.text


def test_ranks_with_different_factors_have_none_in_common() -> None:
    evidence = [off(0, ratio=2.0, ratio_left=0.0), off(1, ratio=3.0, ratio_left=0.0)]
    assert cause_of(*evidence).kind == "unknown"


def test_a_weight_that_moved_too_far() -> None:
    cause = cause_of(off(ratio=2.0, ratio_left=0.0), what="weight")
    assert cause.kind == "factor" and "moved 2 times as far as it should" in cause.text


# ---- other mistakes ----


@pytest.mark.parametrize(
    ("seen", "what", "kind", "told"),
    [
        ({"state": "missing"}, "gradient", "missing", "it is missing here"),
        ({"state": "extra"}, "gradient", "extra", "one process has none"),
        ({"state": "not a number"}, "buffer", "not a number", "the buffer is not a number"),
        ({"previous_left": 0.0}, "gradient", "stale", "what it should have been one update before"),
        ({"previous_left": 0.0}, "weight", "stale", "it did not move in this step"),
        ({"is_copy": True}, "weight", "unpublished", "what the optimizer updated is right"),
        ({"sums_left": {"data": (1e-12, 1.0), "tensor": (1.0, 1.0)}}, "gradient", "not summed", "over [axes] data:"),
        ({"sums_left": {"data+ring": (1.0, 0.0)}}, "gradient", "not summed", "whose mean is the true one"),
        ({"swapped_with": 1}, "gradient", "swapped", "rank 0 has rank 1's"),
        ({"rows": (0, 4, 7, 8)}, "gradient", "rows", "only entries 4 to 7 of 8 along dim 0 are off"),
        ({}, "gradient", "unknown", "the furthest entry at [0] is 1 for 2"),
    ],
)
def test_other_mistakes(seen: dict[str, Any], what: str, kind: str, told: str) -> None:
    cause = cause_of(off(**seen), Evidence(rank=1), what=what)
    assert cause.kind == kind and told in cause.text, cause


def test_the_fewest_axes_that_add_up_are_named() -> None:
    sums = {"data+ring": (0.0, 1.0), "data": (0.0, 1.0), "ring": (0.0, 1.0)}
    assert cause_of(off(sums_left=sums), plan=Plan()).axes == ("data",)


def test_all_ranks_that_are_off_must_agree() -> None:
    evidence = [off(0, previous_left=0.0), off(1, previous_left=1.0)]
    assert cause_of(*evidence).kind == "unknown"


def test_rows_that_are_off_by_a_factor() -> None:
    seen = off(rows=(0, 16, 47, 48), rows_ratio=2.0, rows_left=1e-9)
    cause = cause_of(seen, plan=Plan(axes=Axes(ring=2)))
    assert (cause.kind, cause.axes) == ("factor", ("ring",))
    assert cause.text.startswith("only entries 16 to 47 of 48 along dim 0 are off: there it is too large by exactly 2")


def test_swapped_shares_point_to_the_axis_between_them() -> None:
    evidence = [off(0, swapped_with=1), off(1, swapped_with=0)]
    assert cause_of(*evidence).axes == ("tensor",)


# ---- losses and places ----


def test_losses() -> None:
    plan, off_too = Plan(axes=Axes(tensor=2, data=3)), GradientErrors(off={0: {"a": math.nan}}, right={0: ["b"]})
    assert diagnose_loss([math.nan] * 6, 2.0, None, off_too, plan).kind == "not a number"
    assert "different losses" in diagnose_loss([2.0, 2.1], 2.0, None, off_too, plan).text
    assert diagnose_loss([1.5] * 6, 2.0, 1.5, off_too, plan).kind == "stale"
    assert diagnose_loss([6.0] * 6, 2.0, 1.5, off_too, plan).axes == ("data",)
    cause = diagnose_loss([2.1] * 6, 2.0, None, off_too, plan)
    assert cause.axes == ("tensor",) and "these exchange in a forward pass: tensor" in cause.text
    cause = diagnose_loss([2.1] * 6, 2.0, None, GradientErrors(off={0: {}}, right={0: ["a"]}), plan)
    assert "gradients are right, so only what is reported is off" in cause.text


def test_a_true_loss_that_divides_nothing() -> None:
    plan, nothing = Plan(axes=Axes(data=2), step=Step(clip_norm=1.0)), GradientErrors()
    assert diagnose_loss([1.0] * 2, 0.0, None, nothing, plan).kind == "unknown"
    cause = diagnose_loss([math.nan] * 2, math.nan, None, nothing, plan)
    assert cause.kind == "not a number" and "one process's loss is not a number" in cause.text
    assert factor(0.0, plan, gradients=all_off(plan, 0.0)).kind == "factor"
    cause = cause_of(off(state="nowhere a number"), plan=plan)
    assert cause.kind == "not a number" and "look at the model or the data" in cause.text


def test_places_in_words() -> None:
    plan = Plan(axes=Axes(pipeline=2, data=2))
    everyone = [0, 1, 2, 3]
    assert places(everyone, everyone, plan) == "every rank"
    assert places([2, 3], everyone, plan) == "pipeline 1 (ranks 2, 3)"
    assert places([1, 3], everyone, plan) == "data 1 (ranks 1, 3)"
    assert places([3], [2, 3], plan) == "data 1 (rank 3)"
    assert places([0, 3], everyone, plan) == "rank 0: pipeline 0, data 0; rank 3: pipeline 1, data 1"
    assert places([2, 3], [2, 3], plan) == "pipeline 1 (ranks 2, 3)"
    assert places([0, 3], [0, 3], plan).startswith("all ranks that have it (rank 0: pipeline 0, data 0")


# ---- replicas that differ ----

LOCAL = Plan(axes=Axes(data=2, tensor=2), data=Data(sync="local", every=2))


def test_causes_of_a_wrong_exchange_between_replicas() -> None:
    everyone = range(4)
    cause = cause_of(*(off(rank, own_left=1e-6, previous_left=0.5) for rank in everyone), plan=LOCAL, what="weight")
    assert (cause.kind, cause.axes) == ("not exchanged", ("data",)) and "did not take part" in cause.text
    cause = cause_of(*(off(rank, mean_left=1e-6) for rank in everyone), plan=LOCAL, what="weight")
    assert (cause.kind, cause.axes) == ("exchanged", ("data",)) and "not due" in cause.text
    cause = cause_of(*(off(rank, outer_ratio=-1.0, outer_left=1e-6) for rank in everyone), plan=LOCAL, what="weight")
    assert (cause.kind, cause.axes) == ("outer", ("data",)) and "moved -1 times as far" in cause.text


def test_an_explanation_must_hold_on_all_ranks_that_are_off() -> None:
    mixed = (off(0, own_left=1e-6), off(1, own_left=0.5))
    assert cause_of(*mixed, plan=LOCAL, what="weight").kind == "unknown"
    ratios = (off(0, outer_ratio=2.0, outer_left=1e-6), off(1, outer_ratio=3.0, outer_left=1e-6))
    assert cause_of(*ratios, plan=LOCAL, what="weight").kind == "unknown"


def test_places_name_a_replica() -> None:
    assert places((2, 3), range(4), LOCAL) == "replica 1, data 1 (ranks 2, 3)"
    assert places((0, 2), range(4), LOCAL) == "tensor 0 (ranks 0, 2)"
    sharded = Plan(axes=Axes(replicate=2, data=2), data=Data(sync="local", every=2, shard="parameters"))
    assert places((0, 1), range(4), sharded) == "replica 0, replicate 0 (ranks 0, 1)"
