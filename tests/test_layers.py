"""Imports go one way: a file of weft imports only from its own package or from packages above it in `ROOMS`.

The order is that of docs/design.md. Packages above `dtypes` never import torch, not even inside a function, so that
planning starts at once and runs anywhere. Imports are read from the source, so an import that no test reaches counts
too; what is only computed at run time (a module name in a variable) is not seen.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"

ROOMS = (
    "errors units hosts host_memory c_library plan plan.partition plan.exchange plan.pipeline profiles planning report "
    "dtypes comm.shared_memory comm.failures comm.world comm world mesh parallel.wrapping blueprint models layout "
    "parallel.tracing parallel.zero parallel.state parallel.attention parallel.sequence parallel.spatial "
    "parallel.tensor.discovery parallel.tensor parallel.pipeline "
    "codecs.native codecs.triton_kernels codecs.formats codecs "
    "server.protocol sync.exchange sync server.workers server.weights server "
    "checkpoint.files checkpoint optim "
    "training.data training.loss training.step training.setup parallel training training.run "
    "verification.float64 verification.compression verification "
    "measure lab restarts launch launch_workers launch_servers cli __main__"
).split()
"""Packages in import order; a sub-package may stand above or below the package that holds it."""
FIRST_WITH_TORCH = ROOMS.index("dtypes")


def room_of(names: Sequence[str]) -> str | None:
    """The innermost room of a dotted name below weft."""
    return next((room for n in range(len(names), 0, -1) if (room := ".".join(names[:n])) in ROOMS), None)


def imported_names(tree: ast.AST, package: list[str]) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, at any depth. `from a import b` gives `a.b`: b may be a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            parts = base + (node.module.split(".") if node.module else [])
            for alias in node.names:
                yield node.lineno, ".".join([*parts, alias.name])
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def problems_in(file: str, source: str) -> list[str]:
    """Every import of this file (a path below src) that goes the wrong way."""
    parts = Path(file).with_suffix("").parts
    room = room_of(parts[1:])
    if room is None or len(parts) > 2 and room != ".".join(parts[1:-1]):
        missing = ".".join(parts[1:-1]) or parts[1]
        return [f"{file}: room {missing!r} is not in the house; known: {', '.join(ROOMS)}"]
    place, problems = ROOMS.index(room), []
    for line, name in imported_names(ast.parse(source), list(parts[:-1])):
        where, names = f"{file}:{line} imports {name}", name.split(".")
        if names[0] == "torch" and place < FIRST_WITH_TORCH:
            problems.append(f"{where}: {room} is above mesh, where nothing imports torch")
        if names[0] != "weft":
            continue
        other = room_of(names[1:])
        if other is None:
            problems.append(f"{where}: inside weft a name is imported from its room, not from weft itself")
        elif ROOMS.index(other) > place:
            problems.append(f"{where}: {other} is below {room}; imports go up only")
    return problems


def test_imports_go_up() -> None:
    files = [path for path in SOURCE.glob("weft/**/*.py") if path != SOURCE / "weft" / "__init__.py"]
    assert files
    problems = [
        problem for path in sorted(files) for problem in problems_in(str(path.relative_to(SOURCE)), path.read_text())
    ]
    assert not problems, "\n" + "\n".join(problems)


def test_importing_weft_does_not_load_torch() -> None:
    above = ROOMS[:FIRST_WITH_TORCH]
    paths = [path.relative_to(SOURCE).with_suffix("") for path in sorted(SOURCE.glob("weft/**/*.py"))]
    modules = [
        "weft",
        *(".".join(path.parts) for path in paths if room_of(path.parts[1:]) in above and path.name != "__init__"),
    ]
    code = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)\n"
    code += "    assert 'torch' not in sys.modules, f'import {name} loads torch'\n"
    done = subprocess.run([sys.executable, "-c", code, *modules], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("file", "source", "expected"),
    [
        ("weft/plan/plan.py", "from weft.errors import PlanError", None),
        ("weft/plan/plan.py", "import weft.plan.text", None),
        ("weft/mesh.py", "import torch", None),
        ("weft/plan/plan.py", "import torchgen", None),
        ("weft/plan/check.py", "from weft.planning import cost", "planning is below plan"),
        ("weft/plan/check.py", "from ..mesh import Mesh", "mesh is below plan"),
        ("weft/plan/check.py", "from .. import mesh", "mesh is below plan"),
        ("weft/sync/base.py", "def f():\n    import weft.training.step", "training.step is below sync"),
        ("weft/sync/base.py", "import importlib\nimportlib.import_module('weft.cli')", "cli is below sync"),
        ("weft/planning/cost.py", "def f():\n    import torch.nn", "planning is above mesh"),
        ("weft/units.py", "from torch import nn", "units is above mesh"),
        ("weft/training/loop.py", "from weft import Plan", "from its room"),
        ("weft/plan/partition/zero.py", "from weft.plan.plan import Plan", None),
        ("weft/plan/plan.py", "from weft.plan.partition import zero", "plan.partition is below plan"),
        ("weft/parallel/zero/gather.py", "import weft.parallel.pipeline.stages", "parallel.pipeline is below"),
        ("weft/training/trainer.py", "from weft.training.run.loop import run", "training.run is below training"),
        ("weft/parallel/misc/one.py", "", "is not in the house"),
        ("weft/helpers.py", "", "room 'helpers' is not in the house"),
    ],
)
def test_the_reader_of_imports(file: str, source: str, expected: str | None) -> None:
    found = problems_in(file, source)
    assert len(found) == (expected is not None)
    assert all(problem.startswith(file) for problem in found)
    assert expected is None or expected in found[0]
