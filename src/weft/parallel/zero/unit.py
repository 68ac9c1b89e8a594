"""A unit of ZeRO-3: parameters that are gathered and freed together, and the modules that use them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from weft.parallel.zero.flat_parameters import FlatParameters
from weft.parallel.zero.intercepted_parameter import InterceptedParameter, set_class


@dataclass(slots=True, kw_only=True, eq=False)
class Unit:
    """Parameters that are gathered and freed together."""

    modules: tuple[nn.Module, ...]
    """The modules that use them: a block, or layers outside of blocks."""
    flats: tuple[FlatParameters, ...]
    place: Literal["root", "before", "block", "after"] = "block"
    """"before" and "after": layers outside of blocks."""
    intercepting_class: type[InterceptedParameter] | None = None
    """The class of the parameters while they must not be used; None: uses are not intercepted."""

    @property
    def is_whole(self) -> bool:
        return all(flat.is_whole for flat in self.flats)

    def start_gather(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            for flat in self.flats:
                flat.start_gather()

    def wait(self) -> None:
        """Parameters can be used when this returns."""
        for flat in self.flats:
            flat.wait()
        self._set_class(nn.Parameter)

    def intercept(self) -> None:
        """Intercept uses of the parameters from now on."""
        self._set_class(self.intercepting_class)

    def free(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            for flat in self.flats:
                flat.free()
        self._set_class(self.intercepting_class)

    def _set_class(self, kind: type[nn.Parameter] | None) -> None:
        if self.intercepting_class is not None and kind is not None:
            for flat in self.flats:
                set_class(flat.parameters, kind)
