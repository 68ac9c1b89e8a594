"""Laws of the data stream: the plan does not change it, and a resumed run goes on to the sample."""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from weft.errors import DataError
from weft.training.data.batches import Batches, batches, permutation, prefetch
from weft.training.data.datasets import TensorSamples
from weft.training.data.trees import num_samples, split_microbatches, split_tree, stack_samples, tensors_of


@dataclass
class Rank:
    data_rank: int = 0
    data_size: int = 1
    data_position: int = 0


class Numbers:
    """A plain map dataset: sample i is ((i, -i), {"square": i²}), with an optional sample that fails."""

    def __init__(self, total: int, failing: int = -1) -> None:
        self.total, self.failing = total, failing

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, index: int) -> Any:
        if index == self.failing:
            raise OSError(f"sample {index} is lost")
        return (torch.tensor([index]), float(-index)), {"square": index**2}


def numbers(total: int) -> TensorSamples:
    return TensorSamples(torch.arange(total), -torch.arange(total))


def inputs_of(stream: Batches) -> list[list[int]]:
    return [inputs.tolist() for inputs, _ in stream]


ORDERS = pytest.mark.parametrize("shuffle_seed", [None, 7], ids=["in-order", "shuffled"])


@ORDERS
@pytest.mark.parametrize("drop_last", [False, True])
def test_the_ranks_parts_joined_are_the_global_batches(shuffle_seed: int | None, drop_last: bool) -> None:
    def parts(rank: int, size: int) -> list[list[int]]:
        reader = Rank(rank, size)
        return inputs_of(
            batches(numbers(23), reader, global_batch=5, shuffle_seed=shuffle_seed, epochs=3, drop_last=drop_last)
        )

    alone = parts(0, 1)
    assert [len(batch) for batch in alone] == ([5, 5, 5, 5] if drop_last else [5, 5, 5, 5, 3]) * 3
    for size in (2, 3, 4):
        by_rank = [parts(rank, size) for rank in range(size)]
        assert [sum(step, []) for step in zip(*by_rank, strict=True)] == alone
        for step in zip(*by_rank, strict=True):
            assert max(map(len, step)) - min(map(len, step)) <= 1


def test_without_a_seed_step_k_covers_samples_kb_to_the_next() -> None:
    assert inputs_of(batches(numbers(6), Rank(), global_batch=2)) == [[0, 1], [2, 3], [4, 5]]


def test_each_epoch_is_a_permutation_of_its_own() -> None:
    epochs = inputs_of(batches(numbers(50), Rank(), global_batch=50, shuffle_seed=3, epochs=3))
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs} | {tuple(range(50))}) == 4
    assert inputs_of(batches(numbers(50), Rank(), global_batch=50, shuffle_seed=4)) != epochs[:1]


def test_the_permutation_never_changes() -> None:
    """Pinned: another order would make every saved position of a shuffled run mean something else."""
    assert permutation(10, 0, 0).tolist() == [0, 8, 9, 3, 7, 5, 1, 2, 6, 4]
    assert permutation(10, 2**40, 3).tolist() == [1, 4, 0, 9, 2, 5, 8, 7, 6, 3]


@ORDERS
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_run_resumed_anywhere_goes_on_to_the_sample(shuffle_seed: int | None, drop_last: bool) -> None:
    def stream(reader: Rank) -> Batches:
        return batches(numbers(11), reader, global_batch=4, shuffle_seed=shuffle_seed, epochs=3, drop_last=drop_last)

    unbroken = inputs_of(stream(Rank(1, 2)))
    for stopped_after in range(1, len(unbroken)):
        first = Rank(1, 2)
        seen = [inputs.tolist() for inputs, _ in itertools.islice(stream(first), stopped_after)]
        second = Rank(1, 2, data_position=first.data_position)
        assert len(stream(second)) == len(unbroken) - stopped_after
        assert seen + inputs_of(stream(second)) == unbroken


