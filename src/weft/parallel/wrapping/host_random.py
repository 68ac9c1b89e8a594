"""The global random states of numpy and the standard library, from which some models draw in their passes.

torch knows nothing of them: neither a seed of torch nor a recomputed block sets them. They belong to the user, so they
are as before after every pass.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np


class HostRandom:
    """Both states, seeded together, and whether anything was drawn from them."""

    def __init__(self) -> None:
        self.is_used = False
        """True if something was drawn since a seed was set, or the context began."""
        self._begun: tuple[Any, ...] = ()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Context after which both states are what they were before."""
        before = self._begun = _states()
        try:
            yield
        finally:
            self._look()
            np.random.set_state(before[0])
            random.setstate(before[1])

    def seed(self, seed: int) -> None:
        self._look()
        np.random.seed(seed % 2**32)
        random.seed(seed)
        if not self.is_used:
            self._begun = _states()

    def _look(self) -> None:
        if not self.is_used:
            (kind, key, *place), others = _states()
            (kind_before, key_before, *place_before), others_before = self._begun
            is_same = (kind, place, others) == (kind_before, place_before, others_before)
            self.is_used = not (is_same and np.array_equal(key, key_before))


def _states() -> tuple[Any, ...]:
    return np.random.get_state(), random.getstate()
