"""What `benchmarks/scaling.py` makes of its measurements: speed-ups over one process, verdicts, and a picture."""

from __future__ import annotations

from typing import Any

import plots
import pytest
import scaling

SPEEDS = {scaling.NOTHING: 1.0, "all-reduce": 0.95, "ZeRO-3": 0.6}
"""Share of the ideal speed-up at 8 ranks."""


def measured(num_ranks: int, factor: int) -> dict[str, Any]:
    """Three rounds of seconds per step, in which a process alone takes one, and the machine is slower in the second."""

    def side(share: float) -> dict[str, Any]:
        share = share if num_ranks == 8 else 1.0
        return {"s": factor / (num_ranks * share), "waits": [0.1 * (rank + 1) for rank in range(num_ranks)]}

    def slower(one: dict[str, Any], times: float) -> dict[str, Any]:
        return {**one, "s": times * one["s"]}

    once = {scaling.ALONE: {"s": 1.0, "waits": [0.0] * num_ranks}, **{name: side(one) for name, one in SPEEDS.items()}}
    rounds = [{name: slower(one, times) for name, one in once.items()} for times in (1.0, 3.0, 1.0)]
    return {name: scaling.summary(rounds, name, factor) for name in SPEEDS}


@pytest.fixture
def results() -> dict[str, dict[int, dict[str, Any]]]:
    return {"weak": {ranks: measured(ranks, ranks) for ranks in (1, 8)}, "strong": {8: measured(8, 1)}}


def test_a_speed_up_is_a_ratio_inside_one_round(results: Any) -> None:
    for found in (results["weak"][8], results["strong"][8]):
        assert found["all-reduce"]["lowest"] == pytest.approx(found["all-reduce"]["highest"])
        assert found["all-reduce"]["speed_up"] == pytest.approx(8 * 0.95)
    assert results["weak"][1]["ZeRO-3"]["speed_up"] == pytest.approx(1.0)


def test_the_claim_is_confirmed_or_corrected_by_the_numbers(results: Any) -> None:
    said = scaling.verdicts(results)
    assert (
        'weak, all-reduce: near-linear up to 8; at 8 ranks 95.0% of ideal and 95.0% of no exchange: "near-' in said[1]
    )
    assert said[1].endswith("confirmed") and said[2].endswith("corrected") and "up to 1;" in said[2]
    assert "strong, ZeRO-3: never near-linear; at 8 ranks 60.0%" in said[-1]


def test_tables_and_picture_have_every_method(results: Any) -> None:
    table = "\n".join(scaling.tables(results))
    assert "| all-reduce | 1.00 (1.00 to 1.00) | 7.60 (7.60 to 7.60) |" in table
    assert "| ZeRO-3 | 10.0%, 10.0% | 45.0%, 80.0% |" in table
    picture = scaling.picture(results, "Scaling")
    assert plots.problems_of(picture) == [] and [len(panel["series"]) for panel in picture["panels"]] == [4, 6, 4, 6]
    assert "ideal" in plots.draw(picture)
