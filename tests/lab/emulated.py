"""The real `weft lab` in a process of its own, for tests; they are skipped where a lab cannot be made."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from weft.lab.namespaces import missing_here

needs_lab = pytest.mark.skipif(bool(missing_here()), reason="; ".join(missing_here()) or "can run")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a lab ended."""

    code: int
    stdout: str
    stderr: str
    counters: dict[str, Any] = field(default_factory=dict)

    def pair(self, source: int, destination: int) -> dict[str, int]:
        """What crossed the switch from one host to another."""
        found = [each for each in self.counters["pairs"] if (each["from"], each["to"]) == (source, destination)]
        return found[0] if found else {"packets": 0, "bytes": 0, "lost": 0, "dropped": 0}


def start_lab(*arguments: str | Path, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "weft", "lab", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=None if env is None else {**os.environ, **env},
    )


def finish_lab(process: subprocess.Popen[str], *, timeout_s: float = 100.0) -> Ended:
    try:
        stdout, stderr = process.communicate(timeout=timeout_s)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return Ended(code=process.returncode, stdout=stdout, stderr=stderr)


def run_script(folder: Path, script: str, *flags: str, words: Sequence[str] = ()) -> Ended:
    """A Python script, once a rank, with what crossed the switch."""
    (folder / "script.py").write_text(script)
    counters = folder / "counters.json"
    command = ("--", sys.executable, folder / "script.py", *words)
    ended = finish_lab(start_lab(*flags, "--counters", counters, *command))
    found = json.loads(counters.read_text()) if counters.exists() else {}
    return Ended(code=ended.code, stdout=ended.stdout, stderr=ended.stderr, counters=found)
