"""The report phase of `slow_networks.py`: Markdown tables on the terminal, FOLDER/report.csv and .json, and the map."""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slow_networks_lab import confirmed
from slow_networks_loss import read, steps_to, target_loss, write
from slow_networks_map import delay_ms, draw_map, rate_bits
from slow_networks_methods import BASE, METHODS, Size

TARGET_SHARE = 0.6
"""Of the dense run's steps, after which it has the target loss."""
Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Steps to the target of a method's runs."""

    num_runs: int
    num_missed: int
    """Runs that did not reach it."""
    least: float | None = None
    most: float | None = None
    mean: float | None = None
    """None unless all runs reached it."""

    @classmethod
    def of(cls, runs: Sequence[float | None]) -> Steps:
        known = [number for number in runs if number is not None]
        missed = len(runs) - len(known)
        mean = sum(known) / len(known) if known and not missed else None
        least, most = min(known, default=None), max(known, default=None)
        return cls(num_runs=len(runs), num_missed=missed, least=least, most=most, mean=mean)


NOT_RUN = Steps(num_runs=0, num_missed=0)


def report(args: argparse.Namespace, _: Size) -> None:
    if args.losses_of:
        known = json.loads(args.losses_of.read_text())
        target, losses_from = known["target_loss"], known["losses"]
        steps = {name: Steps(**one) for name, one in known["steps"].items()}
    else:
        target = args.target_loss or target_loss(args.folder, share=TARGET_SHARE)
        steps = steps_of_all(args.folder, target)
        losses_from = "; ".join(sorted({one["environment"] for one in read(args.folder).values()}))
    timed = [json.loads(path.read_text()) for path in args.folder.glob("lab/*.json")]
    timed.sort(key=lambda one: (-rate_bits(one["condition"]), delay_ms(one["condition"])))
    rows = [row for one in timed for row in rows_of(one, steps)]
    print(f"Target: a held-out loss of {target:.4f}. Losses: {losses_from}.")
    if timed:
        print(f"Step times: {timed[0]['environment']}.")
    print_steps(steps, rows)
    print_times(timed)
    print_delays(timed)
    print_products(rows, [one["condition"] for one in timed])
    print_cells(args)
    print_presets(args.folder, steps)
    steps_by_name = {name: asdict(one) for name, one in steps.items()}
    content = {"target_loss": target, "losses": losses_from, "steps": steps_by_name, "rows": rows}
    content["best"] = best = best_of(rows)
    write(args.folder / "report.json", content)
    if not rows:
        return
    with (args.folder / "report.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    if best:
        args.picture.parent.mkdir(parents=True, exist_ok=True)
        args.picture.write_text(draw_map(best))
        print(f"\n{args.picture}, {args.folder}/report.csv and report.json are written")


def steps_of_all(folder: Path, target: float) -> dict[str, Steps]:
    """Steps to the target, by method."""
    found: dict[str, list[float | None]] = {}
    outcomes = read(folder)
    for name, method in METHODS.items():
        trained = method.converges_as or name
        found[name] = [steps_to(one, target) for (other, _), one in outcomes.items() if other == trained]
    return {name: Steps.of(runs) for name, runs in found.items() if runs}


def rows_of(one: dict[str, Any], steps: dict[str, Steps]) -> list[Row]:
    """A row per method of a condition."""
    rows = []
    base_s = seconds_of(BASE, one, steps)
    for name in METHODS:
        if name not in one["methods"]:
            continue
        timed, runs = one["methods"][name], steps.get(name, NOT_RUN)
        seconds = seconds_of(name, one, steps)
        rows.append(
            {
                "condition": one["condition"],
                "method": name,
                "title": METHODS[name].title,
                "step_s": timed["step_s"],
                "bytes_per_step_per_host": timed["bytes_per_step_per_host"],
                "seeds": runs.num_runs,
                "seeds_that_reached": runs.num_runs - runs.num_missed,
                "steps_mean": runs.mean,
                "steps_least": runs.least,
                "steps_most": runs.most,
                "seconds_to_loss": seconds,
                "times_as_fast_as_ddp": base_s / seconds if base_s and seconds else None,
            }
        )
    return rows


def seconds_of(name: str, one: dict[str, Any], steps: dict[str, Steps]) -> float | None:
    """Seconds to the loss under a condition."""
    number = steps.get(name, NOT_RUN).mean
    return one["methods"][name]["step_s"] * number if number and name in one["methods"] else None


def best_of(rows: list[Row]) -> list[Row]:
    """The fastest method of every condition."""
    found: dict[str, Row] = {}
    for row in rows:
        if row["seconds_to_loss"] is not None:
            best = found.setdefault(row["condition"], row)
            found[row["condition"]] = min(best, row, key=lambda one: one["seconds_to_loss"])
    return list(found.values())


def print_steps(steps: dict[str, Steps], rows: list[Row]) -> None:
    base = steps.get(BASE, NOT_RUN).mean
    sent = {row["method"]: row["bytes_per_step_per_host"] for row in rows}
    print("\n| method | steps to the loss (range of seeds) | over DDP | MB per step and host |\n|---|---|---|---|")
    for name, runs in steps.items():
        shown = f"not reached by {runs.num_missed} of {runs.num_runs}"
        if runs.mean is not None:
            shown = f"{runs.mean:.0f} ({runs.least:.0f} to {runs.most:.0f})"
        over = f"{100 * (runs.mean / base - 1):+.0f} %" if runs.mean and base else ""
        megabytes = f"{sent[name] / 1e6:.2f}" if name in sent else ""
        print(f"| {METHODS[name].title} | {shown} | {over} | {megabytes} |")


def print_times(timed: list[dict[str, Any]]) -> None:
    """ms per step, conditions side by side."""
    if not timed:
        return
    print("\nms per step\n")
    print_header("method", [one["condition"] for one in timed])
    alone = [[found["step_s"] for found in one["alone"]] for one in timed]
    print_row("no exchange", [" to ".join(f"{1e3 * one:.0f}" for one in (min(all_), max(all_))) for all_ in alone])
    for name, method in METHODS.items():
        cells = [one["methods"].get(name) for one in timed]
        failed = ["failed" if name in one["failed"] else "" for one in timed]
        if any(cells) or any(failed):
            shown = [f"{1e3 * cell['step_s']:.0f}" if cell else why for cell, why in zip(cells, failed, strict=True)]
            print_row(method.title, shown)


def print_delays(timed: list[dict[str, Any]]) -> None:
    """Steps of methods that hide their exchange, over the longer of what must pass: computing, and the bytes."""
    unshaped = next((one["methods"] for one in timed if one["condition"] == "unshaped"), {})
    found = [
        (name, one["condition"], one["methods"][name])
        for one in timed
        for name in METHODS
        if METHODS[name].delay and one["condition"] != "unshaped" and name in one["methods"] and name in unshaped
    ]
    if not found:
        return
    print("\nStep time with a delay, ms\n")
    print_header("method", ("condition", "step", "computing with codec", "bytes / rate", "step over the longer"))
    for name, condition, cell in found:
        computing_s = unshaped[name]["step_s"]
        sending_s = 8 * cell["bytes_per_step_per_host"] / rate_bits(condition)
        times = [f"{1e3 * seconds:.0f}" for seconds in (cell["step_s"], computing_s, sending_s)]
        ratio = f"{cell['step_s'] / max(computing_s, sending_s):.2f}"
        print_row(METHODS[name].title, [condition, *times, ratio])


def print_products(rows: list[Row], conditions: list[str]) -> None:
    """Seconds to the loss, conditions side by side; the best of each is bold."""
    found = {(row["method"], row["condition"]): row for row in rows if row["seconds_to_loss"] is not None}
    best = {(row["method"], row["condition"]) for row in best_of(rows)}
    if not found:
        return
    print("\nSeconds to the loss (times as fast as DDP)\n")
    print_header("method", conditions)
    for name, method in METHODS.items():
        cells = []
        for key in ((name, condition) for condition in conditions):
            text = ""
            if row := found.get(key):
                ratio = row["times_as_fast_as_ddp"]
                text = short(row["seconds_to_loss"]) + (f" ({ratio:.2f}×)" if ratio else "")
            cells.append(f"**{text}**" if key in best else text)
        if any(cells):
            print_row(method.title, cells)


def print_cells(args: argparse.Namespace) -> None:
    """Cells that were trained in the lab, against steps × seconds per step."""
    contents = [json.loads(path.read_text()) for path in sorted(args.folder.glob("confirm/*.json"))]
    if not contents:
        return
    print("\nTrained in the lab until a loss\n")
    columns = ("steps", "expected", "s per step", "expected", "seconds", "expected", "over expected")
    print_header("method at condition (loss)", columns)
    for one in (confirmed(args, content) for content in contents):
        seconds, expected = one["seconds"], one["expected_seconds"]
        figures = [one[f"{kind}{what}"] for what in ("steps", "step_s", "seconds") for kind in ("", "expected_")]
        shown = ["–" if value is None else short(value) for value in figures]
        over = f"{100 * (seconds / expected - 1):+.0f} %" if seconds and expected else ""
        print_row(f"{METHODS[one['name']].title} at {one['condition']} ({one['loss']:.3f})", [*shown, over])


def print_presets(folder: Path, steps: dict[str, Steps]) -> None:
    """The dense exchange against the advised method in every preset that was measured."""
    timed = [json.loads(path.read_text()) for path in folder.glob("presets/*.json")]
    pairs = [(one, name) for one in timed for name in one["methods"] if name != "dense" and "dense" in one["methods"]]
    if not pairs:
        return
    pairs.sort(key=lambda pair: pair[0]["methods"]["dense"]["step_s"])
    print("\nPresets of the lab\n")
    columns = ("no exchange, ms", "dense, ms", "advised", "ms", "faster per step", "faster to the loss")
    print_header("preset", columns)
    for one, name in pairs:
        dense_s, advised_s = (one["methods"][method]["step_s"] for method in ("dense", name))
        alone_s = min((found["step_s"] for found in one["alone"]), default=0.0)
        seconds = [seconds_of(method, one, steps) for method in ("dense", name)]
        to_loss = f"{seconds[0] / seconds[1]:.2f}×" if all(seconds) else ""
        times = [f"{1e3 * alone_s:.0f}", f"{1e3 * dense_s:.0f}", METHODS[name].title, f"{1e3 * advised_s:.0f}"]
        print_row(one["condition"].partition(":")[2], [*times, f"{dense_s / advised_s:.2f}×", to_loss])


def short(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def print_header(first: str, columns: Sequence[str]) -> None:
    print_row(first, columns)
    print("|" + "---|" * (1 + len(columns)))


def print_row(first: str, cells: Sequence[str]) -> None:
    print(f"| {first} | {' | '.join(cells)} |")
