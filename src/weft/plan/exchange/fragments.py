"""The fragments of a model that streaming replicas exchange one after the other, each at its own step.

Blocks are dealt out in turn, so that every fragment has blocks of all depths, and every stage of a pipeline has parts
of all fragments. What lies before the blocks goes to the first fragment, what lies after them to the last.

              embeddings  blocks 0  1  2  3  4  5  head        fragments = 3
    fragment           0         0  1  2  0  1  2     2
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.plan.partition.flat_buffers import ParameterSpec


def assign_fragments(parameters: Sequence[ParameterSpec], num_fragments: int) -> dict[str, int]:
    """The number of each parameter's fragment, by name; `parameters` are those of the whole model."""
    found: dict[str, int] = {}
    is_before = True
    for one in parameters:
        if one.block is None or one.is_outside_blocks:
            found[one.name] = 0 if is_before else num_fragments - 1
        else:
            is_before = False
            found[one.name] = one.block % num_fragments
    return found
