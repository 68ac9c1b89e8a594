"""Which Hugging Face families equal one process under which plans: one verification per family and plan, as a table.

    python benchmarks/hugging_face_families.py run AFTER.json                         # this tree
    python benchmarks/hugging_face_families.py run BEFORE.json --before REVISION      # another revision's weft
    python benchmarks/hugging_face_families.py table AFTER.json [--before BEFORE.json] [--into docs/hugging-face.md]

    --families NAME ...   --plans NAME ...   --again OUTCOME ...   --limit-s 120

Every cell is `weft.verify` of a tiny model (`hugging_face_models.py`) on two CPU ranks of one thread, and ends as

    equal        every loss, gradient and weight of two steps, to 1e-10 (or to the bound that `verify` states)
    refused      by all ranks alike, with weft's reason
    not equal    what `verify` says
    error        any other exception, or an outcome on which the ranks do not agree
    hung         no outcome after `--limit-s` seconds

A run goes on where its file ends; `--again error hung` repeats the cells that ended so. The models are those of this
file's folder on both sides. `--before` unpacks the revision's `src` and puts it on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any

from hugging_face_models import FAMILIES

ROOT = Path(__file__).parents[1]
NUM_RANKS = 2
GRACE_S = 20.0
"""How long after the first rank's outcome the others may take to report theirs."""
_LINGER_S = 5.0
"""How long a rank stays after its outcome: others may not have joined yet, and rank 0 has the store."""
EQUAL, REFUSED, DIFFERS, ERROR, HUNG = "equal", "refused", "not equal", "error", "hung"
PLANS: dict[str, dict[str, dict[str, Any]]] = {
    "data": {"axes": {"data": 2}},
    "ZeRO-1": {"axes": {"data": 2}, "data": {"shard": "optimizer"}},
    "ZeRO-3": {"axes": {"data": 2}, "data": {"shard": "parameters"}},
    "tensor": {"axes": {"tensor": 2}},
    "tensor, split tokens": {"axes": {"tensor": 2}, "tensor": {"sequence": True}},
    "pipeline": {"axes": {"pipeline": 2}, "step": {"microbatches": 2}, "pipeline": {"schedule": "1f1b", "cuts": (2,)}},
    "ring": {"axes": {"ring": 2}},
    "Ulysses": {"axes": {"ulysses": 2}},
}
"""Sections of each plan."""
_PRELOADED = ("torch", "transformers", "weft.training.run.loop", "weft.verification.verify", "hugging_face_models")
_MOST_WORDS = 40
"""Words of a reason that the table shows."""
_BEGIN, _END = "<!-- made by benchmarks/hugging_face_families.py -->", "<!-- end of what is made -->"

Cell = dict[str, str]
"""`outcome`, and its `reason`."""


# --- one cell ---------------------------------------------------------------------------------------------------------


