"""The memory of this process, as the system counts it."""

from __future__ import annotations

import sys

import pytest
import torch
from process_memory import PeakPss, read_pss_bytes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def test_the_peak_is_at_least_what_was_there_at_the_end() -> None:
    num_bytes = 64 << 20
    before = read_pss_bytes()
    with PeakPss(every_s=0.001) as watched:
        held = torch.ones(num_bytes, dtype=torch.uint8)
    assert int(held[-1]) == 1
    assert watched.peak_bytes >= before + 0.9 * num_bytes


def test_memory_that_was_never_written_takes_no_room() -> None:
    with PeakPss() as watched:
        held = torch.empty(1 << 30, dtype=torch.uint8)
    assert len(held) == 1 << 30
    assert watched.peak_bytes < read_pss_bytes() + (1 << 29)
