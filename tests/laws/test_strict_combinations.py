"""The sampled combinations over the strict stand-in for NCCL (`helpers/strict_nccl`), its modes in turn."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

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
from strict_nccl.mode import StrictMode
from strict_plans import verify_over_strict
from test_combinations import OVER_STRICT, make_batch

ROWS = [row for row in read_rows()[0] if not is_served_row(row)]
MODES = {
    "lazy": StrictMode(),
    "eager": StrictMode(is_eager=True),
    "delays": StrictMode(delay_ms=2.0),
    "one stream": StrictMode(one_stream=True),
}


def check_row(row: Row, mode: str) -> None:
    verify_over_strict(
        MODELS[row["model"]](),
        make_plan(row),
        MODES[mode],
        loss="cross-entropy",
        optimizer=OPTIMIZERS[row["optimizer"]],
        batches=[make_batch(row, size, seed) for seed, size in enumerate(sizes_of(row))],
        dtype=torch.float64,
    ).require()


@ranks(4)
def on_4(row: Row, mode: str) -> None:
    check_row(row, mode)


@ranks(8)
def on_8(row: Row, mode: str) -> None:
    check_row(row, mode)


ON_RANKS = dict(zip(NUM_RANKS, (on_4, on_8), strict=True))


def turns() -> Iterator[tuple[Row, str]]:
    """Every row, the cheapest first, with a mode. A pipeline posts its receives before the exchanges inside its stages,
    which must be able to run beside them: it is not for one stream."""
    modes, pipeline_modes = itertools.cycle(MODES), itertools.cycle(mode for mode in MODES if mode != "one stream")
    for row in sorted(ROWS, key=cost_of):
        yield row, next(modes if row["axes.pipeline"] == 1 else pipeline_modes)


@pytest.mark.sampled(3, long=42)
@pytest.mark.parametrize(
    ("row", "mode"),
    [
        pytest.param(row, mode, id=f"{mode}: {name_of(row)}", marks=[pytest.mark.long] * (row not in OVER_STRICT))
        for row, mode in turns()
    ],
)
def test_a_plan_over_the_stand_in_gives_the_answer_of_one_process(row: Row, mode: str) -> None:
    ON_RANKS[num_ranks_of(row)](row=row, mode=mode)