def verify_on_rank(pipe: connection.Connection, rank: int, port: int, family: str, plan: str) -> None:
    """The main function of a rank: verifies, and sends (outcome, reason)."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(NUM_RANKS), LOCAL_WORLD_SIZE=str(NUM_RANKS),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="",
    )  # fmt: skip
    os.setsid()  # what it starts ends with it
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    try:
        outcome = _verify(family, plan)
    except BaseException as error:
        outcome = _outcome_of(error)
    pipe.send(outcome)
    pipe.close()
    time.sleep(_LINGER_S)
    os.kill(os.getpid(), signal.SIGKILL)  # an exchange that failed may wait for ever at the end of the process


def _verify(family_name: str, plan_name: str) -> tuple[str, str]:
    import torch
    import transformers

    import weft
    from weft.plan.plan import Plan
    from weft.world import join_world

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    join_world()
    fields = {field: Plan.__dataclass_fields__[field].default_factory for field in PLANS[plan_name]}
    plan = Plan(**{field: type(make())(**PLANS[plan_name][field]) for field, make in fields.items()})  # type: ignore[arg-type, misc, operator]
    family = FAMILIES[family_name]
    found = weft.verify(
        family.build(),
        plan,
        loss=family.loss,
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-3),
        batches=family.batches(),
        device="cpu",
    )
    return (EQUAL, "") if found.ok else (DIFFERS, str(found.first))


def _outcome_of(error: BaseException) -> tuple[str, str]:
    from weft.errors import DataError, ModelError, PlanError

    if isinstance(error, ModelError | PlanError | DataError):
        return REFUSED, "; ".join(error.problems)
    return ERROR, f"{type(error).__name__}: {error}"


def verify_cell(family: str, plan: str, limit_s: float) -> Cell:
    """Verify on ranks of their own, and end them."""
    context = multiprocessing.get_context("forkserver")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pipes, processes = [], []
    for rank in range(NUM_RANKS):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=verify_on_rank, args=(theirs, rank, port, family, plan))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        return _joined(_collect(pipes, limit_s), limit_s)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _collect(pipes: Sequence[Any], limit_s: float) -> dict[int, tuple[str, str]]:
    found: dict[int, tuple[str, str]] = {}
    deadline = time.monotonic() + limit_s
    while len(found) < len(pipes):
        waiting = {id(pipe): rank for rank, pipe in enumerate(pipes) if rank not in found}
        ready = connection.wait([pipes[rank] for rank in waiting.values()], max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            try:
                found[waiting[id(pipe)]] = pipe.recv()  # type: ignore[union-attr]
            except EOFError:
                found[waiting[id(pipe)]] = ERROR, "the rank's process ended without a word"
        deadline = min(deadline, time.monotonic() + GRACE_S)
    return found


def _joined(found: Mapping[int, tuple[str, str]], limit_s: float) -> Cell:
    """The outcome of all ranks: one that they agree on, or an error that names the rank."""
    if not found:
        return {"outcome": HUNG, "reason": f"no outcome after {limit_s:.0f} s"}
    outcomes, reasons = ({one[place] for one in found.values()} for place in range(2))
    if len(found) == NUM_RANKS and len(outcomes) == 1 and (outcomes != {ERROR} or len(reasons) == 1):
        outcome, reason = found[0]
        return {"outcome": outcome, "reason": reason}
    said = [f"rank {rank}: {outcome} {reason}".rstrip() for rank, (outcome, reason) in sorted(found.items())]
    said += [f"rank {rank}: nothing" for rank in range(NUM_RANKS) if rank not in found]
    return {"outcome": ERROR, "reason": "; ".join(said)}


# --- a run ------------------------------------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> None:
    """Verify all cells that the file does not have yet."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    file: Path = args.file
    stored = json.loads(file.read_text()) if file.exists() else {"cells": {}}
    stored |= {**_versions(), "revision": args.revision}
    cells: dict[str, dict[str, Cell]] = stored["cells"]
    modeling = {FAMILIES[family].model_class.__module__ for family in args.families}  # imported once, not per rank
    multiprocessing.get_context("forkserver").set_forkserver_preload([*_PRELOADED, *sorted(modeling)])
    forkserver.ensure_running()
    chosen = [(family, plan) for family in args.families for plan in args.plans]
    columns = (MofNCompleteColumn(), BarColumn(), TimeRemainingColumn(compact=True), TextColumn("{task.description}"))
    with Progress(*columns) as bar:
        task = bar.add_task("", total=len(chosen))
        for family, plan in chosen:
            known = cells.setdefault(family, {}).get(plan)
            if known is None or known["outcome"] in args.again:
                bar.update(task, description=f"{family}, {plan}")
                cells[family][plan] = verify_cell(family, plan, args.limit_s)
                _write(file, json.dumps(stored, indent=1) + "\n")
            bar.advance(task)
    counts = [cell["outcome"] for row in cells.values() for cell in row.values()]
    print(", ".join(f"{counts.count(one)} {one}" for one in (EQUAL, REFUSED, DIFFERS, ERROR, HUNG)))


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {"date": datetime.date.today().isoformat(), **{name: version(name) for name in ("torch", "transformers")}}


def _write(file: Path, text: str) -> None:
    """Never half a file: a run may be ended at any moment."""
    beside = file.with_suffix(".new")
    beside.write_text(text)
    beside.replace(file)


