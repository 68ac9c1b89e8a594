"""Saving and loading a checkpoint against dd on the same bytes: seconds, extra memory, and the delay of a step.

    python benchmarks/checkpoint.py [--plans data-2 zero3-2 tensor-2 zero3-4 tensor-2-zero3-2] [--layers 19]
                                    [--rounds 3] [--folder /somewhere/on/the/disk] [--sync-only]

A GPT in float32, about a gigaparameter with 19 blocks of width 2048, and plain SGD, which keeps no state: only weights
are saved. Each round alternates: dd writes the files of an earlier save (conv=fdatasync), a save, dd reads the files, a
load; the page cache is emptied before each read, which needs root. A time is the slowest rank's. Extra memory is the
largest rise of a rank's resident size, by the kernel's own count (VmHWM).

The stall is the time `save(wait=False)` takes; steps are timed before it, and during it until the checkpoint is
complete.
"""

from __future__ import annotations

import argparse
import functools
import gc
import multiprocessing
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import weft
from weft.models.gpt import GPT, GPTConfig
from weft.plan.plan import Axes, Data, Plan
from weft.units import format_bytes

PLANS = {
    "data-2": Plan(axes=Axes(data=2)),
    "zero3-2": Plan(axes=Axes(data=2), data=Data(shard="parameters")),
    "tensor-2": Plan(axes=Axes(tensor=2)),
    "zero3-4": Plan(axes=Axes(data=4), data=Data(shard="parameters")),
    "tensor-2-zero3-2": Plan(axes=Axes(data=2, tensor=2), data=Data(shard="parameters")),
}
TOKENS = 16


def config_of(num_layers: int, hidden: int) -> GPTConfig:
    return GPTConfig(vocab_size=32000, context=TOKENS, num_layers=num_layers, hidden=hidden, heads=16)


def extra_bytes(action: Callable[[], None]) -> tuple[float, int]:
    """Seconds until all ranks are done, and the largest rise of this rank's memory."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = _peak_bytes()
    dist.barrier()
    started_s = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - started_s, _peak_bytes() - before


def _peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM:")))


def on_first(action: Callable[[], float]) -> float:
    """Run something on rank 0 while the others wait."""
    seconds = torch.tensor([action() if dist.get_rank() == 0 else 0.0])
    dist.all_reduce(seconds)
    return float(seconds)


def dd(*arguments: str) -> float:
    started_s = time.perf_counter()
    subprocess.run(["dd", "bs=16M", "status=none", *arguments], check=True)
    return time.perf_counter() - started_s


def dd_write(source: Path, target: Path) -> float:
    """Copy every file of a folder from the cache to the disk."""
    target.mkdir()
    files = [path for path in source.iterdir() if path.suffix == ".safetensors"]
    for path in files:
        dd(f"if={path}", "of=/dev/null")  # into the cache
    seconds = sum(dd(f"if={path}", f"of={target / path.name}", "conv=fdatasync") for path in files)
    shutil.rmtree(target)
    return seconds


def dd_read(source: Path) -> float:
    drop_caches()
    return sum(dd(f"if={path}", "of=/dev/null") for path in source.iterdir() if path.suffix == ".safetensors")


def drop_caches() -> float:
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")
    return 0.0


def step(trainer: weft.Trainer, number: int) -> float:
    text = torch.randint(32000, (1, TOKENS + 1), generator=torch.Generator().manual_seed(number))
    started_s = time.perf_counter()
    float(trainer.step(text[:, :-1].contiguous(), text[:, 1:].contiguous()))
    return time.perf_counter() - started_s


def measure_stall(trainer: weft.Trainer, folder: Path) -> dict[str, float]:
    """A background save between steps; the second one, because the first allocates its buffer."""
    step(trainer, 0)
    for number in (1, 2):
        trainer.save(folder / f"beside-{number}", wait=False)
        trainer.wait_for_save()
    alone_s = statistics.median(step(trainer, number) for number in range(3))
    dist.barrier()
    started_s = time.perf_counter()
    trainer.save(folder / "beside-1", wait=False)
    stall_s, beside = time.perf_counter() - started_s, []
    busy = torch.ones(1)
    while busy.item():
        beside.append(step(trainer, len(beside)))
        busy[0] = not trainer.saving.is_over
        dist.all_reduce(busy)
    trainer.wait_for_save()
    whole_s = time.perf_counter() - started_s
    return {"stall": stall_s, "alone": alone_s, "beside": statistics.median(beside), "whole": whole_s}


def measure(plan: Plan, config: GPTConfig, folder: Path, num_rounds: int, with_steps: bool) -> dict[str, Any]:
    with torch.device("meta"):
        model = GPT(config)
    optimizer = functools.partial(torch.optim.SGD, lr=1e-3)
    example = torch.zeros(1, TOKENS, dtype=torch.long)
    trainer = weft.parallelize(model, plan, loss="cross-entropy", optimizer=optimizer, device="cpu", example=example)
    times: dict[str, list[float]] = {"write": [], "save": [], "read": [], "load": []}
    extra = {"save": 0, "load": 0}
    trainer.save(folder / "first")
    for _ in range(num_rounds):
        times["write"].append(on_first(lambda: dd_write(folder / "first", folder / "dd")))
        save_s, save_bytes = extra_bytes(lambda: trainer.save(folder / "saved"))
        times["read"].append(on_first(lambda: dd_read(folder / "saved")))
        on_first(drop_caches)
        load_s, load_bytes = extra_bytes(lambda: trainer.load(folder / "saved"))
        times["save"].append(save_s)
        times["load"].append(load_s)
        extra = {"save": max(extra["save"], save_bytes), "load": max(extra["load"], load_bytes)}
    num_bytes = sum(path.stat().st_size for path in (folder / "saved").iterdir())
    found: dict[str, Any] = {"times": times, "extra": extra, "num_bytes": num_bytes}
    if with_steps:
        found["stall"] = measure_stall(trainer, folder)
    return found


def run_rank(rank: int, num_ranks: int, folder: str, arguments: tuple[Any, ...], results: Any) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    plan, config, num_rounds, with_steps = arguments
    results.put(measure(plan, config, Path(folder), num_rounds, with_steps))
    dist.barrier()
    dist.destroy_process_group()


def run(plan: Plan, config: GPTConfig, parent: str | None, num_rounds: int, with_steps: bool) -> list[dict[str, Any]]:
    """Measurements of every rank, each in its own process."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        results = context.Queue()
        arguments = (plan, config, num_rounds, with_steps)
        num_ranks = plan.axes.num_ranks
        ranks = [
            context.Process(target=run_rank, args=(rank, num_ranks, folder, arguments, results), daemon=True)
            for rank in range(num_ranks)
        ]
        for process in ranks:
            process.start()
        found = [results.get(timeout=1200) for _ in ranks]
        for process in ranks:
            process.join()
    return found


