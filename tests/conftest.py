"""Common start of every test: seed 0 and one thread. The helpers are on the path by pyproject.toml.

Warnings are errors by pyproject.toml, in the parent and in the ranks.
"""

from __future__ import annotations

import os

import pytest
import torch

# Some virtual machines advertise AMX and refuse it: one bfloat16 product would then end the run (illegal instruction).
# oneDNN reads this at its first product, here and in every rank.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

from rank_process import seed_everything
from ranks import close_pools
from transport import VARIABLE, apply_transport


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--transport", choices=("auto", "c10d", "shared"), help="how ranks exchange unless a plan says it")


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)
    chosen = config.getoption("--transport")
    if chosen is not None:
        os.environ[VARIABLE] = str(chosen)
    apply_transport()


@pytest.fixture(autouse=True)
def seed() -> None:
    seed_everything()


def pytest_sessionfinish() -> None:
    close_pools()
