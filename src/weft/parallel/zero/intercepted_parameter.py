"""A parameter of which every use, by any code, first calls a function.

Modules that use parameters can be hooked, but other code reads parameters too: a product with the embedding's weight
for tied logits, an average of weights between two steps. While a parameter's class is an `InterceptedParameter`, torch
itself intercepts: functions and methods that take tensors look for `__torch_function__` in the classes of arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

_TENSOR: Any = torch.Tensor
_NOT_INTERCEPTED = frozenset(
    [
        *(
            getattr(_TENSOR, name).__get__
            for name in ("dtype", "device", "layout", "is_cuda", "is_leaf", "requires_grad", "grad")
        ),
        _TENSOR.is_floating_point,
        _TENSOR.register_hook,
    ]
)
"""Functions that need neither the values nor the shape."""
_SET_GRAD: Any = _TENSOR.grad.__set__


class InterceptedParameter(nn.Parameter):
    """A parameter that must not be used as it is."""

    on_use: ClassVar[Callable[[], bool]]
    """Called before a use. True: the parameter may be used, and is an ordinary one again."""

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        del cls
        kinds = [kind for kind in types if issubclass(kind, InterceptedParameter)]
        is_harmless = function in _NOT_INTERCEPTED or (function == _SET_GRAD and args[1] is None)  # others have a shape
        if not is_harmless and all([kind.on_use() for kind in kinds]):
            return function(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """An ordinary parameter; torch's own method would make one of this class."""
        type(self).on_use()
        with torch._C.DisableTorchFunctionSubclass():
            made = nn.Parameter(self.data.clone(memory_format=torch.preserve_format), self.requires_grad)
        return memo.setdefault(id(self), made)


def intercepting_class(on_use: Callable[[], bool]) -> type[InterceptedParameter]:
    """A class of parameters whose uses call `on_use` first."""
    return type(InterceptedParameter.__name__, (InterceptedParameter,), {"on_use": staticmethod(on_use)})


def set_class(parameters: Iterable[nn.Parameter], kind: type[nn.Parameter]) -> None:
    """Make parameters intercepted, or ordinary ones."""
    for parameter in parameters:
        parameter.__class__ = kind
