"""The global batches of a run, and each rank's part of them.

The order of the data does not depend on the plan, so that plans can be compared. The stream is defined without ranks:
the epochs one after another, each in dataset order or in a permutation of its own, cut into global batches.

    epoch     0                     1
    sample    0 1 2 3 4 5 6 7 8 9   0 1 2 3 4 5 6 7 8 9    10 samples, global batch 4
    batch     0 0 0 0 1 1 1 1 2 2   3 3 3 3 4 4 4 4 5 5    the last of an epoch is short
    rank      0 0 1 1 0 0 1 1 0 1   0 0 1 1 0 0 1 1 0 1    2 ranks: contiguous parts, as even as can be
    position  0       4       8     10      14      18

With `[data] balance` parts follow the speed of the ranks (`balance.py`). A position in this stream is all that a resume
needs. An epoch is always as wide as the dataset, even when `drop_last` leaves its end out, so a position means the same
under any global batch.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future
from contextlib import closing
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache, partial
from queue import SimpleQueue
from typing import Protocol, TypeVar

import numpy as np
from torch.utils.data import DataLoader

from weft.errors import DataError
from weft.layout import part_of
from weft.mesh import Mesh
from weft.plan.partition.one_worker import is_served
from weft.plan.plan import Plan
from weft.training.data.balance import Balance
from weft.training.data.datasets import Batch, Dataset, Indices, fetch
from weft.training.data.same_data import require_same_data
from weft.training.data.to_device import pin

Item = TypeVar("Item")
Result = TypeVar("Result")

CLOSE_TIMEOUT_S = 5.0


class Reader(Protocol):
    """A rank's place along the data axes and its position in the stream; a Trainer is one."""

    data_position: int

    @property
    def data_rank(self) -> int: ...

    @property
    def data_size(self) -> int: ...


Slice = tuple[int, int, int]
"""A global batch: epoch, start, stop. It holds samples `start` to `stop - 1` of the epoch's order."""

Part = tuple[Slice, int, int]
"""A global batch, and this rank's samples of it: `start` and `stop` in the epoch's order."""