def test_a_run_resumed_with_another_batch_and_more_ranks_misses_no_sample() -> None:
    reader = Rank()
    seen = [inputs.tolist() for inputs, _ in itertools.islice(batches(numbers(10), reader, global_batch=4), 1)]
    resumed = [Rank(rank, 2, reader.data_position) for rank in range(2)]
    parts = [inputs_of(batches(numbers(10), rank, global_batch=3)) for rank in resumed]
    assert sum(seen, []) + sum((a + b for a, b in zip(*parts, strict=True)), []) == list(range(10))


def test_the_position_is_what_was_handed_out_and_not_what_was_prefetched() -> None:
    reader = Rank(0, 2)
    stream = batches(numbers(10), reader, global_batch=4, epochs=2)
    assert len(stream) == 6 and stream.steps_per_epoch == 3
    positions = []
    for _ in stream:
        time.sleep(0.002)  # long enough for the next batch to be there
        positions.append((reader.data_position, len(stream)))
    assert positions == [(4, 5), (8, 4), (10, 3), (14, 2), (18, 1), (20, 0)]


def test_epochs_none_goes_on_for_ever() -> None:
    stream = batches(numbers(4), Rank(), global_batch=4, epochs=None)
    assert [inputs.tolist() for inputs, _ in itertools.islice(stream, 50)] == [[0, 1, 2, 3]] * 50
    with pytest.raises(TypeError, match="for ever"):
        len(stream)


@pytest.mark.parametrize("dataset", [Numbers(5), TensorSamples(torch.zeros(5, 2, 3), torch.ones(5))])
def test_an_empty_part_has_the_shapes_and_dtypes_of_a_full_one(dataset: Any) -> None:
    full, empty = list(batches(dataset, Rank(2, 3), global_batch=3))
    assert (num_samples(full), num_samples(empty)) == (1, 0)
    kinds = [[(leaf.shape[1:], leaf.dtype) for leaf in tensors_of(each)] for each in (full, empty)]
    assert kinds[0] == kinds[1] and kinds[0]


def test_a_plain_dataset_keeps_its_containers() -> None:
    (inputs, targets), _ = batches(Numbers(4), Rank(), global_batch=2)
    assert isinstance(inputs, tuple)
    assert inputs[0].tolist() == [[0], [1]] and inputs[1].tolist() == [0.0, -1.0]
    assert targets["square"].tolist() == [0, 1]


def test_evaluation_leaves_the_position_alone() -> None:
    reader = Rank(data_position=4)
    stream = batches(numbers(6), reader, global_batch=2)
    assert [inputs.tolist() for inputs, _ in stream.from_start()] == [[0, 1], [2, 3], [4, 5]]
    assert reader.data_position == 4


def test_a_loop_around_a_finished_stream_is_not_silent() -> None:
    reader = Rank()
    stream = batches(numbers(5), reader, global_batch=2, drop_last=True)
    assert inputs_of(stream) == [[0, 1], [2, 3]]
    with pytest.warns(UserWarning, match="no batch is left: the run is at sample 4 of the 5 in epochs=1"):
        assert inputs_of(stream) == []


def test_an_error_is_raised_where_its_batch_would_have_been() -> None:
    before, reader = threading.enumerate(), Rank()
    seen = []
    with pytest.raises(OSError, match="sample 5 is lost") as caught:
        for _, targets in batches(Numbers(8, failing=5), reader, global_batch=2):
            seen.append(targets["square"].tolist())
    assert seen == [[0, 1], [4, 9]] and reader.data_position == 4
    assert caught.value.__notes__ == ["while sample 5 of the Numbers was read"]
    assert threading.enumerate() == before


