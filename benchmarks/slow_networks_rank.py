"""One rank of the lab phases of `slow_networks.py`, which starts it: it times methods, or trains with one.

    weft lab ... -- python slow_networks_rank.py '{"kind": "time", "names": [...], ...}'

Ranks of a lab are on one machine, and meet in shared memory: nothing that only measures crosses the emulated network.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import logging
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from slow_networks_loss import write
from slow_networks_methods import ALONE, METHODS, Method, Size, make_batches, make_trainer

from weft.errors import WeftError
from weft.lab.counters import read_counters
from weft.sync.local import LocalSync
from weft.world import join_world, leave_world

POLL_S = 0.0005
WARM_UP_STEPS, MOST_WARM_UP_STEPS = 3, 12
TABLE_ROWS = 4
"""Of shared memory, in each a number per rank."""


class Meeting:
    """Ranks wait for each other, and see how far the others are, in a file in memory."""

    def __init__(self, path: str, rank: int, size: int) -> None:
        self.rank, self._count = rank, 0
        self._arrived, self.progress, self._values, shared = np.memmap(path, np.int64, "r+", shape=(TABLE_ROWS, size))
        self._shared = shared[:1]

    def wait(self) -> None:
        self._count += 1
        self._arrived[self.rank] = self._count
        while self._arrived.min() < self._count:
            time.sleep(POLL_S)

    def largest(self, value: int) -> int:
        """Of what the ranks give."""
        self._values[self.rank] = value
        self.wait()
        found = int(self._values.max())
        self.wait()  # until all have read it
        return found

    @property
    def last_step(self) -> int:
        """The number of the last step that is timed, which the first rank decides."""
        return int(self._shared[0])

    def begin(self, last_step: int) -> None:
        """Ranks begin steps together."""
        self.end_after(last_step)
        self.progress[self.rank] = 0
        self.wait()

    def end_after(self, step: int) -> None:
        if self.rank == 0:
            self._shared[0] = step


def num_warm_up(method: Method) -> int:
    """Steps until as much is under way as there will be, and the first exchange of a period is over, within limits."""
    period = method.every if method.every > 1 else 0
    return min(WARM_UP_STEPS + max(period, method.delay), MOST_WARM_UP_STEPS)


def whole_periods(steps: int, period: int) -> int:
    return math.ceil(steps / period) * period


def sent_bytes() -> int:
    """Bytes that all hosts have sent so far."""
    return sum(pair.bytes for pair in read_counters().values())


def run_steps(take_step: Callable[[], Any], most: int, period: int, seconds: float, meeting: Meeting) -> list[float]:
    """Take up to `most` steps, in whole periods of which none begins after `seconds`; returns the time of each.

    Ranks are steps apart, as far as the method lets them be, and end after the same one.
    """
    times_s: list[float] = []
    started = time.perf_counter()
    while True:
        meeting.progress[meeting.rank] = len(times_s) + 1  # before it looks: the first rank ends nothing that has begun
        if len(times_s) + 1 > meeting.last_step:
            return times_s
        began = time.perf_counter()
        take_step()
        times_s.append(time.perf_counter() - began)
        if meeting.last_step == most and time.perf_counter() - started > seconds:
            meeting.end_after(min(whole_periods(int(meeting.progress.max()) + 1, period), most))


def time_method(method: Method, size: Size, given: dict[str, Any], meeting: Meeting) -> dict[str, Any]:
    """Seconds and bytes per step; raises a WeftError on all ranks if the plan is refused."""
    batch = make_batch(size, meeting.rank)
    trainer = make_trainer(method, size, 0, "cpu")
    for _ in range(num_warm_up(method)):
        trainer.step(*batch)
    most = whole_periods(given["timed_steps"], method.every)
    meeting.begin(most)
    sent, started_ns = sent_bytes(), time.perf_counter_ns()
    times_s = run_steps(lambda: trainer.step(*batch), most, method.every, given["seconds"], meeting)
    ended_ns = meeting.largest(time.perf_counter_ns())
    sent = sent_bytes() - sent
    finish(trainer, method)
    meeting.wait()
    return {
        "step_s": (ended_ns - started_ns) / 1e9 / len(times_s),
        "steps": len(times_s),
        "warm_up_steps": num_warm_up(method),
        "median_step_s": statistics.median(times_s),
        "slowest_step_s": max(times_s),
        "bytes_per_step_per_host": sent / len(times_s) / size.num_replicas,
        "drain_s": time.perf_counter() - ended_ns / 1e9,
        "at": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def make_batch(size: Size, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (size.windows, size.context + 1)
    tokens = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(rank))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def finish(trainer: Any, method: Method) -> None:
    """Let what is under way arrive, and give everything back, without a last average."""
    trainer.flush()
    if method.is_torch:
        trainer.close()
        return
    if isinstance(trainer.sync, LocalSync):
        trainer.sync.drain()
    trainer.mesh.close()


def time_all(given: dict[str, Any], size: Size, meeting: Meeting) -> None:
    """Time methods one after the other; the first rank writes the file after each."""
    path = Path(given["file"])
    content = json.loads(path.read_text())
    for name in ("alone", *given["names"], "alone"):
        if meeting.largest(time.time() > given["deadline"]):
            break
        faulthandler.dump_traceback_later(given["limit_s"], exit=True)
        try:
            content["under_way"] = name
            if meeting.rank == 0:
                write(path, content)
            found = time_method(ALONE if name == "alone" else METHODS[name], size, given, meeting)
        except WeftError as error:
            content["failed"][name] = str(error)
        else:
            content["alone"].append(found) if name == "alone" else content["methods"].update({name: found})
            if meeting.rank == 0:
                sent_mb = found["bytes_per_step_per_host"] / 1e6
                print(f"  {name:22s} {1e3 * found['step_s']:9.1f} ms/step  {sent_mb:8.2f} MB", flush=True)
        faulthandler.cancel_dump_traceback_later()
        content["under_way"] = None
        if meeting.rank == 0:
            write(path, content)
        gc.collect()
        meeting.wait()


def train(given: dict[str, Any], size: Size, meeting: Meeting) -> None:
    """Train without a pause, keeping the weights now and then; their losses are found afterwards.

    An evaluation in between would wait, and let exchanges arrive that the steps have not hidden.
    """
    method, path = METHODS[given["names"][0]], Path(given["file"])
    trainer = make_trainer(method, size, 0, "cpu")
    batches, _ = make_batches(size, trainer, 0)
    kept = Path(given["weights"])
    meeting.begin(given["steps"])
    started_ns = time.perf_counter_ns()

    def take_step() -> None:
        trainer.step(*next(batches))
        if trainer.steps_done % size.evaluate_every == 0:
            spent_s = (time.perf_counter_ns() - started_ns) / 1e9
            model = trainer.model.module if method.is_torch else trainer.named_model
            torch.save((spent_s, model.state_dict()), kept / f"{trainer.steps_done}-{meeting.rank}.pt")

    seconds_left = given["deadline"] - time.time()
    run_steps(take_step, given["steps"], size.evaluate_every, seconds_left, meeting)
    batches.close()
    num_kept = trainer.steps_done // size.evaluate_every
    finish(trainer, method)
    meeting.wait()
    for number in range(meeting.rank, num_kept, size.num_replicas):
        steps = (number + 1) * size.evaluate_every
        found = steps, *time_and_loss([kept / f"{steps}-{rank}.pt" for rank in range(size.num_replicas)], size)
        write(kept / f"{steps}.json", found)
    meeting.wait()
    if meeting.rank == 0:
        curve = [json.loads((kept / f"{(one + 1) * size.evaluate_every}.json").read_text()) for one in range(num_kept)]
        content = {"name": given["names"][0], "condition": given["condition"], "loss": given["loss"]}
        names = ("curve_steps", "curve_s", "curve_loss")
        write(path, {**content, **dict(zip(names, zip(*curve, strict=True), strict=True))})


def time_and_loss(paths: list[Path], size: Size) -> tuple[float, float]:
    """When the slowest replica had these weights, and the held-out loss of their mean."""
    times_s, weights = zip(*(torch.load(path) for path in paths), strict=True)
    alone = make_trainer(ALONE, size, 0, "cpu")
    alone.model.load_state_dict({name: sum(one[name] for one in weights) / len(weights) for name in weights[0]})
    return max(times_s), alone.evaluate(make_batches(size, alone, 0)[1])


def main() -> None:
    given = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    logging.getLogger("weft").setLevel(logging.ERROR)
    size = Size(**given["size"])
    world = join_world("cpu")
    meeting = Meeting(given["table"], world.rank, world.size)
    (time_all if given["kind"] == "time" else train)(given, size, meeting)
    meeting.wait()
    leave_world()


if __name__ == "__main__":
    main()
