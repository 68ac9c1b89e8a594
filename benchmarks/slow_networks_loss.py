"""The loss phase of `slow_networks.py`: each method's held-out loss over its steps, FOLDER/loss/NAME-SEED.json."""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from compression_gpt import MARGIN
from slow_networks_methods import METHODS, Method, Size, make_batches, make_trainer

Outcome = dict[str, Any]
NUM_BELOW = 2
"""Evaluations in a row that must be below a loss before it counts as reached."""
POLL_S = 0.2


def train(name: str, seed: int, size: Size, device: str, deadline: float, until_loss: float) -> Outcome | None:
    """One run, in a process of its own; None if the time was over before it was."""
    logging.getLogger("weft").setLevel(logging.ERROR)  # a run that diverges would tell of every step
    torch.set_num_threads(1)
    method = METHODS[name]
    if method.is_torch:
        return _train_on_ranks(name, seed, size, device, deadline, until_loss)
    trainer = make_trainer(method, size, seed, device, in_process=True)
    with trainer:
        return _run(trainer, name, seed, size, until_loss, lambda: time.time() > deadline)


def _run(
    trainer: Any, name: str, seed: int, size: Size, until_loss: float, is_time_over: Callable[[], bool]
) -> Outcome | None:
    """Train and evaluate; all ranks of a run decide alike when it ends."""
    batches, held_out = make_batches(size, trainer, seed)
    steps: list[int] = []
    losses: list[float | None] = []
    ended, started = "steps", time.time()
    for _ in range(size.steps):
        trainer.step(*next(batches))
        if trainer.steps_done % size.evaluate_every:
            continue
        loss = trainer.evaluate(held_out)
        steps.append(trainer.steps_done)
        losses.append(loss if math.isfinite(loss) else None)
        if is_time_over():
            return None
        latest = losses[-NUM_BELOW:]
        if len(latest) == NUM_BELOW and all(one is None for one in latest):
            ended = "diverged"
            break
        if len(latest) == NUM_BELOW and all(one is not None and one <= until_loss for one in latest):
            ended = "below"
            break
    batches.close()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {
        "name": name,
        "seed": seed,
        "settings": asdict(size),
        "ended": ended,
        "curve_steps": steps,
        "curve_loss": losses,
        "seconds": time.time() - started,
        "environment": f"{device}, torch {torch.__version__}, {trainer.num_parameters / 1e6:.1f} M parameters, float32",
    }


def _train_on_ranks(
    name: str, seed: int, size: Size, device: str, deadline: float, until_loss: float
) -> Outcome | None:
    """DDP with a hook, on one process per rank; tensors of a GPU go through the host."""
    context = get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        given = (name, seed, size, device, deadline, until_loss, folder)
        ranks = [context.Process(target=_ddp_rank, args=(rank, *given)) for rank in range(size.num_replicas)]
        for rank in ranks:
            rank.start()
        while any(rank.is_alive() for rank in ranks) and not any(rank.exitcode for rank in ranks):
            time.sleep(POLL_S)
            if time.time() > deadline + 20:  # they look at the time themselves, unless they hang
                break
        failed = [rank.exitcode for rank in ranks if rank.exitcode]
        for rank in ranks:
            if rank.is_alive():
                rank.terminate()
            rank.join()
        if failed:
            raise RuntimeError(f"a rank of DDP ended with code {failed[0]}")
        written = Path(folder, "outcome.json")
        return json.loads(written.read_text()) if written.exists() else None


def _ddp_rank(
    rank: int, name: str, seed: int, size: Size, device: str, deadline: float, until_loss: float, folder: str
) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(f"{folder}/store", size.num_replicas)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size.num_replicas)

    def is_time_over() -> bool:
        over = torch.tensor(int(time.time() > deadline))
        dist.all_reduce(over, op=dist.ReduceOp.MAX)
        return bool(over)

    trainer = make_trainer(METHODS[name], size, seed, device)
    outcome = _run(trainer, name, seed, size, until_loss, is_time_over)
    if outcome is not None and rank == 0:
        Path(folder, "outcome.json").write_text(json.dumps(outcome))
    trainer.close()
    dist.barrier()
    dist.destroy_process_group()