def test_the_thread_ends_however_the_loop_does() -> None:
    before = threading.enumerate()
    for _ in batches(numbers(10), Rank(), global_batch=2):
        assert len(threading.enumerate()) == len(before) + 1
        break
    assert threading.enumerate() == before
    with pytest.raises(ZeroDivisionError):
        for inputs, _ in batches(numbers(10), Rank(), global_batch=2):
            inputs.tolist()[0] // 0
    assert threading.enumerate() == before
    stream = iter(batches(numbers(10), Rank(), global_batch=2))
    next(stream)
    stream.close()
    assert threading.enumerate() == before
    list(batches(numbers(10), Rank(), global_batch=2))
    assert threading.enumerate() == before


def test_one_batch_and_no_more_is_fetched_while_the_current_is_used() -> None:
    done = []
    results = prefetch(lambda item: done.append(item) or item, range(1, 9))  # type: ignore[func-returns-value]
    for item in itertools.islice(results, 4):
        deadline = time.monotonic() + 2
        while len(done) < item + 1 and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.002)  # time enough to run too far
        assert done == list(range(1, item + 2))
    results.close()


def test_all_problems_at_once() -> None:
    with pytest.raises(DataError) as caught:
        batches(numbers(3), Rank(), global_batch=4, epochs=0, shuffle_seed=-1)
    assert caught.value.problems == (
        "the dataset has 3 samples, one global batch needs 4; give more data or a global_batch of at most 3",
        "epochs is 0; give at least 1, or None to go on for ever",
        "shuffle_seed is -1; give 0 or more, or None for dataset order",
    )
    with pytest.raises(DataError) as caught:
        batches(iter([1]), Rank(), global_batch=0)  # type: ignore[arg-type]
    assert "has no len()" in caught.value.problems[0] and "global_batch is 0" in caught.value.problems[1]


def test_a_position_beyond_the_data() -> None:
    stream = batches(numbers(10), Rank(data_position=25), global_batch=2, epochs=2)
    for use in (len, iter):
        with pytest.raises(DataError, match="at sample 25, 2 epochs of 10 samples end at 20"):
            use(stream)


def test_samples_that_do_not_fit_together() -> None:
    with pytest.raises(DataError, match="sample 0 is a Tensor; give a pair"):
        next(iter(batches(torch.zeros(4, 2), Rank(), global_batch=2)))
    with pytest.raises(DataError, match=r"shapes \(2,\) and \(3,\); pad or crop"):
        stack_samples([torch.zeros(2), torch.zeros(3)])
    with pytest.raises(DataError, match="hold 1 to 2 things"):
        stack_samples([(1,), (1, 2)])


class Pair(NamedTuple):
    left: torch.Tensor
    right: list[Any]


def test_microbatches_are_views_that_join_to_the_batch() -> None:
    x, y = torch.arange(14.0).view(7, 2), torch.arange(7)
    tree = {"pair": Pair(x, [y, None]), "scale": torch.tensor(2.0), "name": "n"}
    parts = split_microbatches(tree, 3)
    assert [num_samples(part) for part in parts] == [3, 2, 2]
    assert torch.equal(torch.cat([part["pair"].left for part in parts]), x)
    assert torch.equal(torch.cat([part["pair"].right[0] for part in parts]), y)
    for part in parts:
        assert isinstance(part["pair"], Pair) and part["pair"].right[1] is None
        assert part["pair"].left.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        assert part["scale"] is tree["scale"] and part["name"] == "n"
    assert split_tree((x, [y]), 2, 4)[1][0].tolist() == [2, 3]
    assert [num_samples(part) for part in split_microbatches(y[:1], 2)] == [1, 0]


def test_leaves_must_agree_on_the_samples() -> None:
    with pytest.raises(DataError, match=r"batch\[1\]\['mask'\] has 3 samples along dim 0 and batch\[0\] has 4"):
        num_samples((torch.zeros(4), {"mask": torch.zeros(3)}))
    with pytest.raises(DataError, match="no tensor with a dim of samples"):
        num_samples((torch.tensor(1.0), "text"))
