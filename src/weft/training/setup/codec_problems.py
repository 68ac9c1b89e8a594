"""What makes a model unfit for a plan's codec: weights it cannot take, or nothing that it would compress or send."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import nn

from weft.plan.exchange.coded_tensor import FEW_ROWS, is_coded
from weft.plan.exchange.warm_up import SPARSE
from weft.plan.model_refusals import (
    CODEC_OF_16_BIT_WEIGHTS,
    CODEC_OF_COMPLEX_WEIGHTS,
    NOTHING_SENT,
    NOTHING_TO_COMPRESS,
)
from weft.plan.plan import Plan


def codec_problems(model: nn.Module, plan: Plan) -> Iterator[str]:
    """Every reason why the plan's codec cannot serve this model."""
    if plan.codec.name == "none":
        return
    trained = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    for name, one in trained:
        if one.is_complex():
            yield CODEC_OF_COMPLEX_WEIGHTS.message(plan, name=name)
            return
    if plan.codec.name == "half" or not trained:
        return
    half = next(((name, one) for name, one in trained if one.dtype.itemsize < 4), None)
    if half is not None and plan.data.sync in ("all-reduce", "server"):
        yield CODEC_OF_16_BIT_WEIGHTS.message(plan, name=half[0], dtype=str(half[1].dtype).removeprefix("torch."))
    coded = [(name, one) for name, one in trained if is_coded(plan.codec, one.shape)]
    if not coded:
        yield _nothing_to_compress([tuple(one.shape) for _, one in trained], plan)
        return
    name, largest = max(coded, key=lambda entry: entry[1].numel())
    share = plan.codec.density * largest.numel()
    if plan.codec.name in SPARSE and share < 0.5:
        yield NOTHING_SENT.message(plan, name=name, numel=largest.numel(), share=share, least=1 / largest.numel())


def _nothing_to_compress(shapes: list[tuple[int, ...]], plan: Plan) -> str:
    codec = plan.codec
    matrices = [shape for shape in shapes if len(shape) > 1]
    if not matrices:
        found, advice = "all of its tensors have one dim", 'set [codec] name = "none"'
    elif all(math.prod(shape) < codec.dense_below for shape in matrices):
        largest = max(math.prod(shape) for shape in matrices)
        found = f"the largest has {largest} elements, and [codec] dense_below = {codec.dense_below}"
        advice = f'set dense_below to {largest} or less, or [codec] name = "none"'
    elif codec.name == "onebit":
        found = f"none has more than {FEW_ROWS} rows, which are no more than {codec.name}'s two means per column"
        advice = 'use another codec, or [codec] name = "none"'
    else:
        rows, columns = max(((shape[0], math.prod(shape[1:])) for shape in matrices), key=math.prod)
        found = (
            f"its largest matrix is {rows} × {columns}, and factors of [codec] rank = {codec.rank} would be no smaller"
        )
        best = (rows * columns - 1) // (rows + columns)
        advice = f"set rank to {best} or less" if best else 'set [codec] name = "none"'
    return NOTHING_TO_COMPRESS.message(plan, found=found, advice=advice)
