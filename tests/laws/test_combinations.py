"""Every feasible pair of values of a plan runs on 4 or 8 ranks and equals one process.

The rows are computed: `combinations.json` is a small sample of all plans in which every pair of values occurs
(`pairwise.py`). Pairs in no row must be ones that weft refuses.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from combinations import (
    FIELDS,
    MODELS,
    NUM_RANKS,
    OPTIMIZERS,
    OTHERWISE,
    PLAN_FIELDS,
    cost_of,
    is_served_row,
    make_plan,
    name_of,
    num_ranks_of,
    read_rows,
    settle,
    sizes_of,
)
from meshes import verify
from oracle import Batch, image_batch, token_batch
from pairwise import Row, pairs_of
from ranks import ranks

from weft.plan.fields import facts_of
from weft.plan.plan import SECTIONS

ALL_ROWS, NEVER = read_rows()
ROWS = [row for row in ALL_ROWS if not is_served_row(row)]


def make_batch(row: Row, size: int, seed: int) -> Batch:
    return (image_batch if row["model"] == "convnet" else token_batch)(size, seed=seed)


def check_row(row: Row) -> None:
    verify(
        MODELS[row["model"]](),
        make_plan(row),
        loss="cross-entropy",
        optimizer=OPTIMIZERS[row["optimizer"]],
        batches=[make_batch(row, size, seed) for seed, size in enumerate(sizes_of(row))],
        dtype=torch.float64,
        device="cpu",
    ).require()


@ranks(4)
def on_4(row: Row) -> None:
    check_row(row)


@ranks(8)
def on_8(row: Row) -> None:
    check_row(row)


ON_RANKS = dict(zip(NUM_RANKS, (on_4, on_8), strict=True))


NUM_EVERY_TIME = 30
NUM_LOCAL = 6
"""Rows of these whose replicas differ: they take more steps, so none would be among the cheapest."""


NUM_CODED = 6
"""Rows of these that compress gradients, each by another codec."""


def cheapest_rows() -> list[Row]:
    """The rows that `make test` runs."""
    by_cost = sorted(ROWS, key=cost_of)
    local = [row for row in by_cost if row["data.sync"] == "local"][:NUM_LOCAL]
    others = [row for row in by_cost if row["data.sync"] != "local"]
    coded = list({row["codec.name"]: row for row in reversed(others) if is_coded(row)}.values())
    coded = sorted(coded, key=cost_of)[:NUM_CODED]
    plain = [row for row in others if not is_coded(row)]
    return sorted([*plain[: NUM_EVERY_TIME - NUM_LOCAL - NUM_CODED], *coded, *local], key=cost_of)


def is_coded(row: Row) -> bool:
    return row["codec.name"] not in ("none", "half")


EVERY_TIME = cheapest_rows()
OVER_STRICT = EVERY_TIME[::3]
"""Rows that `make test` runs over the strict stand-in for NCCL (`test_strict_combinations.py`) instead of here."""
SELDOM = [row for row in ROWS if row not in EVERY_TIME or row in OVER_STRICT]
"""Rows that only `make test-long` runs here."""


@pytest.mark.sampled(6, long=42)
@pytest.mark.parametrize(
    "row", [pytest.param(row, id=name_of(row), marks=[pytest.mark.long] * (row in SELDOM)) for row in ROWS]
)
def test_a_plan_gives_the_answer_of_one_process(row: Row) -> None:
    ON_RANKS[num_ranks_of(row)](row=row)


def test_every_row_is_a_plan_in_which_everything_has_an_effect() -> None:
    assert len(EVERY_TIME) == NUM_EVERY_TIME
    assert any(row["data.sync"] == "local" for row in OVER_STRICT)
    assert any(is_coded(row) for row in OVER_STRICT) and sum(map(is_coded, EVERY_TIME)) >= NUM_CODED
    for row in ALL_ROWS:
        assert settle(row) == row, name_of(row)


def test_every_pair_of_values_meets_or_is_known_not_to() -> None:
    met = {pair for row in ALL_ROWS for pair in pairs_of(row)}
    wanted = {
        ((one, left), (other, right))
        for one, other in itertools.combinations(FIELDS, 2)
        for left in FIELDS[one]
        for right in FIELDS[other]
    }
    assert met <= wanted and not met & set(NEVER)
    assert wanted - met == set(NEVER)


def test_every_field_of_a_plan_is_here_or_somewhere_else() -> None:
    known = {f"{section}.{field}" for section, kind in SECTIONS.items() for field in facts_of(kind)}
    assert known == PLAN_FIELDS.keys() | OTHERWISE.keys()
    assert not PLAN_FIELDS.keys() & OTHERWISE.keys()
