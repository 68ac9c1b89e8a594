"""Context in which a model draws no random numbers, whoever asks for them: for comparisons only.

Two processes that split a batch differently draw different masks, so there is nothing to compare while numbers are
drawn. Dropout is often a function and not a module, and blocks are left out, or inputs masked, by a number from torch,
numpy or the standard library. So the functions themselves are replaced: dropout returns its input, and what draws
numbers returns a constant that leaves out no block and masks nothing. A generator of one's own is not touched.
"""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.parallel.wrapping.replacements import WHOLE_ATTENTION, Replacements, functions, tensor_method

_DRAWN = 1 - 2**-8
"""In the place of every drawn number: nearly 1, since a block is left out where less than a probability is drawn.
Exact in 16 bits."""

Function = Callable[..., Any]


class Silence:
    """Replacements under which a model draws nothing, and the names of the functions that would have."""

    def __init__(self, model: nn.Module) -> None:
        self.names: set[str] = set()
        self.replacements = Replacements(
            *functions(
                model,
                [
                    *((F, name, self._identity(getattr(F, name))) for name in _DROPOUTS),
                    *((torch, name, self._identity(getattr(torch, name))) for name in (*_DROPOUTS[:2], "dropout_")),
                    (F, WHOLE_ATTENTION.__name__, self._attention()),
                    (torch, "rand", self._constant(torch.rand, torch.empty)),
                    (torch, "randn", self._constant(torch.randn, torch.empty)),
                    (torch, "rand_like", self._constant(torch.rand_like, torch.empty_like)),
                    (torch, "randn_like", self._constant(torch.randn_like, torch.empty_like)),
                    (torch, "bernoulli", self._bernoulli(torch.bernoulli)),
                    *((np.random, name, self._noted(getattr(np.random, name), one)) for name, one in _NUMPY.items()),
                    (random, "random", self._noted(random.random, lambda: _DRAWN)),
                    (random, "uniform", self._noted(random.uniform, _uniform)),
                ],
                why=_WHY,
            ),
            tensor_method("bernoulli", self._bernoulli(torch.Tensor.bernoulli), why=_WHY),
            tensor_method("bernoulli_", self._bernoulli_in_place(torch.Tensor.bernoulli_), why=_WHY),
            on_leave=_forget_compiler_tables,
        )

    def notes(self) -> list[str]:
        """A sentence on what was silenced, if anything was."""
        if not self.names:
            return []
        return [f"what the model draws itself was left out, or a constant ({', '.join(sorted(self.names))})"]

    def _noted(self, original: Function, silent: Function) -> Function:
        name = getattr(original, "__name__", "")

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("generator") is not None:
                return original(*args, **kwargs)
            self.names.add(name)
            return silent(*args, **kwargs)

        return call

    def _identity(self, original: Function) -> Function:
        @functools.wraps(original)
        def call(input: Tensor, p: float = 0.5, training: bool = True, *args: Any, **kwargs: Any) -> Tensor:
            del args
            if p > 0 and kwargs.get("train", training):
                self.names.add(original.__name__)
            return input

        return call

    def _attention(self) -> Function:
        @functools.wraps(WHOLE_ATTENTION)
        def call(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attn_mask: Tensor | None = None,
            dropout_p: float = 0.0,
            *args: Any,
            **kwargs: Any,
        ) -> Tensor:
            if dropout_p > 0:
                self.names.add("dropout")
            return WHOLE_ATTENTION(query, key, value, attn_mask, 0.0, *args, **kwargs)

        return call

    def _constant(self, original: Function, empty: Function) -> Function:
        def fill(*args: Any, **kwargs: Any) -> Tensor:
            kwargs.pop("generator", None)
            with torch.no_grad():
                made: Tensor = empty(*args, **kwargs).fill_(_DRAWN)
            return made

        return self._noted(original, fill)

    def _bernoulli(self, original: Function) -> Function:
        return self._noted(original, lambda input, *_, **__: torch.ones_like(input))

    def _bernoulli_in_place(self, original: Function) -> Function:
        return self._noted(original, lambda input, *_, **__: input.fill_(1))


def _forget_compiler_tables() -> None:
    """Dynamo lists torch's functions at its first use: if that was while they were replaced, it knows none of these."""
    rules = sys.modules.get("torch._dynamo.trace_rules")
    if rules is not None:
        rules.clear_lru_cache()


_WHY = "draws nothing, so that plans can be compared"
_DROPOUTS = ("dropout", "alpha_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d")


def _shaped(size: Any) -> Any:
    return _DRAWN if size is None or size == () else np.full(size, _DRAWN)


def _uniform(low: float = 0.0, high: float = 1.0, size: Any = None) -> Any:
    return low + (high - low) * _shaped(size)


def _choice(options: Any, size: Any = None, *_: Any, **__: Any) -> Any:
    listed = np.arange(options) if np.ndim(options) == 0 else np.asarray(options)
    return listed[0] if size is None else np.resize(listed, size)


_NUMPY: dict[str, Function] = {
    "random": lambda size=None: _shaped(size),
    "random_sample": lambda size=None: _shaped(size),
    "rand": lambda *size: _shaped(size),
    "randn": lambda *size: _shaped(size),
    "uniform": _uniform,
    "normal": lambda loc=0.0, scale=1.0, size=None: loc + scale * _shaped(size),
    "choice": _choice,
}
"""Functions of numpy's global random state."""