def run_before(args: argparse.Namespace) -> None:
    """The same command with another revision's weft."""
    with tempfile.TemporaryDirectory() as folder:
        packed = subprocess.run(["git", "archive", args.before, "src"], cwd=ROOT, check=True, capture_output=True)
        subprocess.run(["tar", "-x", "-C", folder], input=packed.stdout, check=True)
        options = ["--families", *args.families, "--plans", *args.plans, "--limit-s", str(args.limit_s)]
        options += ["--again", *args.again, "--revision", args.before]
        paths = f"{folder}/src{os.pathsep}{Path(__file__).parent}"
        command = [sys.executable, __file__, "run", str(args.file), *options]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": paths})


# --- the table --------------------------------------------------------------------------------------------------------


class Notes:
    """Reasons by number; reasons that differ in names and numbers only are one."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self.texts: list[str] = []

    def number(self, cell: Cell) -> int:
        text = " ".join(cell["reason"].split())
        key = re.sub(r"\b\w*[A-Z]\w*[a-z]\w*\b|\d[\d.e+-]*|\"[^\"]*\"", "_", f"{cell['outcome']} {text}")[:200]
        if key not in self._numbers:
            words = text.split()
            shown = " ".join(words[:_MOST_WORDS]) + (" …" if len(words) > _MOST_WORDS else "")
            self.texts.append(f"*{cell['outcome']}*: {shown}".replace("|", "\\|").replace("<", "&lt;"))
            self._numbers[key] = len(self.texts)
        return self._numbers[key]


def make_table(after: dict[str, Any], before: dict[str, Any] | None) -> str:
    """Markdown: one row per family, one column per plan, and the reasons below."""
    notes = Notes()

    def said(cell: Cell | None) -> str:
        if cell is None:
            return "–"
        return cell["outcome"] if cell["outcome"] == EQUAL else f"{cell['outcome']} ({notes.number(cell)})"

    def change(family: str, plan: str) -> str:
        found = after["cells"].get(family, {}).get(plan)
        known = found if before is None else before["cells"].get(family, {}).get(plan)
        is_same = (known and known["outcome"]) == (found and found["outcome"])
        return said(found) if is_same else f"{said(known)} → **{said(found)}**"

    rows = [f"| {family} | " + " | ".join(change(family, plan) for plan in PLANS) + " |" for family in FAMILIES]
    both = [("after", after)] if before is None else [("before", before), ("after", after)]
    counts = [
        f"{name} ({run['revision']}): " + ", ".join(
            f"{sum(cell['outcome'] == one for row in run['cells'].values() for cell in row.values())} {one}"
            for one in (EQUAL, REFUSED, DIFFERS, ERROR, HUNG)
        )
        for name, run in both
    ]  # fmt: skip
    versions = f"{after['date']}, transformers {after['transformers']}, torch {after['torch']}"
    return "\n".join(
        [
            "; ".join([versions, *counts]) + ".",
            "",
            "| | " + " | ".join(PLANS) + " |",
            "|---" * (len(PLANS) + 1) + "|",
            *rows,
            "",
            *(f"{number}. {text}" for number, text in enumerate(notes.texts, start=1)),
        ]
    )


def write_table(args: argparse.Namespace) -> None:
    before = None if args.before is None else json.loads(Path(args.before).read_text())
    table = make_table(json.loads(args.file.read_text()), before)
    if args.into is None:
        print(table)
        return
    page = args.into.read_text()
    first, last = page.index(_BEGIN) + len(_BEGIN), page.index(_END)
    args.into.write_text(f"{page[:first]}\n\n{table}\n\n{page[last:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("run", "table"))
    parser.add_argument("file", type=Path, help="JSON of the outcomes; a run goes on with it")
    parser.add_argument("--before", help="run: a revision of weft to verify instead; table: its outcomes")
    parser.add_argument("--into", type=Path, help="a page with the two comments that the table goes between")
    parser.add_argument("--families", nargs="+", choices=list(FAMILIES), default=list(FAMILIES), metavar="NAME")
    parser.add_argument("--plans", nargs="+", choices=list(PLANS), default=list(PLANS), metavar="NAME")
    parser.add_argument("--again", nargs="*", default=[], metavar="OUTCOME", help="repeat cells that ended so")
    parser.add_argument("--limit-s", type=float, default=120.0)
    parser.add_argument("--revision", default="this tree", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.what == "table":
        write_table(args)
    elif args.before is not None:
        run_before(args)
    else:
        run(args)


if __name__ == "__main__":
    main()
