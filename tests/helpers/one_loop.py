"""All gloo groups of a rank share one network thread, because a pool of ranks keeps groups for the whole test run.

Each group would bring a thread of its own that wakes a hundred times a second, whether anything is exchanged or not:
with some hundred groups kept on every rank, tests took four minutes longer. Who waits for whom is not changed by it.
"""

from __future__ import annotations

import functools
from datetime import timedelta

from torch.distributed import ProcessGroupGloo, distributed_c10d


@functools.cache
def device() -> ProcessGroupGloo.Device:
    return ProcessGroupGloo.create_default_device()


class OneLoop(ProcessGroupGloo):
    def __init__(self, store: object, rank: int, size: int, timeout: timedelta) -> None:
        options = ProcessGroupGloo._Options()
        options._devices, options._timeout = [device()], timeout
        super().__init__(store, rank, size, options)


def share_loop() -> None:
    """From now on, in this process."""
    distributed_c10d.ProcessGroupGloo = OneLoop