def show(name: str, found: list[dict[str, Any]], largest_bytes: int) -> None:
    times, num_bytes = found[0]["times"], found[0]["num_bytes"]
    slowest = {key: [max(each) for each in zip(*(one["times"][key] for one in found), strict=True)] for key in times}
    row = [f"{name:>17s}", f"{format_bytes(num_bytes):>9s}"]
    for ours, theirs in (("save", "write"), ("load", "read")):
        seconds, dd_seconds = statistics.median(slowest[ours]), statistics.median(slowest[theirs])
        ratio = statistics.median(a / b for a, b in zip(slowest[theirs], slowest[ours], strict=True))
        row.append(f"{seconds:7.2f} {num_bytes / seconds / 1e9:6.2f} {dd_seconds:7.2f} {ratio:6.2f}")
        row.append(f"{format_bytes(max(one['extra'][ours] for one in found)):>9s}")
    row.append(f"{format_bytes(largest_bytes):>9s}")
    if "stall" in found[0]:
        worst = {key: max(one["stall"][key] for one in found) for key in found[0]["stall"]}
        row.append(f"{worst['stall']:6.2f} {worst['alone']:6.2f} {worst['beside']:6.2f} {worst['whole']:6.2f}")
    print(" ".join(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=list(PLANS))
    parser.add_argument("--layers", type=int, default=19)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", help="folder to write to; default: the system's folder for temporary files")
    parser.add_argument("--sync-only", action="store_true", help="no steps, no background save")
    args = parser.parse_args()
    config = config_of(args.layers, args.hidden)
    with torch.device("meta"):
        sizes = [parameter.numel() for parameter in GPT(config).parameters()]
    print(f"GPT of {sum(sizes) / 1e6:.0f} M parameters in float32, plain SGD, torch {torch.__version__}")
    print("ratio: dd's seconds over weft's, 1 is the disk's speed; extra: largest rise of a rank's memory")
    print(f"{'plan':>17s} {'bytes':>9s} {'save s':>7s} {'GB/s':>6s} {'dd s':>7s} {'ratio':>6s} {'extra':>9s}", end=" ")
    print(f"{'load s':>7s} {'GB/s':>6s} {'dd s':>7s} {'ratio':>6s} {'extra':>9s} {'largest':>9s}", end=" ")
    print(f"{'stall':>6s} {'step':>6s} {'beside':>6s} {'whole':>6s}")
    for name in args.plans:
        show(name, run(PLANS[name], config, args.folder, args.rounds, not args.sync_only), 4 * max(sizes))


if __name__ == "__main__":
    main()
