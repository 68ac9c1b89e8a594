"""Runs a module whose code passes global sizes to functions where its tensors are shards.

    q = self.query(x).view(B, T, self.num_heads, self.head_dim)

On a rank with 3 of 12 heads the view needs 3. While the module runs, functions that take sizes are intercepted, and
sizes that count sharded units are reduced. Which ones is plain data from discovery (`discovery/`): the calls of a
forward pass, in order. A pass that makes other calls than the traced one is refused. Sub-modules are left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from weft.errors import ModelError
from weft.parallel.wrapping.wrap import add_hook
from weft.plan.partition.tensor import SIZED, Resized, Size

Forward = Callable[..., Any]


class LocalSizes:
    """Replaces a module's forward. Not a closure, so that a copy of the model runs the copy's modules."""

    def __init__(self, module: nn.Module, resized: Resized, length: Callable[[int], int]) -> None:
        """`length`: this rank's number of units, given the number of all."""
        self.inner: Forward = module.forward
        self.resized = resized
        self.length = length
        for part in module.modules():
            if part is not module and _pause not in part._forward_pre_hooks.values():
                add_hook(part, "forward_pre", _pause, by="tensor", why="keeps the parent's sizes from its code")
                add_hook(part, "forward", _resume, by="tensor", why="goes back to the parent's sizes")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        mode = _SizeMode(self.resized, self.length)
        with mode:
            result = self.inner(*args, **kwargs)
        mode.finish()
        return result


def _pause(*_: Any) -> None:
    """Hook before a sub-module, whose calls are not its parent's."""
    _add_depth(1)


def _resume(*_: Any) -> None:
    _add_depth(-1)


def _add_depth(change: int) -> None:
    for mode in _get_current_function_mode_stack():
        if isinstance(mode, _SizeMode):
            mode.depth += change


class _SizeMode(TorchFunctionMode):
    """Reduces sizes among the arguments of one forward pass's calls."""

    def __init__(self, resized: Resized, length: Callable[[int], int]) -> None:
        super().__init__()
        self.resized = resized
        self.length = length
        self.number = 0
        """Calls with sizes so far."""
        self.depth = 0
        """Nesting depth of the sub-modules that are running."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if self.depth or name not in SIZED:
            return func(*args, **(kwargs or {}))
        calls = self.resized.calls
        if self.number == len(calls) or calls[self.number].function != name:
            expected = calls[self.number].function if self.number < len(calls) else "nothing more"
            raise self._refusal(f"calls {name} as call {self.number + 1} with sizes, where {expected} was expected")
        sizes = calls[self.number].sizes
        self.number += 1
        named = dict(kwargs or {})
        positional = list(args)
        for size in sizes:
            first, *rest = size.place
            if isinstance(first, int):
                positional[first] = self._replace(positional[first], rest, size)
            else:
                named[first] = self._replace(named[first], rest, size)
        return func(*positional, **named)

    def finish(self) -> None:
        if self.number < len(self.resized.calls):
            raise self._refusal(f"makes {self.number} calls with sizes, where {len(self.resized.calls)} were expected")

    def _refusal(self, what: str) -> ModelError:
        return ModelError(
            f'"{self.resized.module}" {what}: it does something else than in the pass that was traced to find out '
            "how it splits over the tensor axis; declare regions in weft_blueprint() that leave it whole"
        )

    def _replace(self, value: Any, place: list[int | str], size: Size) -> Any:
        """An argument with the size at a place in it reduced."""
        if not place:
            return self._local(value, size)
        step, *rest = place
        if isinstance(step, str):
            bounds = {name: getattr(value, name) for name in ("start", "stop", "step")}
            bounds[step] = self._local(bounds[step], size)
            return slice(*bounds.values())
        items = list(value)
        items[step] = self._replace(items[step], rest, size)
        return items if isinstance(value, list) else tuple(items)

    def _local(self, value: int, size: Size) -> int:
        units, per = size.num_units, size.per_units
        return value * self.length(units) * per // (units * self.length(per))
