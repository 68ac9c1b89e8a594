"""Numbers by which custom operators know Python objects.

torch.library passes operators tensors and plain values only, and compiled graphs contain those values. So an operator
that communicates has to find its process group in a table of the process; this is the only one. Its references are
weak: an object lives as long as its owner, such as the mesh or the parallel model, keeps it.
"""

from __future__ import annotations

import itertools
from typing import Any
from weakref import WeakValueDictionary

_objects: WeakValueDictionary[int, Any] = WeakValueDictionary()
_handles = itertools.count()


def handle_of(thing: object) -> int:
    """The handle of an object, always the same for the same object."""
    known = next((handle for handle, known in _objects.items() if known is thing), None)
    if known is None:
        known = next(_handles)
        _objects[known] = thing
    return known


def object_of(handle: int) -> Any:
    return _objects[handle]
