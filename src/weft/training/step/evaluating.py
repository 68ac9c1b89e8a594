"""Evaluation: the mode of the model, and batches of which ranks may have different numbers.

Afterwards each module has the mode it had: `model.train()` would also change modules that the user set to evaluation,
such as a frozen BatchNorm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from weft.comm.collectives import all_reduce
from weft.errors import DataError
from weft.mesh import Mesh
from weft.sync.base import Sync
from weft.training.data.trees import num_samples


@contextmanager
def evaluating(model: nn.Module, sync: Sync | None = None) -> Iterator[None]:
    """Context with the model in evaluation mode, without gradients; `sync`: the average of replicas that differ."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with nullcontext() if sync is None else sync.consensus(), torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def together(
    batches: Iterable[tuple[Any, Any]], take_sizes: Callable[[int], Sequence[int]], skip: Callable[[], None]
) -> Iterator[tuple[Any, Any]]:
    """This rank's batches, where passes or losses exchange: once it has no more, it skips until no rank has any.

    `take_sizes`: given this rank's number of samples, returns those of every data rank, collectively; `skip`: takes
    part in what the others exchange for one batch.
    """
    own = iter(batches)
    while True:
        batch = next(own, None)
        if not any(take_sizes(0 if batch is None else num_samples(batch[0]))):
            return
        if batch is None:
            skip()
        else:
            yield batch


def mean_of_all(totals: torch.Tensor, mesh: Mesh) -> float:
    """The mean over all ranks of this rank's sum of losses and number of targets, on the host; collective."""
    # In a pipeline only the last stage has outputs; along other axes data ranks have the same ones.
    all_reduce(totals, mesh.batch_group("control"))
    all_reduce(totals, mesh.between_replicas("control"))
    all_reduce(totals, mesh.group("pipeline", "control"))
    if float(totals[1]) == 0:
        raise DataError("nothing to evaluate: the batches hold no targets; give at least one sample")
    return float(totals[0] / totals[1])
