"""The lab phases of `slow_networks.py`: starts `weft lab` for every condition, with `slow_networks_rank.py` inside.

One file per condition, written after every method, so that a study that was cut goes on. A method that crashes or hangs
is recorded as failed, and the lab is started again with those that are left.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from slow_networks_loss import NUM_BELOW, read, steps_to, target_loss, write
from slow_networks_methods import METHODS, Size
from slow_networks_rank import TABLE_ROWS

ADVISED = {
    "rack": "local10-onebit",
    "datacentre": "local10-onebit",
    "1GbE": "local10-onebit",
    "100Mbit": "streaming20-onebit",
    "wifi": "streaming20-onebit",
    "half-globe": "streaming20-onebit",
    "world": "streaming20-onebit",
}
"""By preset, the method that the map advises (docs/slow-networks.md); it is measured against the dense exchange."""
CELLS = ("dense@1Gbit:50ms", "best@1Gbit:50ms", "dense@100Mbit:50ms", "best@100Mbit:50ms")
SPARE = 1.15
"""A cell is trained for this many times the steps that are expected."""
EASY_SHARE = 0.2
"""Of the dense run's steps, after which it has the loss that cells are trained to."""


def network_flags(condition: str) -> list[str]:
    """The flags of `weft lab` for "unshaped", "100Mbit:50ms" or "preset:wifi"."""
    if condition == "unshaped":
        return ["--bandwidth", "unlimited", "--delay", "0ms"]
    first, _, second = condition.partition(":")
    return ["--preset", second] if first == "preset" else ["--bandwidth", first, "--delay", second]


def file_of(folder: Path, condition: str) -> Path:
    first, _, second = condition.partition(":")
    return folder / "presets" / f"{second}.json" if first == "preset" else folder / "lab" / f"{condition}.json"


def start_lab(condition: str, size: Size, given: dict[str, Any]) -> int:
    """Run ranks in a lab; returns its exit code."""
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as table:
        np.zeros((TABLE_ROWS, size.num_replicas), np.int64).tofile(table.name)
        inside = {**given, "condition": condition, "size": asdict(size), "table": table.name}
        rank = [sys.executable, str(Path(__file__).with_name("slow_networks_rank.py")), json.dumps(inside)]
        command = [sys.executable, "-m", "weft", "lab", "--hosts", str(size.num_replicas), *network_flags(condition)]
        return subprocess.call([*command, "--", *rank], env={**os.environ, "OMP_NUM_THREADS": "1"})


def time_condition(condition: str, names: list[str], args: argparse.Namespace, size: Size, deadline: float) -> None:
    """Time the methods that are not in the condition's file yet."""
    path = file_of(args.folder, condition)
    settings = {**asdict(size), "timed_steps": args.timed_steps, "seconds": args.seconds}
    if path.exists():
        content = json.loads(path.read_text())
        if content["settings"] != settings:
            sys.exit(f"{path} has other settings; give another folder")
        if args.retry:
            content["failed"] = {}
            write(path, content)
    else:
        where = f"{os.cpu_count()} cores ({platform.machine()}), torch {torch.__version__}, one thread per rank"
        content = {"condition": condition, "settings": settings, "environment": where}
        content |= {"alone": [], "methods": {}, "failed": {}, "under_way": None}
        write(path, content)
    while left := [name for name in names if name not in content["methods"] and name not in content["failed"]]:
        if time.time() > deadline:
            return
        print(f"{condition}: {len(left)} methods", flush=True)
        given = {"kind": "time", "names": left, "file": str(path), "deadline": deadline}
        limits = {"seconds": args.seconds, "timed_steps": args.timed_steps, "limit_s": args.limit_s}
        code = start_lab(condition, size, {**given, **limits})
        content = json.loads(path.read_text())
        if not code:
            return
        failed = content["under_way"]
        print(f"{condition}: the lab ended with code {code} in {failed or 'its start'}", flush=True)
        if failed in (None, "alone"):  # it is not a method's fault
            return
        content["failed"][failed] = f"the lab ended with code {code}"
        content["under_way"] = None
        write(path, content)


def run_conditions(args: argparse.Namespace, size: Size) -> None:
    deadline = time.time() + 60 * args.minutes
    for condition in args.conditions:
        time_condition(condition, args.methods, args, size, deadline)


