"""Ranks that were given different data are refused when `weft.batches` is made, all of them with the same words."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from oracle import MLP, data_plan, make_trainer, pipeline_plan, small_gpt, token_batch
from ranks import gathered, ranks
from torch.utils.data import TensorDataset

from weft.errors import DataError
from weft.training.data.batches import batches
from weft.training.data.datasets import TensorSamples
from weft.training.trainer import Trainer


def refusal(dataset: Any, trainer: Trainer, **settings: Any) -> str | None:
    try:
        batches(dataset, trainer, **{"global_batch": 4, **settings})
    except DataError as error:
        return str(error)
    return None


def drawn(seed: int, num_samples: int = 16) -> TensorDataset:
    torch.manual_seed(seed)
    return TensorDataset(torch.randn(num_samples, 4), torch.randn(num_samples, 3))


class Unreadable(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        raise OSError(f"sample {index} is lost")


class Augmented(TensorDataset):
    """Adds noise of torch's, numpy's and Python's: what is drawn differs at every reading."""

    def __getitem__(self, index: int) -> Any:
        inputs, targets = super().__getitem__(index)
        return inputs + torch.randn(4) + np.random.rand() + random.random(), targets


@ranks(2)
def test_what_ranks_were_given_is_compared() -> None:
    trainer = make_trainer(MLP(), data_plan(2))
    rank = trainer.mesh.world.rank
    assert refusal(drawn(0), trainer) is None
    told = [
        refusal(drawn(rank), trainer),
        refusal(drawn(0, 16 + rank), trainer),
        refusal(drawn(0), trainer, shuffle_seed=rank),
        refusal(drawn(0, 16 - 13 * rank), trainer),  # rank 1's is shorter than a batch
        refusal((Unreadable if rank else TensorDataset)(*drawn(0).tensors), trainer),
    ]
    assert len(set(gathered(tuple(told)))) == 1
    assert "rank 1 has other data than rank 0, and weft.batches" in str(told[0]) and "manual_seed" in str(told[0])
    assert "(17 samples there, 16 on rank 0)" in str(told[1])
    assert told[2] == "shuffle_seed is 1 on rank 1, 0 on rank 0; give all ranks the same"
    assert "the dataset has 3 samples, one global batch needs 4" in str(told[3])
    assert "rank 1 cannot read a sample of its Unreadable: OSError: sample 0 is lost" in str(told[4])


@ranks(2)
def test_ranks_of_a_pipeline_are_compared_too() -> None:
    trainer = make_trainer(small_gpt(), pipeline_plan(2), example=token_batch(2)[0])
    torch.manual_seed(trainer.mesh.world.rank)
    told = refusal(TensorSamples(torch.randint(9, (8, 4)), torch.randint(9, (8, 4))), trainer)
    assert "rank 1 has other data" in str(told)


class Flipped(TensorDataset):
    """Flips half of its samples, as images are: two readings are often alike by chance."""

    def __getitem__(self, index: int) -> Any:
        inputs, targets = super().__getitem__(index)
        return inputs.flip(0) if random.random() < 0.5 else inputs, targets


@ranks(2)
def test_flipped_samples_are_the_same_data() -> None:
    trainer = make_trainer(MLP(), data_plan(2))
    torch.manual_seed(0)
    few_and_large = Flipped(torch.randn(4, 2**18), torch.zeros(4))
    for seed in range(4):
        random.seed(2 * seed + trainer.mesh.world.rank)
        assert refusal(few_and_large, trainer, global_batch=np.int64(2)) is None
    others = Flipped(torch.randn(4, 2**18) + trainer.mesh.world.rank, torch.zeros(4))
    assert "rank 1 has other data" in str(refusal(others, trainer)), "also if it is augmented"


@ranks(2)
def test_reading_leaves_random_states_alone() -> None:
    trainer = make_trainer(MLP(), data_plan(2))
    dataset = Augmented(*drawn(0).tensors)
    before = (torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate())
    assert refusal(dataset, trainer) is None
    after = (torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate())
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]


def test_one_rank_reads_nothing() -> None:
    batches(Unreadable(*drawn(0).tensors), make_trainer(MLP(), data_plan(1)), global_batch=4)


@pytest.mark.parametrize("problem", ["global_batch", "epochs"])
def test_one_rank_still_refuses_its_own(problem: str) -> None:
    with pytest.raises(DataError, match=f"{problem} is 0"):
        batches(drawn(0), make_trainer(MLP(), data_plan(1)), **{"global_batch": 4, problem: 0})
