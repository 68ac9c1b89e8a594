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


@pytest.hookimpl(tryfirst=True)  # before pytest drops what `-m` does not ask for
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test that is `sampled(n, long=m)`, n cases spread over all of them stay as they are, m of the others become
    long and what is left `full`; of cases that are long already, m stay so."""
    cases: dict[object, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled") is not None:
            cases.setdefault(getattr(item, "obj", item), []).append(item)
    for found in cases.values():
        mark = found[0].get_closest_marker("sampled")
        assert mark is not None
        often = [item for item in found if item.get_closest_marker("long") is None]
        for item in others_than(often, mark.args[0] if mark.args else len(often)):
            item.add_marker(pytest.mark.long)
        seldom = [item for item in found if item.get_closest_marker("long") is not None]
        for item in others_than(seldom, mark.kwargs.get("long", len(seldom))):
            item.add_marker(pytest.mark.full)


def others_than(items: list[pytest.Item], num_kept: int) -> list[pytest.Item]:
    """All but `num_kept` that are spread over them."""
    kept = {number * len(items) // num_kept for number in range(num_kept)}
    return [item for number, item in enumerate(items) if number not in kept]


@pytest.fixture(autouse=True)
def seed() -> None:
    seed_everything()


def pytest_sessionfinish() -> None:
    close_pools()
