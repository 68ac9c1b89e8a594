"""Numbers as people read them, errors that carry every problem, and hints that name the nearest known word."""

from __future__ import annotations

import pickle

import pytest

from weft import errors
from weft.errors import JobError, PlanError, WeftError, nearest
from weft.units import format_bandwidth, format_bytes, format_count, format_seconds, name_ranks


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (26214400, "25.0 MiB"),
        (1 << 30, "1.0 GiB"),
        (1 << 40, "1.0 TiB"),
        (1 << 50, "1024.0 TiB"),
        (-2048, "-2.0 KiB"),
    ],
)
def test_bytes(num_bytes: float, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (2.5e-7, "0 µs"),
        (25e-6, "25 µs"),
        (0.025, "25.0 ms"),
        (1, "1.0 s"),
        (59.94, "59.9 s"),
        (75, "1 min 15 s"),
        (60, "1 min 0 s"),
        (119.6, "2 min 0 s"),
        (3600, "1 h 0 min"),
        (100 * 3600 + 120, "100 h 2 min"),
    ],
)
def test_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (7, "7"), (999, "999"), (1000, "1.0 K"), (12_600_000, "12.6 M"), (7e9, "7.0 G"), (1.5e12, "1.5 T")],
)
def test_counts(number: float, text: str) -> None:
    assert format_count(number) == text


def test_what_is_printed_is_less_than_one_of_the_next_unit() -> None:
    assert format_bytes(1023.97 * 1024) == "1.0 MiB"
    assert format_count(999_970) == "1.0 M"
    assert format_seconds(59.97) == "1 min 0 s"
    assert format_seconds(0.99999) == "1.0 s"
    assert format_seconds(0.9997e-3) == "1.0 ms"


@pytest.mark.parametrize(
    ("bytes_per_s", "text"),
    [
        (12.5e6, "100 Mbit/s"),
        (0.25e6, "2.0 Mbit/s"),
        (124.99e6, "1.0 Gbit/s"),
        (1.25e8, "1.0 Gbit/s"),
        (5e10, "400 Gbit/s"),
    ],
)
def test_bandwidths_are_in_bits(bytes_per_s: float, text: str) -> None:
    assert format_bandwidth(bytes_per_s) == text


def test_one_problem_is_a_sentence_and_several_are_a_list() -> None:
    assert str(PlanError("this is wrong")) == "this is wrong"
    assert str(PlanError(["this is wrong", "and that"])) == "- this is wrong\n- and that"
    assert PlanError("one").problems == ("one",)
    assert PlanError(["one", "two"]).problems == ("one", "two")


def test_errors_survive_a_pipe() -> None:
    for error in (JobError("one"), PlanError(["one", "two"])):
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error) and again.problems == error.problems and str(again) == str(error)


def test_the_hierarchy_is_the_one_drawn() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, WeftError)]
    assert errors.__doc__ is not None
    for kind in kinds:
        assert kind.__name__ in errors.__doc__
        assert kind in (WeftError, errors.DamagedCheckpointError) or kind.__bases__ == (WeftError,)
        assert kind.__doc__


def test_nearest() -> None:
    assert nearest("piepline", ["data", "pipeline", "tensor"]) == 'did you mean "pipeline"?'
    assert nearest("xyz", ["data", "pipeline"]) == "known: data, pipeline"
    assert nearest("", ["data"]) == "known: data"
    assert nearest("data", {"data": 1}) == 'did you mean "data"?'


def test_many_ranks_are_named_as_ranges() -> None:
    assert [name_ranks(ranks) for ranks in ((3,), (0, 1), (9, 0, 1, 2, 5))] == [
        "rank 3",
        "ranks 0, 1",
        "ranks 0 to 2, 5, 9",
    ]
