"""How far parameter servers scale beside all-reduce, on one machine: speed-up, the servers' load, workers' memory.

    python benchmarks/server_scaling.py --json server-scaling.json --output PAGE.md      # 4 minutes on two cores
    python benchmarks/server_scaling.py --real --workers 1 2 4 8 16                      # a machine of 16 cores or more
    python benchmarks/server_scaling.py --tiny                                           # to try the script
    python benchmarks/plots.py server-scaling.json -o docs/methods/server-scaling.svg

Workers compute on an emulated accelerator (`emulated_accelerator.py`): they sleep, and their gradients are ready block
by block. What they exchange is real, and so are the servers, which update by AdamW; so what is measured is where the
exchange becomes the bottleneck, on machines whose accelerators leave the cores alone. All workers, servers and ranks
share this machine's cores: the share of them that is busy tells whether servers or cores were the limit. `--real`
trains the byte GPT of `scaling.py` on the cores instead, one thread per worker.

Every worker has the same work, so ideal is W times the steps of one process that exchanges nothing. A block of steps
begins with a barrier and ends when the slowest worker is done; speed-ups are of the median block, with the slowest and
the quickest. Servers are as busy as their first thread, which adds and updates; ZeroMQ moves bytes in others.
"Near-linear" is 90 % of ideal.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from emulated_accelerator import Emulated
from server_page import Page, table, write_picture
from server_scaling_workers import ALL_REDUCE, GLOO, Config, run, servers_of, side_of

from weft.hosts import num_cores

NEAR_LINEAR = 0.9
MEMORY_MB = 64
SERVED_COLUMNS = (
    "side",
    "workers",
    "each server receives, MB/s",
    "sends, MB/s",
    "its first thread is idle",
    "ms of it per gradient",
    "of all its threads",
    "cores busy",
    "ms of a step beyond computing",
)


def speed_ups(found: dict[str, Any], alone_s: float) -> list[float]:
    """Over one process that exchanges nothing: slowest block, median, quickest."""
    blocks = sorted(found["num_workers"] * alone_s / one for one in found["step_s"])
    return [blocks[0], statistics.median(blocks), blocks[-1]]


def speed_up_table(results: dict[str, dict[int, dict[str, Any]]], alone_s: float) -> list[str]:
    columns = sorted(next(iter(results.values())))
    rows = []
    for side, by_workers in results.items():
        cells = []
        for number in columns:
            low, middle, high = speed_ups(by_workers[number], alone_s)
            cells.append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
        rows.append([side, *cells])
    return table(["speed-up", *(f"{number} workers" if number > 1 else "1 worker" for number in columns)], rows)


def busiest(found: dict[str, Any]) -> dict[str, float]:
    """The server that is busy for the longest, by step."""
    longest: dict[str, float] = max(found["servers"], key=lambda one: one["main_s"])
    return longest


def idle_share(found: dict[str, Any]) -> float:
    return max(1 - busiest(found)["main_s"] / statistics.fmean(found["step_s"]), 0.0)


def server_table(results: dict[str, dict[int, dict[str, Any]]], num_cores: int, compute_s: float) -> list[str]:
    rows = []
    for side, by_workers in results.items():
        for number, found in sorted(by_workers.items()):
            step_s = statistics.fmean(found["step_s"])
            shown = [""] * 5
            if found["servers"]:
                one = busiest(found)
                shown = [
                    f"{one['received'] / step_s / 1e6:.0f}",
                    f"{one['sent'] / step_s / 1e6:.0f}",
                    f"{idle_share(found):.0%}",
                    f"{1e3 * one['main_s'] / number:.2f}",
                    f"{1e3 * one['all_s'] / number:.2f}",
                ]
            waits = f"{1e3 * (step_s - compute_s):.0f}"
            rows.append([side, str(number), *shown, f"{found['busy_s'] / step_s:.1f} of {num_cores}", waits])
    return table(SERVED_COLUMNS, rows)


def verdicts(results: dict[str, dict[int, dict[str, Any]]], alone_s: float, num_cores: int) -> list[str]:
    """Up to how many workers each side is near-linear, and what was full where it is not."""
    lines = []
    for side, by_workers in results.items():
        shares = {number: speed_ups(found, alone_s)[1] / number for number, found in sorted(by_workers.items())}
        below = [number for number, share in shares.items() if share < NEAR_LINEAR]
        near = [number for number in shares if not below or number < below[0]]
        line = f"- {side}: " + (f"near-linear up to {near[-1]}" if near else "never near-linear")
        if below:
            found = by_workers[below[0]]
            cores = found["busy_s"] / statistics.fmean(found["step_s"]) / num_cores
            line += f"; {shares[below[0]]:.0%} of ideal with {below[0]}, where {cores:.0%} of the cores were busy"
            if found["servers"]:
                line += f" and the busiest server was idle for {idle_share(found):.0%} of the time"
        if 8 in shares:
            line += f'; "near-linear up to 8" {"confirmed" if 8 in near else f"corrected ({shares[8]:.0%} of ideal)"}'
        lines.append(line + ".")
    return lines


def panels_of(results: dict[str, dict[int, dict[str, Any]]], alone_s: float) -> list[dict[str, Any]]:
    xs = sorted(next(iter(results.values())))
    speed: list[dict[str, Any]] = [{"name": "ideal", "dashed": True, "x": xs, "y": xs}]
    busy = []
    for side, by_workers in results.items():
        for place in range(3):
            ys = [speed_ups(by_workers[number], alone_s)[place] for number in xs]
            speed.append({"name": side, "seed": place, "x": xs, "y": ys})
        if by_workers[xs[0]]["servers"]:
            busy.append({"name": side, "x": xs, "y": [100 * (1 - idle_share(by_workers[number])) for number in xs]})
    labels = {"x_label": "workers", "log_x": True}
    shown: list[dict[str, Any]] = [
        {"title": "speed-up", "y_label": "over one process", "log_y": True, **labels, "series": speed}
    ]
    if busy:
        shown.append({"title": "the busiest server's first thread", "y_label": "% busy", **labels, "series": busy})
    return shown


def memory_table(args: argparse.Namespace) -> list[str]:
    """A worker's peak over a few steps, beside the bytes of its parameters."""
    work = Emulated(gradient_mb=args.memory_mb, step_s=0.02)
    rows = []
    for side in (ALL_REDUCE, side_of(1)):
        found = run(Config(side=side, num_workers=2, work=work, bucket_mb=8.0, blocks=1, steps=3, peak=True))
        rows.append([side, f"{found['peak_bytes'] / 1e6:.0f}", f"{found['peak_bytes'] / args.memory_mb / 1e6:.1f}×"])
    return table(["side", "a worker's peak, MB", f"of its {args.memory_mb:g} MB of parameters"], rows)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 2, 4], help="numbers of server shards (1 2 4)")
    parser.add_argument("--mode", choices=("sync", "async"), default="sync", help="of the servers (sync)")
    parser.add_argument("--gradient-mb", type=float, default=4.0, help="of a worker and step (4)")
    parser.add_argument("--step-ms", type=float, default=100.0, help="for which a worker sleeps (100)")
    parser.add_argument("--bucket-mb", type=float, default=1.0, help="of all sides (1)")
    parser.add_argument("--real", action="store_true", help="compute on the cores, one thread per worker")
    parser.add_argument("--blocks", type=int, default=3, help="of each side and number of workers (3)")
    parser.add_argument("--steps", type=int, default=10, help="of a block (10)")
    parser.add_argument(
        "--memory-mb", type=float, default=MEMORY_MB, help="of a model for workers' memory; 0: skip (64)"
    )
    parser.add_argument("--json", type=Path, help="data for plots.py")
    parser.add_argument("--output", type=Path, help="a page to write")
    parser.add_argument("--tiny", action="store_true", help="two workers, two servers, a few steps")
    args = parser.parse_args()
    if args.tiny:
        args.workers, args.servers, args.blocks, args.steps, args.memory_mb = [1, 2], [1, 2], 2, 3, 8.0
    args.workers = sorted({1, *args.workers})  # what all speed-ups are over
    return args