@dataclass(frozen=True, slots=True, eq=False)
class batches:
    """This rank's (inputs, targets) of each global batch, step by step, from `trainer.data_position` on.

    All ranks make it, with the same dataset: they compare what they were given, and refuse different data.
    Step k covers samples kB to (k+1)B-1 of the order, whatever the plan. The last batch of an epoch may be short, and
    a rank's part of it empty (0 samples, right shapes and dtypes), since that rank must still join the exchange.
    To go over the data several times give `epochs`; do not loop around `batches`, which goes on where the trainer is.
    The next batch is fetched in a background thread: a dataset that draws random numbers should seed them by the index,
    or its draws mix with the model's. With a GPU it lies in pinned memory, which the GPU reads later: do not write into
    a batch that was given to `step`.
    """

    dataset: Dataset
    trainer: Reader
    _: KW_ONLY
    global_batch: int
    """Samples per step, over all ranks."""
    shuffle_seed: int | None = None
    """Seed of each epoch's permutation; None for dataset order."""
    epochs: int | None = 1
    """Number of epochs; None for ever."""
    drop_last: bool = False
    """Leave out the short batch at the end of an epoch."""

    def __post_init__(self) -> None:
        problems = []
        total = len(self.dataset) if hasattr(self.dataset, "__len__") else None
        if isinstance(self.dataset, DataLoader):
            raise DataError(
                "a DataLoader makes batches itself, the same ones on every rank; give its dataset, of which weft makes "
                f"each rank's batches: weft.batches(loader.dataset, trainer, global_batch={self.global_batch})"
            )
        if total is None:
            problems.append(
                f"a {type(self.dataset).__name__} has no len(); give a dataset with len(dataset) and dataset[index], "
                "or iterate over your own batches without weft.batches, already split by rank"
            )
        if self.global_batch < 1:
            problems.append(f"global_batch is {self.global_batch}; give at least 1 sample")
        elif total is not None and total < self.global_batch:
            problems.append(
                f"the dataset has {total} samples, one global batch needs {self.global_batch}; "
                f"give more data or a global_batch of at most {total}"
            )
        if self.epochs is not None and self.epochs < 1:
            problems.append(f"epochs is {self.epochs}; give at least 1, or None to go on for ever")
        if self.shuffle_seed is not None and self.shuffle_seed < 0:
            problems.append(f"shuffle_seed is {self.shuffle_seed}; give 0 or more, or None for dataset order")
        mesh = getattr(self.trainer, "mesh", None)
        if isinstance(mesh, Mesh) and mesh.world.size > 1 and not mesh.world.is_fake:
            names = ("global_batch", "shuffle_seed", "epochs", "drop_last")
            settings = {name: getattr(self, name) for name in names}
            plain = {
                name: value if value is None or value is True or value is False else int(value)
                for name, value in settings.items()
            }
            require_same_data(mesh, self.dataset, problems, plain)
        elif problems:
            raise DataError(problems)

    @property
    def steps_per_epoch(self) -> int:
        return self._num_batches(len(self.dataset))

    def __len__(self) -> int:
        """Batches left, from the trainer's position on."""
        if self.epochs is None:
            raise TypeError("batches with epochs=None go on for ever and have no length")
        epoch, start = divmod(self._checked_position(), len(self.dataset))
        if epoch == self.epochs:
            return 0
        return self._num_batches(len(self.dataset) - start) + (self.epochs - epoch - 1) * self.steps_per_epoch

    def __iter__(self) -> Generator[Batch, None, None]:
        _ = self.trainer.data_rank  # by which a worker of servers joins its run, which may be further
        position = self._checked_position()
        if self.epochs is not None and not len(self):
            # A finished run that is resumed, or a loop around `batches`, would otherwise train on nothing unnoticed.
            warnings.warn(
                f"no batch is left: the run is at sample {position} of the {self.epochs * len(self.dataset)} in "
                f"epochs={self.epochs}; to go over the data again give batches() more epochs",
                stacklevel=2,
            )
        return self._hand_out(position)

    def from_start(self) -> Generator[Batch, None, None]:
        """All batches, without using or moving the trainer's position: for evaluation during a run."""
        # A worker of servers that evaluates does so without the others.
        place = (0, 1) if self._is_served else None
        with closing(self._fetched(0, balanced=False, place=place)) as fetched:
            for _, batch in fetched:
                yield batch

    def _hand_out(self, position: int) -> Generator[Batch, None, None]:
        while True:
            with closing(self._fetched(position)) as fetched:
                for (epoch, _, stop), batch in fetched:
                    # Before the yield, so that a save in the loop's body records this batch as used.
                    position = self.trainer.data_position = epoch * len(self.dataset) + stop
                    yield batch
                    if self._is_served and self.trainer.data_position != position:
                        break  # updates were made without this worker, which goes on where the others are
                else:
                    return
            position = self._checked_position()

    @property
    def _is_served(self) -> bool:
        plan: Plan | None = getattr(self.trainer, "plan", None)  # any reader will do for batches alone
        return plan is not None and is_served(plan)

    def _fetched(
        self, position: int, *, balanced: bool = True, place: tuple[int, int] | None = None
    ) -> Generator[tuple[Slice, Batch], None, None]:
        """`place`: number and count of the parts of batches, where these are not the trainer's."""
        total, seed = len(self.dataset), self.shuffle_seed
        order = None if seed is None else lru_cache(maxsize=1)(partial(permutation, total, seed))

        def fetch_part(part: Part) -> tuple[Part, Batch]:
            (epoch, _, _), start, stop = part
            indices = np.arange(start, stop, dtype=np.int64) if order is None else order(epoch)[start:stop]
            return part, pin(fetch(self.dataset, indices))

        balance = self._balance() if balanced else None
        with closing(prefetch(fetch_part, self._parts(position, balance, place))) as prefetched:
            for part, batch in prefetched:
                now = part if balance is not None else self._even_part(part[0], place)
                # Workers of servers may have come or gone since it was fetched.
                yield part[0], batch if part == now else fetch_part(now)[1]

    def _balance(self) -> Balance | None:
        found: Balance | None = getattr(self.trainer, "balance", None)  # any reader will do for batches alone
        return found if found is not None and found.is_on else None

    def _even_part(self, piece: Slice, place: tuple[int, int] | None) -> Part:
        _, first, end = piece
        number, count = place or (self.trainer.data_rank, self.trainer.data_size)
        start, stop = part_of(end - first, number, count)
        return piece, first + start, first + stop

    def _parts(self, position: int, balance: Balance | None, place: tuple[int, int] | None) -> Iterator[Part]:
        """This rank's part of every batch. All but the first are asked for one step early, when the batch before is
        handed out: shares are known by then."""
        for number, (epoch, first, end) in enumerate(self._slices(position)):
            if balance is None:
                yield self._even_part((epoch, first, end), place)
                continue
            start, stop = balance.range(end - first, ahead=min(number, 1))
            yield (epoch, first, end), first + start, first + stop

    def _slices(self, position: int) -> Iterator[Slice]:
        total = len(self.dataset)
        epoch, start = divmod(position, total)
        while self.epochs is None or epoch < self.epochs:
            for _ in range(self._num_batches(total - start)):
                stop = min(start + self.global_batch, total)
                yield epoch, start, stop
                start = stop
            epoch, start = epoch + 1, 0

    def _num_batches(self, num_samples: int) -> int:
        whole, rest = divmod(num_samples, self.global_batch)
        return whole + (rest > 0 and not self.drop_last)

    def _checked_position(self) -> int:
        position, total = self.trainer.data_position, len(self.dataset)
        if self.epochs is not None and position > self.epochs * total:
            raise DataError(
                f"the run is at sample {position}, {self.epochs} epochs of {total} samples end at "
                f"{self.epochs * total}; give more epochs, or the dataset the run was started with"
            )
        return position


