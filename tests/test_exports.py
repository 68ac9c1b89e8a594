"""The public names: a small, pinned surface. Adding one is a decision, and is written down here."""

from __future__ import annotations

import subprocess
import sys

import pytest

import weft

PUBLIC = [
    "Cluster",
    "ModelProfile",
    "Plan",
    "Trainer",
    "WeftError",
    "batches",
    "gather_batch",
    "parallelize",
    "read_plan",
    "train",
    "verify",
    "write_plan",
]


def test_the_public_names_are_these() -> None:
    assert weft.__all__ == PUBLIC
    assert sorted(PUBLIC) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_resolves(name: str) -> None:
    value = getattr(weft, name)
    assert value.__name__ == name and value.__module__.startswith("weft.")
    assert value.__doc__, f"{name} says nothing of itself"
    assert getattr(weft, name) is value


def test_dir_lists_what_is_not_loaded_yet() -> None:
    code = "import sys, weft; print(*dir(weft)); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert set(PUBLIC) <= set(done.stdout.split())


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'weft' has no attribute 'paralelize'"):
        weft.paralelize  # noqa: B018
