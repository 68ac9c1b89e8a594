"""All ranks are given the same dataset, of which `batches` cuts each rank's part: this compares what they have.

Ranks that make data of their own (`torch.randn` without a seed, a shuffled list of files, another host's copy) would
train on samples that no single process ever sees together, without an error. About 1 MB of samples are compared by
checksum. They are read from the same random states on every rank: samples that are flipped at random would otherwise
be alike on one rank by chance. Then the states are what they were, so that nothing that is drawn later depends on it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from weft.comm.failures.activity import collective_call
from weft.comm.objects import gather_values
from weft.errors import DataError
from weft.mesh import Mesh
from weft.training.data.datasets import Dataset, fingerprint
from weft.units import name_ranks


@collective_call("weft.batches")
def require_same_data(
    mesh: Mesh, dataset: Dataset, problems: Sequence[str], settings: dict[str, int | bool | None]
) -> None:
    """Raise on every rank if any rank has a problem, or another dataset or other settings than rank 0; collective."""
    mine, found = None, list(problems)
    if not found:
        try:
            with _random_states_kept():
                mine = [len(dataset), fingerprint(dataset, before=_seed_alike)]
        except Exception as error:  # whatever it is: the other ranks wait for this one's answer
            where = f"rank {mesh.world.rank} cannot read a sample of its {type(dataset).__name__}"
            found = (
                list(error.problems) if isinstance(error, DataError) else [f"{where}: {type(error).__name__}: {error}"]
            )
    everyones = gather_values([mine, settings, found], mesh.everyone("control"))
    told = list(dict.fromkeys(problem for _, _, problems in everyones for problem in problems))
    if not told:
        told = _differences([data for data, _, _ in everyones], [given for _, given, _ in everyones])
    if told:
        raise DataError(told)


def _differences(data: list[list[int]], settings: list[dict[str, int | bool | None]]) -> list[str]:
    problems = []
    odd = [rank for rank, found in enumerate(data) if found != data[0]]
    if odd:
        sizes = "" if data[odd[0]][0] == data[0][0] else f" ({data[odd[0]][0]} samples there, {data[0][0]} on rank 0)"
        problems.append(
            f"{name_ranks(odd)} {'has' if len(odd) == 1 else 'have'} other data than rank 0{sizes}, and "
            "weft.batches gives each rank its part of one dataset that all ranks have; read the same files in the same "
            "order on every host, and seed random data before drawing it (torch.manual_seed(0)). Ranks with data of "
            "their own need no weft.batches: give their batches to trainer.step"
        )
    for name, value in settings[0].items():
        others = {rank: given[name] for rank, given in enumerate(settings) if given[name] != value}
        problems += [
            f"{name} is {other} on rank {rank}, {value} on rank 0; give all ranks the same"
            for rank, other in others.items()
        ]
    return problems


def _seed_alike() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.default_generator.manual_seed(0)


@contextmanager
def _random_states_kept() -> Iterator[None]:
    plain, arrays = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(plain)
        np.random.set_state(arrays)
