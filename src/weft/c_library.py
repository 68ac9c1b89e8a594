"""C files compiled when first needed, if there is a C compiler: inner loops that torch's operations also do, slower.

A library is kept in the user's cache folder, under a hash of its source and the compiler's version: it is built once
per machine, in about a second per file. Products and sums are not contracted to one rounding, so loops can be equal to
torch's operations to the bit.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

log = logging.getLogger("weft")

_FLAGS = ("-O3", "-fPIC", "-shared", "-std=c11", "-ffp-contract=off")
_BUILD_TIMEOUT_S = 60.0


def load_library(source: Path) -> ctypes.CDLL | None:
    """The library of a C file, built now if it never was; None without a compiler. Headers lie beside the file."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        return None
    try:
        return ctypes.CDLL(str(_build(compiler, source)))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: this user has no home
        log.debug("no compiled loops of %s: %s", source.name, error)
        return None


def _build(compiler: str, source: Path) -> Path:
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=_BUILD_TIMEOUT_S).stdout
    texts = [file.read_bytes() for file in (source, *sorted(source.parent.glob("*.h")))]
    marks = (*texts, version, " ".join(_FLAGS).encode(), platform.platform().encode())
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weft"
    path = folder / f"{source.stem}-{hashlib.sha256(b'|'.join(marks)).hexdigest()[:20]}.so"
    if path.exists():
        return path
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _alone(path.with_suffix(".lock")), tempfile.TemporaryDirectory(dir=folder) as work:
        if path.exists():  # another rank has built it meanwhile
            return path
        made = Path(work) / "library.so"
        subprocess.run(
            [compiler, *_FLAGS, "-o", str(made), str(source), "-lm"],
            capture_output=True,
            check=True,
            timeout=_BUILD_TIMEOUT_S,
        )
        made.rename(path)  # whole, also where the lock does nothing
    return path


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Context in which no other process of this machine builds; the kernel ends it when a builder is killed."""
    with path.open("w") as lock:
        with suppress(OSError):  # a file system without locks: several build at once, and each renames a whole file
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
