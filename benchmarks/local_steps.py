"""Local steps: what every = 1, 2, 4 ... 64 costs in held-out loss and saves in time and bytes, on real data.

    python benchmarks/local_steps.py [--every 1 2 4 8 16 32 64] [--seeds 3] [--jobs N] [--json FILE]
    python benchmarks/local_steps.py --loopback              # without the emulated network, which needs root
    python benchmarks/local_steps.py --tiny                  # a minute on two cores, to try the script

Two tasks on 4 replicas: a convnet with BatchNorm on handwritten digits (SGD with momentum; needs scikit-learn), and a
GPT on the bytes of Python's standard library (AdamW). "Synchronous" is all-reduce at every step on the same batches.

Quality is measured by replicas in one process, which equal real ranks: held-out loss of the average at the end, mean
and standard deviation over seeds (weights, order of the data), and the spread of the replicas before an exchange: the
distance of a replica from the average, relative to the average's norm. Runs are processes of one thread beside each
other, one per core on a CPU and a few on a GPU.

Time and bytes are measured by 4 real ranks of one thread, on 4 emulated hosts (docs/lab.md) or on one: all settings
take turns in one run, in blocks as long as the longest interval between exchanges; the median block of the slowest rank
counts. Bytes are those that rank 0 handed over, per step.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import weft
from weft.models.convnet import ConvNet, ConvNetConfig
from weft.models.gpt import GPT, GPTConfig
from weft.optim.schedule import warmup_cosine
from weft.plan.plan import Axes, Comm, Data, Plan
from weft.training.data.datasets import BatchDataset, TokenWindows, digits, split_held_out, standard_library_text
from weft.units import format_bytes
from weft.world import join_world, leave_world

NUM_REPLICAS = 4
SYNCHRONOUS = 0
"""Stands for all-reduce where an interval between exchanges is expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A model, its data and its optimizer."""

    make_model: Callable[[], nn.Module]
    make_data: Callable[[], tuple[BatchDataset, BatchDataset]]
    optimizer: Callable[..., torch.optim.Optimizer]
    global_batch: int
    steps: int
    evaluate_batches: int


def small_gpt() -> nn.Module:
    return GPT(GPTConfig(context=64, num_layers=3, hidden=96, heads=4))


def small_convnet() -> nn.Module:
    return ConvNet(ConvNetConfig(width=16, num_blocks=2))


def library_windows() -> tuple[BatchDataset, BatchDataset]:
    training, held_out = split_held_out(standard_library_text(), 0.05, 64)
    return TokenWindows(training, 64), TokenWindows(held_out, 64)


TASKS = {
    "digits": Task(
        make_model=small_convnet,
        make_data=digits,
        optimizer=functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        global_batch=64,
        steps=256,
        evaluate_batches=100,
    ),
    "byte GPT": Task(
        make_model=small_gpt,
        make_data=library_windows,
        optimizer=functools.partial(torch.optim.AdamW, lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1),
        global_batch=32,
        steps=512,
        evaluate_batches=32,
    ),
}


def plan_of(every: int, *, num_ranks: int = NUM_REPLICAS) -> Plan:
    if every == SYNCHRONOUS:
        return Plan(axes=Axes(data=num_ranks))
    return Plan(axes=Axes(data=NUM_REPLICAS), data=Data(sync="local", every=every))


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """One run of replicas in process."""

    held_out_loss: float
    spread: float | None


def quality(name: str, every: int, seed: int, steps: int, device: str) -> Quality:
    """Train one task to its end; in a process of its own."""
    torch.set_num_threads(1)
    task = TASKS[name]
    torch.manual_seed(seed)
    trainer = weft.parallelize(
        task.make_model(),
        plan_of(every, num_ranks=1),
        loss="cross-entropy",
        optimizer=task.optimizer,
        schedule=warmup_cosine(steps // 20, steps, 0.1),
        device=device,
        replicas_in_process=every != SYNCHRONOUS,
    )
    training, held_out = task.make_data()
    spreads: list[torch.Tensor] = []
    samples = weft.batches(
        training, trainer, global_batch=task.global_batch, shuffle_seed=seed, epochs=None, drop_last=True
    )
    with trainer:
        for inputs, targets in islice(samples, steps):
            trainer.step(inputs, targets)
            if every != SYNCHRONOUS and trainer.steps_done % every == 0:
                spread = getattr(trainer.sync, "spread", None)
                assert spread is not None
                spreads.append(spread.clone())
        held_out_batches = weft.batches(held_out, trainer, global_batch=min(4 * task.global_batch, len(held_out)))
        loss = trainer.evaluate(islice(held_out_batches.from_start(), task.evaluate_batches))
    spread = float(torch.stack(spreads).mean()) if spreads else None
    return Quality(held_out_loss=loss, spread=spread)


def measure_costs(names: list[str], every: list[int], rounds: int) -> dict[str, dict[int, tuple[float, float]]]:
    """Seconds and bytes per step of each task and interval; run by every rank."""
    found: dict[str, dict[int, tuple[float, float]]] = {}
    # Through sockets also where hosts are one: shared memory is no network.
    transport = Comm(transport="c10d")
    for name in names:
        task = TASKS[name]
        training, _ = task.make_data()
        trainers = {}
        for some in every:
            torch.manual_seed(0)
            plan = replace(plan_of(some), comm=transport)
            trainers[some] = weft.parallelize(
                task.make_model(), plan, loss="cross-entropy", optimizer=task.optimizer, device="cpu"
            )
        first = trainers[every[0]]
        batch = next(iter(weft.batches(training, first, global_batch=task.global_batch)))
        blocks: dict[int, list[tuple[float, float]]] = {some: [] for some in every}
        for number in range(rounds + 1):
            for some in every[:: 1 if number % 2 else -1]:
                block = time_block(trainers[some], batch, max(every))
                if number:  # the first is a warm-up
                    blocks[some].append(block)
        found[name] = {
            some: (statistics.median(b[0] for b in rows), statistics.median(b[1] for b in rows))
            for some, rows in blocks.items()
        }
        for trainer in trainers.values():
            trainer.close()
    return found


def time_block(trainer: weft.Trainer, batch: Any, num_steps: int) -> tuple[float, float]:
    """Seconds per step on the slowest rank, and bytes per step handed over by this one."""
    dist.barrier()
    before, started = sent_bytes(trainer), time.perf_counter()
    for _ in range(num_steps):
        loss = trainer.step(*batch)
    float(loss)
    taken = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return taken.item() / num_steps, (sent_bytes(trainer) - before) / num_steps


def sent_bytes(trainer: weft.Trainer) -> int:
    return sum(traffic.sent_bytes for traffic in trainer.mesh.traffic.values())


def run_rank(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    world = join_world("cpu")
    found = measure_costs(args.tasks, [SYNCHRONOUS, *args.every], args.rounds)
    if world.rank == 0:
        args.as_rank.write_text(json.dumps(found))
    dist.barrier()
    leave_world()


def start_ranks(args: argparse.Namespace) -> dict[str, dict[int, tuple[float, float]]]:
    """The costs as real ranks measure them, on emulated hosts or on this one."""
    network = ("--bandwidth", args.bandwidth, "--delay", args.delay)
    launcher = (
        ("torch.distributed.run", "--nproc-per-node", str(NUM_REPLICAS))
        if args.loopback
        else ("weft", "lab", "--hosts", str(NUM_REPLICAS), *network, "--", sys.executable)
    )
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "costs.json"
        own = ("--as-rank", str(result), "--rounds", str(args.rounds), "--tasks", *args.tasks)
        command = [sys.executable, "-m", *launcher, __file__, *own, "--every", *map(str, args.every)]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})
        read = json.loads(result.read_text())
    return {name: {int(every): (row[0], row[1]) for every, row in rows.items()} for name, rows in read.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table."""

    task: str
    every: int
    held_out_losses: list[float]
    spread: float | None
    step_s: float | None = None
    sent_bytes: float | None = None

    @property
    def loss(self) -> float:
        return statistics.mean(self.held_out_losses)

    def text(self) -> str:
        deviation = statistics.stdev(self.held_out_losses) if len(self.held_out_losses) > 1 else 0.0
        spread = "" if self.spread is None else f"{self.spread:.2e}"
        step = "" if self.step_s is None else f"{1e3 * self.step_s:.1f}"
        sent = "" if self.sent_bytes is None else format_bytes(self.sent_bytes)
        every = "synchronous" if self.every == SYNCHRONOUS else str(self.every)
        return f"{self.task:9s} {every:>11s} {self.loss:9.4f} ± {deviation:.4f} {spread:>9s} {step:>9s} {sent:>10s}"