def main() -> None:
    args = read_arguments()
    work = None if args.real else Emulated(gradient_mb=args.gradient_mb, step_s=args.step_ms / 1e3)
    what = (
        "the byte GPT of scaling.py, computed on the cores" if work is None else f"emulated accelerators, {work.title}"
    )
    page = Page(
        "Parameter servers beside all-reduce on one machine",
        f"Each worker: {what}; AdamW; buckets of {args.bucket_mb:g} MB; servers in mode {args.mode}; {args.blocks} "
        f"blocks of {args.steps} steps.",
    )
    sides = [ALL_REDUCE, GLOO, *map(side_of, args.servers)]
    results: dict[str, dict[int, dict[str, Any]]] = {side: {} for side in sides}
    for number in args.workers:
        for side in sides:
            results[side][number] = run(
                Config(
                    side=side,
                    num_workers=number,
                    work=work,
                    bucket_mb=args.bucket_mb,
                    blocks=args.blocks,
                    steps=args.steps,
                    mode=args.mode,
                )
            )
    memory, cores = memory_table(args) if args.memory_mb else [], num_cores()
    # All-reduce of one rank exchanges nothing.
    alone_s = statistics.median(results[ALL_REDUCE][1]["step_s"])
    compute_s = work.step_s if work else alone_s
    page.add("", f"One process alone takes {1e3 * alone_s:.1f} ms per step.", "", *speed_up_table(results, alone_s))
    served = {side: by_workers for side, by_workers in results.items() if servers_of(side) or side == ALL_REDUCE}
    page.add("", *server_table(served, cores, compute_s), "", *verdicts(results, alone_s, cores))
    if memory:
        page.add("", *memory)
    write_picture(args.json, "Parameter servers beside all-reduce", panels_of(results, alone_s))
    page.write(args.output)


if __name__ == "__main__":
    main()
