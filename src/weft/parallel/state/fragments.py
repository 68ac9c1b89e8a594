"""The fragment that every parameter of a model travels in, where replicas exchange it in fragments."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from weft.blueprint import find_blueprint, find_tied
from weft.parallel.zero.grouping import describe_parameters
from weft.plan.exchange.fragments import assign_fragments
from weft.plan.model_refusals import MORE_FRAGMENTS_THAN_BLOCKS
from weft.plan.plan import Plan


def find_fragments(whole: nn.Module, plan: Plan) -> dict[str, int]:
    """By the names that ranks may know a parameter by; `whole` is the whole model, with or without memory."""
    if plan.data.fragments == 1:
        return {}
    found = assign_fragments(describe_parameters(whole, find_blueprint(whole).blocks), plan.data.fragments)
    for names in find_tied(whole):
        found |= dict.fromkeys(names, next(found[name] for name in names if name in found))
    return found


def fragment_problems(model: nn.Module, plan: Plan) -> Iterator[str]:
    """Why this model cannot be exchanged in the plan's fragments."""
    if plan.data.fragments == 1:
        return
    num_blocks = len(find_blueprint(model).blocks)
    if plan.data.fragments > num_blocks:
        yield MORE_FRAGMENTS_THAN_BLOCKS.message(plan, num_blocks=num_blocks, most=max(num_blocks, 1))
