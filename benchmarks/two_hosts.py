"""Runs a benchmark on two emulated hosts of two ranks each (docs/lab.md; it needs root)."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable

import torch


def run_on_two_hosts(args: argparse.Namespace, run_rank: Callable[[argparse.Namespace], None]) -> None:
    """Start this command once per rank in a lab; inside the lab, run the rank.

    `args` has bandwidth, delay and rounds.
    """
    if "WEFT_LAB_HOST" in os.environ:
        run_rank(args)
        return
    print(
        f"two hosts of two ranks of one thread, {args.bandwidth}/s, {args.delay} one way, torch {torch.__version__}; "
        f"medians of {args.rounds} rounds",
        flush=True,
    )
    lab = ("lab", "--hosts", "2", "--ranks-per-host", "2", "--bandwidth", args.bandwidth, "--delay", args.delay)
    sys.exit(subprocess.call([sys.executable, "-m", "weft", *lab, "--", sys.executable, *sys.argv]))
