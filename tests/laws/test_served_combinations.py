"""Plans with servers, in a small sample in which every pair of their values occurs: each equals one process.

They are apart from `test_combinations.py` because workers are worlds of their own: ranks that were launched, and not a
process group that tests share.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from oracle import ADAMW, SGD, small_gpt, token_batch
from pairwise import Row, pairs_of, sample
from ranks import ranks
from served_in_threads import servers_in_threads
from served_training import leave_group, server_plan

from weft.plan.check import check
from weft.plan.plan import Plan
from weft.verification.verify import verify

WORKERS = 2
INSIDE = ("tensor", "pipeline", "ring", "ulysses")
FIELDS: dict[str, tuple[object, ...]] = {
    "mode": ("sync", "async", "bounded 0", "bounded 2"),
    "inside": ("nothing", *INSIDE),
    "shards": (1, 2),
    "microbatches": (1, 2),
    "clip_norm": (0.0, 0.05),
    "compensation": (0.0, 0.5),
    "lr_scaling": ("none", "staleness"),
    "bucket_bytes": (1000, 100_000),
    "optimizer": ("sgd", "adamw"),
    "batches": ("even", "uneven"),
}
OPTIMIZERS = {"sgd": SGD, "adamw": ADAMW}
BATCHES = {"even": (8, 8, 8), "uneven": (13, 1, 6)}


def plan_of(row: Row) -> Plan:
    mode, _, staleness = str(row["mode"]).partition(" ")
    server = {name: row[name] for name in ("shards", "compensation", "lr_scaling")}
    plan = server_plan(
        WORKERS,
        mode=mode,
        staleness=int(staleness or 0),
        microbatches=row["microbatches"],  # type: ignore[arg-type]
        clip_norm=row["clip_norm"],  # type: ignore[arg-type]
        bucket_bytes=row["bucket_bytes"],  # type: ignore[arg-type]
        **server,
    )
    inside = {} if row["inside"] == "nothing" else {str(row["inside"]): 2}
    return replace(plan, axes=replace(plan.axes, **inside))  # type: ignore[arg-type]


def settle(row: Row) -> Row | None:
    """The row, unless weft refuses it."""
    return None if check(plan_of(row)) else row


def cost_of(row: Row) -> float:
    return 1.0 if row["inside"] == "nothing" else 2.0


ROWS, NEVER = sample(FIELDS, settle, cost=cost_of)


def name_of(row: Row) -> str:
    return ", ".join(str(value) for value in row.values())


def check_row(row: Row) -> None:
    plan = plan_of(row)
    torch.manual_seed(0)
    batches = [token_batch(size, seed=seed) for seed, size in enumerate(BATCHES[str(row["batches"])])]
    with servers_in_threads():
        outcome = verify(
            small_gpt(),
            plan,
            loss="cross-entropy",
            optimizer=OPTIMIZERS[str(row["optimizer"])],
            batches=batches,
            device="cpu",
        ).require()
    assert ("replays" in outcome.rule) != plan.server.updates_together
    assert {one.what for one in outcome.differences} >= {"loss", "gradient", "weight"}


@ranks(2)
def on_2(row: Row) -> None:
    check_row(row)


@ranks(4, fresh=True)
def on_4(row: Row) -> None:
    leave_group()
    check_row(row)


@pytest.mark.sampled(2, long=18)
@pytest.mark.parametrize("row", sorted(ROWS, key=cost_of), ids=name_of)
def test_a_plan_with_servers_gives_the_answer_of_one_process(row: Row) -> None:
    (on_2 if row["inside"] == "nothing" else on_4)(row=row)


def test_every_pair_of_values_meets_or_is_refused() -> None:
    met = {pair for row in ROWS for pair in pairs_of(row)}
    number = sum(len(one) * len(other) for one, other in itertools.combinations(FIELDS.values(), 2))
    assert len(met) + len(NEVER) == number and len(ROWS) < math.prod(map(len, FIELDS.values())) / 20
    refused = {frozenset(pair) for pair in NEVER}
    # What has no effect where all update together.
    together = [("mode", mode) for mode in ("sync", "bounded 0")]
    without = [("compensation", 0.5), ("lr_scaling", "staleness")]
    assert refused <= {frozenset((one, other)) for one in together for other in without}
