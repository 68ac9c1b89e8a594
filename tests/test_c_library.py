"""C files that several processes need at once are compiled once, also after a builder was killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

LOAD = """
import ctypes, sys
from pathlib import Path
from weft.c_library import load_library
library = load_library(Path(sys.argv[1]))
assert library is not None and library.seven() == 7
"""

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


def start(folder: Path, *, slow: bool = False) -> subprocess.Popen[bytes]:
    """A process that loads a library, with a compiler that writes down its calls."""
    source, compiler, calls = folder / "seven.c", folder / "compiler", folder / "calls"
    source.write_text("int seven(void) { return 7; }\n")
    wait = f"[ $# -lt 2 ] || echo >> {calls}; [ $# -lt 2 ] || sleep {30 if slow else 0.5}"
    compiler.write_text(f'#!/bin/sh\n{wait}\nexec cc "$@"\n')
    compiler.chmod(0o755)
    settings = {**os.environ, "CC": str(compiler), "XDG_CACHE_HOME": str(folder / "cache")}
    return subprocess.Popen([sys.executable, "-c", LOAD, str(source)], env=settings, start_new_session=True)


def num_calls(folder: Path) -> int:
    calls = folder / "calls"
    return len(calls.read_text().splitlines()) if calls.exists() else 0


def test_processes_that_need_a_library_at_once_build_it_once(tmp_path: Path) -> None:
    processes = [start(tmp_path) for _ in range(4)]
    assert [one.wait(timeout=60) for one in processes] == [0] * 4
    assert num_calls(tmp_path) == 1


def test_a_killed_builder_keeps_no_lock(tmp_path: Path) -> None:
    killed = start(tmp_path, slow=True)
    until = time.monotonic() + 30
    while not num_calls(tmp_path) and time.monotonic() < until:
        time.sleep(0.05)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait(timeout=30)
    assert start(tmp_path).wait(timeout=60) == 0
    assert num_calls(tmp_path) == 2
