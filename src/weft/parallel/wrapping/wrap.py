"""The only functions that change what a user's module does: they wrap its forward, or add a hook, with who and why.

Each change is recorded on the module itself, so that a copy of the model carries its own record and nothing has to be
kept beside the model. `trainer.describe()` prints the records.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

Undo = Callable[[], None]
When = Literal["forward_pre", "forward", "state_dict_pre"]

_RECORD = "_weft_changes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change that weft made to a module."""

    kind: str
    """The part of the module that differs: "forward", "class", or one of torch's hooks."""
    by: str
    """The axis or feature of the plan that made the change."""
    why: str
    """The effect of the change, as a verb phrase."""


def wrap_forward(module: nn.Module, forward: Callable[..., Any], *, by: str, why: str) -> Undo:
    """Replace the forward of a module by one that wraps it; the last wrapper is the outermost.

    A wrapper that holds the module must be an object with attributes, not a closure: then a copy of the model runs the
    copy's modules.
    """
    before = vars(module).get("forward")
    module.forward = forward
    forget = record_change(module, Change(kind="forward", by=by, why=why))

    def undo() -> None:
        if before is None:
            del module.forward
        else:
            module.forward = before
        forget()

    return undo


def add_hook(module: nn.Module, when: When, hook: Callable[..., Any], *, by: str, why: str, **options: bool) -> Undo:
    """Register a hook on a module; `options` are those of torch's method of registration."""
    handle = getattr(module, f"register_{when}_hook")(hook, **options)
    forget = record_change(module, Change(kind=f"{when} hook", by=by, why=why))

    def undo() -> None:
        handle.remove()
        forget()

    return undo


def record_change(module: nn.Module, change: Change) -> Undo:
    """Record a change that is made in another way than by wrapping the forward or adding a hook."""
    record: list[Change] = vars(module).setdefault(_RECORD, [])
    record.append(change)
    return lambda: record.remove(change)


def changes_of(module: nn.Module) -> tuple[Change, ...]:
    """The changes of a module in the order in which they were made."""
    return tuple(vars(module).get(_RECORD, ()))
