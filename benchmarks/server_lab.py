"""Parameter servers on an emulated network beside all-reduce and DDP: step time, and bytes on the busiest line.

    python benchmarks/server_lab.py --output PAGE.md                                # 2 minutes on two cores, as root
    python benchmarks/server_lab.py --bandwidth 200Mbit --delay 5ms --sides all-reduce "a server on a host of its own"
    python benchmarks/server_lab.py --tiny                                          # to try the script

Four workers on four hosts and servers on a fifth, on the first worker's, or one on each worker's host (docs/lab.md).
Workers compute on an emulated accelerator (`emulated_accelerator.py`): they sleep, and their gradients are ready block
by block, so that the machine's cores are left to what moves bytes. Between hosts all that passes to and from servers is
encrypted (CURVE), as it always is, and all-reduce is not.

With gradients of n bytes and W workers, per step and direction the busiest line carries

    all-reduce, DDP                           2 (W - 1) / W n    of every host
    servers on a host of their own                      W   n    of that host
    a server on the first worker's host            (W - 1)  n    of that host
    a server on each worker's host            2 (W - 1) / W n    of every host: as a worker, and as a server

Servers and workers take turns on the line: gradients go in while the backward pass runs and after it, weights go out
when all gradients have come. Sides run one after the other, each in new processes; the slowest worker's time counts.
Bytes are those of IP packets, as the switch counted them; *ms in and out* is what the busiest line needs for them: a
ring does both at once, a server first the one and then the other.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from emulated_accelerator import Emulated
from server_lab_hosts import ALL_REDUCE, ALONE, NUM_HOSTS, NUM_WORKERS, SIDES, run_host
from server_page import Page, table
from slow_networks_rank import TABLE_ROWS

from weft.lab.quantities import parse_rate


def start_lab(args: argparse.Namespace, folder: str) -> int:
    """Run all sides in one lab; returns its exit code."""
    work = Emulated(gradient_mb=args.gradient_mb, step_s=args.step_ms / 1e3)
    given = {
        "folder": folder,
        "sides": args.sides,
        "work": asdict(work),
        "steps": args.steps,
        "bucket_mb": args.bucket_mb,
        "seconds_at_most": args.limit_s,
    }
    for side in args.sides:
        np.zeros((TABLE_ROWS, NUM_WORKERS), np.int64).tofile(f"{folder}/{SIDES[side].number}.table")
    lab = ["lab", "--hosts", str(NUM_HOSTS), "--bandwidth", args.bandwidth, "--delay", args.delay]
    command = [sys.executable, "-m", "weft", *lab, "--", sys.executable, __file__, "--inside", json.dumps(given)]
    return subprocess.call(command, env={**os.environ, "OMP_NUM_THREADS": "1"})


def row_of(side: str, found: dict[str, Any], base: dict[str, Any] | None, bits_per_s: float) -> list[str]:
    lines = [max(found["sent"][host], found["received"][host]) for host in range(NUM_HOSTS)]
    over = "" if base is None else f"{found['step_s'] / base['step_s']:.2f}×"
    steps = f"{1e3 * found['step_s']:.0f} ({1e3 * min(found['steps_s']):.0f} to {1e3 * max(found['steps_s']):.0f})"
    host = lines.index(max(lines))
    needed = [f"{8e3 * found[way][host] / bits_per_s:.0f}" for way in ("received", "sent")]
    busiest = f"{max(lines) / 1e6:.1f} (host {host})"
    shown = [busiest, " and ".join(needed)] if max(lines) else ["0.0", ""]
    return [side, steps, over, f"{sum(found['sent']) / 1e6:.1f}", *shown]


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bandwidth", default="1Gbit", help="of each host's line, each way (1Gbit)")
    parser.add_argument("--delay", default="0ms", help="one way (0ms)")
    parser.add_argument("--gradient-mb", type=float, default=12.0, help="of a worker and step (12)")
    parser.add_argument("--step-ms", type=float, default=100.0, help="for which a worker sleeps (100)")
    parser.add_argument("--bucket-mb", type=float, default=1.5, help="of all sides (1.5)")
    parser.add_argument("--steps", type=int, default=12, help="that are timed (12)")
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=list(SIDES), metavar="SIDE", help="(all)")
    parser.add_argument("--limit-s", type=float, default=60.0, help="after which a side counts as hung (60)")
    parser.add_argument("--output", type=Path, help="a page to write")
    parser.add_argument("--tiny", action="store_true", help="small gradients, few steps")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.tiny:
        args.gradient_mb, args.step_ms, args.bucket_mb, args.steps = 2.0, 50.0, 0.5, 4
    return args


def main() -> None:
    args = read_arguments()
    if args.inside:
        run_host(json.loads(args.inside))
        return
    page = Page(
        "Parameter servers on an emulated network",
        f"{NUM_WORKERS} workers, {args.bandwidth}/s per host and direction, {args.delay} one way; each worker sleeps "
        f"{args.step_ms:g} ms per step for {args.gradient_mb:g} MB of gradients; AdamW; buckets of {args.bucket_mb:g} "
        f"MB; {args.steps} steps. Milliseconds are the mean (quickest to slowest step of a worker).",
    )
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        code = start_lab(args, folder)
        files = {side: Path(folder, f"{SIDES[side].number}.json") for side in args.sides}
        found = {side: json.loads(path.read_text()) for side, path in files.items() if path.exists()}
    base = found.get(ALL_REDUCE)
    rows = [row_of(side, one, base, parse_rate(args.bandwidth)) for side, one in found.items()]
    head = (
        "side",
        "ms per step",
        f"over {ALL_REDUCE}",
        "MB per step, all hosts",
        "busiest line, MB per step",
        "ms in and out",
    )
    page.add("", *table(head, rows))
    if base and (alone := found.get(ALONE)):
        hidden = max(base["step_s"] - alone["step_s"], 0.0)
        page.add("", f"All-reduce adds {1e3 * hidden:.0f} ms to a step that exchanges nothing.")
    page.write(args.output)
    if code or len(found) < len(args.sides):
        sys.exit(f"the lab ended with code {code} after {len(found)} of {len(args.sides)} sides")


if __name__ == "__main__":
    main()