def run_presets(args: argparse.Namespace, size: Size) -> None:
    """The dense exchange against the advised method in the lab's presets."""
    deadline = time.time() + 60 * args.minutes
    advised = {**ADVISED, **dict(one.split("=", 1) for one in args.advised)}
    if unknown := [name for name in advised.values() if name not in METHODS]:
        sys.exit(f"--advised names no method: {' '.join(unknown)}; --list names them")
    for preset in args.presets:
        time_condition(f"preset:{preset}", ["dense", advised[preset]], args, size, deadline)


def best_method(args: argparse.Namespace, condition: str, loss: float) -> str:
    """The weft method with the fewest seconds to a loss, by both phases."""
    path = file_of(args.folder, condition)
    timed = json.loads(path.read_text())["methods"] if path.exists() else {}
    expected = {
        name: expected_steps * timed[name]["step_s"]
        for name in timed
        if not METHODS[name].is_torch and (expected_steps := predicted_steps(args, name, loss)) is not None
    }
    if not expected:
        sys.exit(f"{path} and {args.folder}/loss have no method with both a step time and a loss of {loss:.4f}")
    return min(expected, key=lambda name: expected[name])


def predicted_steps(args: argparse.Namespace, name: str, loss: float) -> float | None:
    """Steps to a loss, on average over seeds; None if a seed did not reach it."""
    if args.losses_of:  # which has the steps to its own loss alone
        known = json.loads(args.losses_of.read_text())
        mean: float | None = known["steps"].get(name, {}).get("mean")
        return mean if loss == known["target_loss"] else None
    folder = args.folder
    base = METHODS[name].converges_as or name
    found = [steps_to(one, loss) for (method, _), one in read(folder).items() if method == base]
    known = [steps for steps in found if steps is not None]
    return sum(known) / len(known) if known and len(known) == len(found) else None


def run_cells(args: argparse.Namespace, size: Size) -> None:
    """Train in the lab a little past a loss, and compare with steps × seconds per step."""
    deadline = time.time() + 60 * args.minutes
    loss = args.confirm_loss
    if loss is None and args.losses_of:
        loss = json.loads(args.losses_of.read_text())["target_loss"]
    elif loss is None:
        loss = target_loss(args.folder, share=EASY_SHARE)
    for cell in args.cells or CELLS:
        name, _, condition = cell.partition("@")
        name = best_method(args, condition, loss) if name == "best" else name
        path = args.folder / "confirm" / f"{name}@{condition}.json"
        if path.exists() or time.time() > deadline:
            continue
        expected = predicted_steps(args, name, loss)
        periods = (NUM_BELOW + math.ceil(SPARE * expected / size.evaluate_every)) if expected else math.inf
        steps = min(periods * size.evaluate_every, size.steps)
        print(f"{name} at {condition}, until {loss:.4f}: {steps} steps", flush=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir="/dev/shm") as weights:
            given = {"kind": "train", "names": [name], "file": str(path), "deadline": deadline}
            code = start_lab(condition, size, {**given, "loss": loss, "steps": steps, "weights": weights})
        if code:
            print(f"{name} at {condition}: the lab ended with code {code}", flush=True)
            continue
        print(json.dumps(confirmed(args, json.loads(path.read_text())), indent=1), flush=True)


def confirmed(args: argparse.Namespace, content: dict[str, Any]) -> dict[str, Any]:
    """What a cell took and what was expected; None where the loss was not reached, or a phase has no number."""
    name, condition, loss = content["name"], content["condition"], content["loss"]
    steps = steps_to(content, loss)
    curve_steps, curve_s = [0, *content["curve_steps"]], [0.0, *content["curve_s"]]
    path = file_of(args.folder, condition)
    timed = json.loads(path.read_text())["methods"].get(name) if path.exists() else None
    expected_steps = predicted_steps(args, name, loss)
    step_s = timed["step_s"] if timed else None
    return {
        "name": name,
        "condition": condition,
        "loss": loss,
        "steps": steps,
        "seconds": None if steps is None else float(np.interp(steps, curve_steps, curve_s)),
        "step_s": curve_s[-1] / curve_steps[-1],
        "expected_steps": expected_steps,
        "expected_step_s": step_s,
        "expected_seconds": expected_steps * step_s if expected_steps is not None and step_s else None,
    }