def measure_quality(args: argparse.Namespace) -> list[Row]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cores = os.cpu_count() or 1
    jobs = args.jobs or (max(min(cores // 2, 6), 1) if device == "cuda" else cores)
    rows = []
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        pending = {
            (name, every): [
                pool.submit(quality, name, every, seed, args.steps or TASKS[name].steps, device)
                for seed in range(args.seeds)
            ]
            for name in args.tasks
            for every in [SYNCHRONOUS, *args.every]
        }
        for (name, every), futures in pending.items():
            found = [future.result() for future in futures]
            spreads = [one.spread for one in found if one.spread is not None]
            losses = [one.held_out_loss for one in found]
            spread = statistics.mean(spreads) if spreads else None
            rows.append(Row(task=name, every=every, held_out_losses=losses, spread=spread))
            print(rows[-1].text(), flush=True)
    return rows


def pictures(rows: list[Row]) -> list[dict[str, Any]]:
    """One picture per measurement, a line per task and, of the loss, per seed: as `plots.py` reads them."""
    local = [row for row in rows if row.every != SYNCHRONOUS]
    base = {row.task: row for row in rows if row.every == SYNCHRONOUS}
    names = list(dict.fromkeys(row.task for row in rows))

    def line(name: str, value: Callable[[Row], float | None], **more: Any) -> dict[str, Any]:
        known = [(row.every, found) for row in local if row.task == name and (found := value(row)) is not None]
        return {"name": name, **more, "x": [x for x, _ in known], "y": [y for _, y in known]}

    def over_synchronous(row: Row, seed: int) -> float:
        return 100 * (row.held_out_losses[seed] / base[row.task].held_out_losses[seed] - 1)

    def picture(title: str, y_label: str, series: list[dict[str, Any]], *, log_y: bool) -> dict[str, Any]:
        return {
            "title": title,
            "x_label": "steps between exchanges",
            "y_label": y_label,
            "log_x": True,
            "log_y": log_y,
            "series": series,
        }

    num_seeds = len(rows[0].held_out_losses)
    losses = [
        line(name, functools.partial(over_synchronous, seed=seed), seed=seed)
        for name in names
        for seed in range(num_seeds)
    ]
    found = [
        picture("Held-out loss", "over synchronous, %", losses, log_y=False),
        picture(
            "Spread of replicas", "distance from the mean / its norm", [line(n, spread_of) for n in names], log_y=True
        ),
    ]
    if local[0].step_s is not None:
        found += [
            picture("Time", "ms per step", [line(n, ms_of) for n in names], log_y=False),
            picture("Sent by a rank", "bytes per step", [line(n, bytes_of) for n in names], log_y=True),
        ]
    return found


def spread_of(row: Row) -> float | None:
    return row.spread


def ms_of(row: Row) -> float | None:
    return None if row.step_s is None else 1e3 * row.step_s


def bytes_of(row: Row) -> float | None:
    return row.sent_bytes


def write(path: Path, rows: list[Row], environment: str) -> None:
    found = {"panels": pictures(rows), "environment": environment, "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(found, indent=1))


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64], help="(1 2 4 ... 64)")
    parser.add_argument(
        "--tasks", nargs="+", choices=list(TASKS), help="default: both, digits if there is scikit-learn"
    )
    parser.add_argument("--seeds", type=int, default=3, help="runs of each setting (3)")
    parser.add_argument("--steps", type=int, help="of a run (256 and 512)")
    parser.add_argument("--jobs", type=int, help="runs beside each other (one per core; 6 on a GPU)")
    parser.add_argument("--bandwidth", default="100Mbit", help="of each emulated host's line, each way (100Mbit)")
    parser.add_argument("--delay", default="5ms", help="one way, between emulated hosts (5ms)")
    parser.add_argument("--loopback", action="store_true", help="ranks of this host, without an emulated network")
    parser.add_argument("--rounds", type=int, default=2, help="timed blocks of each setting; 0 measures no time (2)")
    parser.add_argument("--json", type=Path, default=Path("local_steps.json"), help="results (local_steps.json)")
    parser.add_argument("--tiny", action="store_true", help="few steps of every = 1, 4, 16, one seed")
    parser.add_argument("--as-rank", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.tiny:
        args.every, args.seeds, args.steps, args.rounds = [1, 4, 16], 1, 32, min(args.rounds, 1)
    if args.tasks is None:
        args.tasks = list(TASKS)
        try:
            digits()
        except weft.WeftError as error:
            print(f"no digits: {error}", flush=True)
            args.tasks.remove("digits")
    return args


def main() -> None:
    args = read_arguments()
    if args.as_rank is not None:
        run_rank(args)
        return
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} cores"
    network = "loopback" if args.loopback else f"{args.bandwidth}/s, {args.delay} one way"
    environment = f"{where}, torch {torch.__version__}; 4 replicas, {args.seeds} seeds; ranks: {network}"
    print(
        f"{environment}\n"
        f"{'':9s} {'every':>11s} {'held-out loss':>18s} {'spread':>9s} {'ms/step':>9s} {'sent/step':>10s}"
    )
    rows = measure_quality(args)
    write(args.json, rows, environment)
    if args.rounds:
        try:
            costs = start_ranks(args)
        except subprocess.CalledProcessError as error:
            sys.exit(f"the ranks ended with {error.returncode}, so there is no time; the quality is in {args.json}")
        rows = [
            replace(row, step_s=costs[row.task][row.every][0], sent_bytes=costs[row.task][row.every][1]) for row in rows
        ]
        print("with time and bytes:", *(row.text() for row in rows), sep="\n", flush=True)
        write(args.json, rows, environment)


if __name__ == "__main__":
    main()