def read(folder: Path) -> dict[tuple[str, int], Outcome]:
    """All runs that are in the folder."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("loss/*-[0-9]*.json"))]
    return {(one["name"], one["seed"]): one for one in found if one["name"] in METHODS}


def run_all(args: argparse.Namespace, size: Size) -> None:
    """Make the runs that are not in the folder yet, as far as the time goes."""
    deadline = time.time() + 60 * args.minutes
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kept = read(args.folder)
    if other := [key for key, one in kept.items() if one["settings"] != asdict(size)]:
        sys.exit(f"{args.folder}/loss has runs with other settings, such as {other[0]}; give another folder")
    (args.folder / "loss").mkdir(parents=True, exist_ok=True)
    names = [name for name in args.methods if not METHODS[name].converges_as]
    names.sort(key=lambda name: (name != "dense", not METHODS[name].is_torch))  # the longest runs early
    queue = [one for seed in range(args.seeds) for name in names if (one := (name, seed)) not in kept]
    longest: dict[str, float] = {}
    for (name, _), one in kept.items():
        longest[_kind(METHODS[name])] = max(longest.get(_kind(METHODS[name]), 0.0), one["seconds"])
    running: dict[Future[Outcome | None], tuple[str, int]] = {}
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        while queue or running:
            while queue and len(running) < args.jobs:
                name, seed = queue.pop(0)
                needed_s = MARGIN * longest.get(_kind(METHODS[name]), 0.0)
                if time.time() + needed_s > deadline:
                    print(f"{name} (seed {seed}) left out: it needs {needed_s:.0f} s", flush=True)
                    continue
                future = pool.submit(train, name, seed, size, device, deadline, args.until_loss)
                running[future] = (name, seed)
            for future in wait(running, return_when=FIRST_COMPLETED).done if running else ():
                name, seed = running.pop(future)
                if future.exception() is not None:
                    print(f"{name}-{seed} failed: {str(future.exception())[:500]}", flush=True)
                elif (outcome := future.result()) is None:
                    print(f"{name}-{seed} ended with the time", flush=True)
                else:
                    kind = _kind(METHODS[name])
                    longest[kind] = max(longest.get(kind, 0.0), outcome["seconds"])
                    write(args.folder / "loss" / f"{name}-{seed}.json", outcome)
                    last = [loss for loss in outcome["curve_loss"] if loss is not None][-1:]
                    print(
                        f"{name}-{seed}: {last[0] if last else math.nan:.4f} at step {outcome['curve_steps'][-1]}, "
                        f"{outcome['seconds']:.0f} s",
                        flush=True,
                    )


def write(path: Path, content: Any) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(content, indent=1))
    beside.rename(path)


def _kind(method: Method) -> str:
    """Runs of a kind take about as long."""
    if method.is_torch:
        return "ranks"
    return "replicas" if method.differs else "coded" if method.codec else "dense"


def steps_to(outcome: Outcome, loss: float) -> float | None:
    """The steps after which a run had this loss, on a line between the evaluations around it; None: it never had.

    As many evaluations in a row as ended the run must be below it.
    """
    steps, losses = [0, *outcome["curve_steps"]], [math.inf, *outcome["curve_loss"]]
    for place in range(1, len(losses)):
        window = losses[place : place + NUM_BELOW]
        if len(window) < NUM_BELOW or any(one is None or one > loss for one in window):
            continue
        before, after = losses[place - 1], losses[place]
        if before is None or not math.isfinite(before) or before == after:
            return float(steps[place])
        share = (before - loss) / (before - after)
        return steps[place - 1] + share * (steps[place] - steps[place - 1])
    return None


def target_loss(folder: Path, *, share: float) -> float:
    """What the dense runs have after this share of their steps, on average over seeds."""
    found = [
        float(np.interp(share * one["settings"]["steps"], one["curve_steps"], one["curve_loss"]))
        for (name, _), one in read(folder).items()
        if name == "dense"
    ]
    if not found:
        sys.exit(f"{folder}/loss has no dense run; make one with --phase loss --methods dense")
    return sum(found) / len(found)
