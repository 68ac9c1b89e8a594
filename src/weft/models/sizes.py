"""Checks of the numbers and flags that describe a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def size_problems(record: Any, minimum_of: Mapping[str, int]) -> list[str]:
    """A sentence for each named field of the record that is not a whole number of at least its minimum."""
    values = {name: getattr(record, name) for name in minimum_of}
    return [
        f"{name} is {value!r}; it must be a whole number, {minimum_of[name]} or more"
        for name, value in values.items()
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum_of[name]
    ]


def flag_problems(record: Any, names: Iterable[str]) -> list[str]:
    """A sentence for each named field of the record that is not true or false; "no" would count as true."""
    values = {name: getattr(record, name) for name in names}
    return [
        f"{name} is {value!r}; it must be true or false"
        for name, value in values.items()
        if not isinstance(value, bool)
    ]


def divisors(number: int) -> str:
    """12 -> '1, 2, 3, 4, 6, 12'."""
    return ", ".join(str(divisor) for divisor in range(1, number + 1) if number % divisor == 0)
