"""The sampled combinations with servers: each plan equals one process, or a replay of the order of its updates.

They are apart from `test_combinations.py` because workers are worlds of their own: ranks that were launched, and not a
process group that tests share.
"""

from __future__ import annotations

import pytest
import torch
from combinations import (
    MODELS,
    NUM_RANKS,
    OPTIMIZERS,
    cost_of,
    is_served_row,
    make_plan,
    name_of,
    num_ranks_of,
    read_rows,
    sizes_of,
)
from pairwise import Row
from ranks import ranks
from served_in_threads import servers_in_threads
from served_training import leave_group
from test_combinations import make_batch

from weft.verification.verify import verify

ROWS = sorted(filter(is_served_row, read_rows()[0]), key=cost_of)


def check_row(row: Row) -> None:
    leave_group()
    plan = make_plan(row)
    torch.manual_seed(0)
    with servers_in_threads():
        outcome = verify(
            MODELS[row["model"]](),
            plan,
            loss="cross-entropy",
            optimizer=OPTIMIZERS[row["optimizer"]],
            batches=[make_batch(row, size, seed) for seed, size in enumerate(sizes_of(row))],
            device="cpu",
        ).require()
    assert ("replays" in outcome.rule) == (plan.axes.data != 1 and not plan.server.updates_together)
    assert {one.what for one in outcome.differences} >= {"loss", "gradient", "weight"}


@ranks(4, fresh=True)
def on_4(row: Row) -> None:
    check_row(row)


@ranks(8, fresh=True)
def on_8(row: Row) -> None:
    check_row(row)


ON_RANKS = dict(zip(NUM_RANKS, (on_4, on_8), strict=True))


@pytest.mark.sampled(2, long=6)
@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_a_plan_with_servers_gives_the_answer_of_one_process(row: Row) -> None:
    ON_RANKS[num_ranks_of(row)](row=row)
