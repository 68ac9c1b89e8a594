"""Checks of the numbers and flags that describe a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def size_problems(record: Any, minimum_of: Mapping[str, int]) -> list[str]:
    """A sentence for each named field of the record that is not a whole number of at least its minimum."""
    return [
        f"{name} is {value!r}; it must be a whole number, {minimum} or more"
        for name, minimum in minimum_of.items()
        if isinstance(value := getattr(record, name), bool) or not isinstance(value, int) or value < minimum
    ]


def flag_problems(record: Any, names: Iterable[str]) -> list[str]:
    """A sentence for each named field of the record that is not true or false; "no" would count as true."""
    return [
        f"{name} is {value!r}; it must be true or false"
        for name in names
        if not isinstance(value := getattr(record, name), bool)
    ]


def divisors(number: int) -> str:
    """12 -> '1, 2, 3, 4, 6, 12'."""
    return ", ".join(str(divisor) for divisor in range(1, number + 1) if number % divisor == 0)
