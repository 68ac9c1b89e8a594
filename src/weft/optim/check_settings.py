"""Settings of LARS and LAMB that are refused, all at once."""

from __future__ import annotations

from typing import Any

from weft.errors import JobError


def require_settings(optimizer: str, **settings: Any) -> None:
    """Raise a JobError that names every setting without a meaning."""
    problems = []
    for name, value in settings.items():
        if name in ("betas", "clamp"):
            is_pair = isinstance(value, tuple | list) and len(value) == 2 and all(map(_is_number, value))
            if name == "betas" and not (is_pair and all(0 <= one < 1 for one in value)):
                problems.append(f"betas is {value!r}; give two numbers from 0 to below 1")
            if name == "clamp" and value is not None and not (is_pair and 0 <= value[0] <= value[1]):
                problems.append(f"clamp is {value!r}; give the least and the largest norm, such as [0.0, 10.0]")
        elif not _is_number(value) or value < 0:
            problems.append(f"{name} is {value!r}; give a number that is not negative")
        elif name == "momentum" and value >= 1:
            problems.append(f"momentum is {value!r}; give a number from 0 to below 1")
    if problems:
        raise JobError([f"{optimizer}: {problem}" for problem in problems])


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value