Batches = batches
"""The same class, for annotations and isinstance; users call it like a function."""


def permutation(total: int, seed: int, epoch: int) -> Indices:
    """The order of one epoch, a function of (seed, epoch) alone.

    It sorts raw Philox output, which numpy promises never to change, unlike `Generator.permutation`: a resumed run must
    find the same order after an upgrade.
    """
    keys = np.random.Philox(np.random.SeedSequence([seed, epoch])).random_raw(total)
    return np.argsort(keys, kind="stable").astype(np.int64, copy=False)


def prefetch(function: Callable[[Item], Result], items: Iterable[Item]) -> Generator[Result, None, None]:
    """`map(function, items)`, with the next result computed in a background thread while the last is in use.

    An error is raised where its result would have been yielded. The thread ends with the iterator.
    """
    requests: SimpleQueue[Item | None] = SimpleQueue()
    results: SimpleQueue[Future[Result]] = SimpleQueue()

    def work() -> None:
        while (item := requests.get()) is not None:
            outcome: Future[Result] = Future()
            try:
                outcome.set_result(function(item))
            except BaseException as error:
                outcome.set_exception(error)
            results.put(outcome)

    thread = threading.Thread(target=work, name="weft-prefetch", daemon=True)
    thread.start()
    try:
        remaining = iter(items)
        item = next(remaining, None)
        requests.put(item)
        while item is not None:
            result = results.get().result()
            item = next(remaining, None)
            requests.put(item)
            yield result
    finally:
        requests.put(None)
        # Neither the daemon thread of an ending interpreter nor a fetch that hangs may block the exit.
        if not sys.is_finalizing():
            thread.join(CLOSE_TIMEOUT_S)
