"""Delayed averaging on handwritten digits: accuracy with and without the correction, against synchronous training.

    python benchmarks/delayed.py [--seeds 6] [--jobs N] [--json delayed.json]      # 10 minutes on two cores
    python benchmarks/delayed.py --tiny                                            # to try the script

The network, data, batches and rates of `compression.py`, on 4 replicas in one process, which equal 4 real ranks; runs
of a seed are compared in pairs. "With the correction" is `[data] sync = "delayed"`: every replica makes its own update
at once and puts the mean in its place `delay` steps later. "Without it" replicas wait with the update itself: each step
applies the mean of what replicas computed `delay` steps ago, and nothing of the steps since.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import math
import os
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

import torch
from compression import GLOBAL_BATCH, MOMENTUM, NUM_WORKERS, RATE, STEPS, STUDENT_T, DigitsNet

import weft
from weft.optim.schedule import warmup_cosine
from weft.plan.plan import Axes, Data, Plan
from weft.sync import late_merge
from weft.sync.late_merge_in_process import SendingInProcess
from weft.training.data.datasets import digits

DELAYS = (5, 10, 20)
RUNS = ["synchronous", *(f"{kind} {delay}" for delay in DELAYS for kind in ("corrected", "late"))]


class WithoutOwn(SendingInProcess):
    """A side that takes the replica's own change back until the mean of all arrives."""

    @torch.no_grad()
    def fill(self, number: int) -> torch.Tensor:
        anchor = self._sync._anchors[number].clone()  # filling moves it to the weights
        change = super().fill(number)
        bucket = self._sync._buckets[number]
        bucket.write_from(self._sync._anchors[number].copy_(anchor))
        self._sent.own[number].zero_()
        self._sync.inner.publish()
        return change


def train(name: str, seed: int, steps: int) -> float:
    """The accuracy in % after a run; in a process of its own."""
    torch.set_num_threads(1)
    logging.getLogger("weft").setLevel(logging.ERROR)
    kind, _, delay = name.partition(" ")
    plan = Plan()
    if delay:
        plan = Plan(axes=Axes(data=NUM_WORKERS), data=Data(sync="delayed", delay=int(delay)))
    if kind == "late":
        late_merge.SendingInProcess = WithoutOwn  # type: ignore[misc]
    training, held_out = digits()
    torch.manual_seed(seed)
    trainer = weft.parallelize(
        DigitsNet(),
        plan,
        loss="cross-entropy",
        optimizer=functools.partial(torch.optim.SGD, lr=RATE, momentum=MOMENTUM),
        schedule=warmup_cosine(steps // 20, steps, 0.0),
        device="cpu",
        skip_at_most=None,
        replicas_in_process=plan.axes.num_ranks > 1,
    )
    batches = weft.batches(training, trainer, global_batch=GLOBAL_BATCH, shuffle_seed=seed, epochs=None, drop_last=True)
    for inputs, targets in islice(batches, steps):
        trainer.step(inputs, targets)
    trainer.flush()
    inputs, targets = next(iter(weft.batches(held_out, trainer, global_batch=len(held_out)).from_start()))
    trainer.close()  # the model is the mean of all replicas from now on
    with torch.no_grad():
        output = trainer.model.eval()(inputs)
    return 100 * float((output.argmax(1) == targets).double().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=6, help="pairs (6)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of a run ({STEPS})")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs beside each other (one per core)")
    parser.add_argument("--json", type=Path, default=Path("delayed.json"), help="results (delayed.json)")
    parser.add_argument("--tiny", action="store_true", help="few steps and two seeds")
    args = parser.parse_args()
    if args.tiny:
        args.seeds, args.steps = 2, 40
    started, found = time.perf_counter(), dict[str, list[float]]()
    print("| run | accuracy, % | over synchronous, points |\n|---|---|---|")
    # A process per run: the variant without the correction changes a class.
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        pending = {name: [pool.submit(train, name, seed, args.steps) for seed in range(args.seeds)] for name in RUNS}
        for name, futures in pending.items():
            found[name] = [future.result() for future in futures]
            over = [one - other for one, other in zip(found[name], found["synchronous"], strict=True)]
            width = STUDENT_T.get(len(over), 1.96) * statistics.stdev(over) / math.sqrt(len(over))
            mean, difference = statistics.fmean(found[name]), statistics.fmean(over)
            print(f"| {name} | {mean:.2f} | {difference:+.2f} ± {width:.2f} |", flush=True)
            args.json.write_text(json.dumps({"steps": args.steps, "accuracies": found}, indent=1))
    print(f"\n{os.cpu_count()} cores, torch {torch.__version__}, {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
