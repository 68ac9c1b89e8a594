"""A unit of ZeRO-3: parameters that are gathered and freed together, and the modules that use them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from weft.parallel.zero.flat_parameters import FlatParameters
from weft.parallel.zero.watched import Watched, set_class


@dataclass(slots=True, kw_only=True, eq=False)
class Unit:
    """Parameters that are gathered and freed together."""

    modules: tuple[nn.Module, ...]
    """The modules that use them: a block, or layers outside of blocks."""
    flats: tuple[FlatParameters, ...]
    place: Literal["root", "before", "block", "after"] = "block"
    """"before" and "after": layers outside of blocks."""
    watched: type[Watched] | None = None
    """The class of the parameters when neither their own layers nor anything else may use them."""

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

    def watch(self) -> None:
        """From now on a use of the parameters is noticed."""
        self._set_class(self.watched)

    def free(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            for flat in self.flats:
                flat.free()
        self._set_class(self.watched)

    def _set_class(self, kind: type[nn.Parameter] | None) -> None:
        if self.watched is not None and kind is not None:
            for flat in self.flats:
                set_class(flat.parameters, kind)
