"""Short hashes of weft's own code, a job's files and its data, which must be the same on all ranks.

Files up to 64 MB are hashed whole, larger ones by their size and 64 evenly spaced blocks of 64 KB: that detects another
file, a truncated one and one whose parts were moved, but not a few changed bytes in between.
"""

from __future__ import annotations

import glob
import hashlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import weft.errors
from weft.errors import JobError, WeftError
from weft.plan.text import parse_toml, read_text

WHOLE_BYTES = 64 << 20
_BLOCK_BYTES = 64 << 10
_NUM_BLOCKS = 64
_LETTERS = 12

MISSING = "missing"


def hash_file(path: Path) -> str:
    """A hash of a file's content; "missing" if it cannot be read."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest = hashlib.sha256(str(size).encode())
            if size <= WHOLE_BYTES:
                digest.update(file.read())
            else:
                for place in range(_NUM_BLOCKS):
                    file.seek((size - _BLOCK_BYTES) * place // (_NUM_BLOCKS - 1))
                    digest.update(file.read(_BLOCK_BYTES))
    except OSError:
        return MISSING
    return digest.hexdigest()[:_LETTERS]


def hash_code() -> str:
    """A hash of all of weft's source files, as they are installed here."""
    home, digest = Path(weft.errors.__file__).parent, hashlib.sha256()
    for path in sorted(home.rglob("*.py")):
        digest.update(f"{path.relative_to(home).as_posix()} {hash_file(path)}\n".encode())
    return digest.hexdigest()[:_LETTERS]


def hash_job(path: Path) -> dict[str, str]:
    """Hashes of the job file, its plan, the modules it names and its data, by name."""
    tables = parse_toml(read_text(path, kind=JobError), source=os.fspath(path), kind=JobError)
    hashes = {f"job {path.name}": hash_file(path)}
    plan = tables.get("plan")
    if isinstance(plan, str):
        hashes[f"plan {plan}"] = hash_file(path.parent / plan)
    sections = [table for table in tables.values() if isinstance(table, dict)]
    names = [value for table in sections for value in table.values() if isinstance(value, str) and ":" in value]
    for module in dict.fromkeys(name.partition(":")[0] for name in names):
        if (source := _source_of(module)) is not None:
            hashes[f"module {module}"] = hash_file(source)
    return hashes | _data_hashes(path, tables.get("dataset", {}))


def _data_hashes(path: Path, dataset: Any) -> dict[str, str]:
    """Hashes of the files that the job names; else a checksum of evenly spaced samples."""
    named = [dataset.get("file"), dataset.get("files")] if isinstance(dataset, dict) else []
    patterns = [name for entry in named for name in (entry if isinstance(entry, list) else [entry]) if name]
    if patterns:
        files = [file for name in patterns for file in (sorted(glob.glob(str(name))) or [str(name)])]
        return {f"data {file}": hash_file(Path(file)) for file in dict.fromkeys(files)}
    from weft.training.data.datasets import fingerprint
    from weft.training.run.components import prepare
    from weft.training.run.job import read_job

    try:
        return {"data (sampled)": f"{fingerprint(prepare(read_job(path)).train_data):08x}"}
    except WeftError as error:
        return {"data (sampled)": f"cannot be read: {error.problems[0]}"}


def _source_of(module: str) -> Path | None:
    """The file that a module would be imported from; the current directory is searched first."""
    here = Path.cwd() / Path(*module.split(".")).with_suffix(".py")
    if here.exists():
        return here
    try:
        found = importlib.util.find_spec(module) if module not in sys.modules else sys.modules[module].__spec__
    except (ImportError, ValueError):
        return None
    return Path(found.origin) if found is not None and found.origin and Path(found.origin).exists() else None
