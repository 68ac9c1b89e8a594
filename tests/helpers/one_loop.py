"""One network thread for all gloo groups of a rank, because a pool of ranks keeps groups for the whole test run.

Each group would have its own thread, which wakes a hundred times per second, whether anything is exchanged or not:
with some hundred groups kept on every rank, tests took four minutes longer. The order of exchanges does not change.
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
    """Share one network thread from now on, in this process."""
    distributed_c10d.ProcessGroupGloo = OneLoop
