"""Codecs timed: a line that fits what it was made from, and one exchange of every codec."""

from __future__ import annotations

import pytest
import torch

from weft.measure.codecs import MEASURED, TimedExchange, fit_codec
from weft.plan.plan import CODECS, Codec
from weft.profiles.cluster import Compression

FEW, MANY = 1 << 20, 1 << 22


def test_a_line_gives_back_the_times_it_was_made_from() -> None:
    made = Compression(name="sign", alpha_s=2e-3, element_ns=1.5, replica_element_ns=0.25)
    times = [made.time_s(numel, num_replicas=number) for numel, number in ((FEW, 2), (MANY, 2), (MANY, 6))]
    found = Compression(name="sign", **fit_codec(FEW, MANY, times, adds_up=False))
    for numel, number in ((FEW, 2), (MANY, 6), (3 * MANY, 8)):
        expected = made.time_s(numel, num_replicas=number)
        assert found.time_s(numel, num_replicas=number) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("times", [[1.0, 0.5, 0.2], [1.0, 2.0, 9.0], [1.0, 1.0, 1.0]])
def test_noise_makes_no_negative_time(times: list[float]) -> None:
    for adds_up in (False, True):
        found = fit_codec(FEW, MANY, times, adds_up=adds_up)
        assert min(found.values()) >= 0
        assert found["replica_element_ns"] == 0 or not adds_up


@pytest.mark.parametrize("section", MEASURED, ids=lambda section: f"{section.name}-{section.bits}-{section.levels}")
def test_one_exchange_of_every_codec_is_timed(section: Codec) -> None:
    exchange = TimedExchange(section, [(64, 64), (32, 64)], torch.device("cpu"), num_replicas=3)
    assert exchange.seconds() > 0 and exchange.seconds() > 0
    assert exchange.adds_up == (section.name in ("half", "powersgd"))


def test_every_codec_is_measured() -> None:
    assert {section.name for section in MEASURED} == set(CODECS)
