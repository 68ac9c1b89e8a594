"""A job file: the model, the data, the optimizer, the number of steps, and which plan runs it (docs/job-format.md).

This file reads the form only; `components.py` builds what the names stand for. All problems are reported at once.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar

from weft.errors import JobError, WeftError, nearest
from weft.plan.fields import Flag, Section, Whole, accept_values, declare, facts_of, statement, toml, toml_key
from weft.plan.plan import Plan
from weft.plan.text import parse_toml, read_plan, read_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a job: its name, and the settings it is built from."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    key: str = "name"
    """Key of the name in the file: "name", or "hf" for the path of a Hugging Face model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps(Section):
    """The length of a run, and when it saves and evaluates."""

    error: ClassVar[type[WeftError]] = JobError

    total: int = declare(400, Whole(minimum=1), "Steps of the whole run.")
    global_batch: int = declare(32, Whole(minimum=1), "Samples of one step, over all ranks.")
    seed: int = declare(0, Whole(minimum=0), "Decides the initial weights and the order of the data.")
    save_every: int = declare(100, Whole(minimum=0), "Steps between checkpoints; 0: only at the end.")
    keep: int = declare(3, Whole(minimum=1), "Checkpoints to keep; older ones are deleted.")
    evaluate_every: int = declare(0, Whole(minimum=0), "Steps between evaluations; 0: only at the end.")
    evaluate_batches: int = declare(16, Whole(minimum=1), "Global batches of held-out data to evaluate on.")
    evaluate_average: bool = declare(
        False,
        Flag(),
        "Evaluate the averaged weights, which the plan's [average] keeps, not the weights themselves.",
    )
    skip_at_most: int = declare(
        5, Whole(minimum=0), "Steps in a row that are skipped because loss or gradients are not finite."
    )
    roll_back_at_most: int = declare(
        2, Whole(minimum=0), "Times that a run goes back to its last good checkpoint after more of them; then it ends."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A run's description, apart from its directory."""

    model: Part
    loss: str
    dataset: Part
    optimizer: Part
    schedule: Part
    steps: Steps
    plan: Plan | None = None
    """The plan; None for all ranks along the data axis."""


_SECTIONS = ("model", "dataset", "optimizer", "steps")
EXCLUDE_ONE_DIM = "exclude_one_dim"
"""Key of [optimizer]: LARS and LAMB leave biases and norms alone."""
_SCHEDULE_SETTINGS = (
    *("warmup_steps", "final", "power", "decay_steps", "drops", "drop_factor", "batch_scaling", "base_batch"),
)
_TEXTS = {"model": ("name", "hf", "loss"), "dataset": ("name",), "optimizer": ("name", "schedule")}


def default_job() -> Job:
    """The default job, which is part of weft."""
    return parse_job((resources.files("weft.training") / "default.toml").read_text("utf-8"), source="the default job")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A job as far as it could be read: what is wrong with it, and which sections that leaves in doubt."""

    job: Job
    problems: tuple[str, ...] = ()
    doubtful: frozenset[str] = frozenset()
    """Sections with a problem, or "plan": defaults stand in their place, from which nothing follows."""


def read_job(path: str | os.PathLike[str]) -> Job:
    """The job in a file; a plan that it names is relative to that file."""
    return _require(examine_job(path))


def parse_job(text: str, *, source: str = "job", directory: Path | None = None) -> Job:
    """The job in a text; `source` names it in messages, and its plan is in `directory`."""
    return _require(_examine(text, source, directory or Path()))


def examine_job(path: str | os.PathLike[str]) -> Reading:
    """The job in a file, also one with problems, so that those of its model and plan can be found too."""
    return _examine(read_text(path, kind=JobError), os.fspath(path), Path(path).parent)


def _require(reading: Reading) -> Job:
    if reading.problems:
        raise JobError(reading.problems)
    return reading.job


def _examine(text: str, source: str, directory: Path) -> Reading:
    tables = parse_toml(text, source=source, kind=JobError)
    doubtful: set[str] = set()
    problems: list[str] = []
    for name, table in tables.items():
        if name not in (*_SECTIONS, "plan"):
            problems.append(f'"{name}" is not a part of a job; {nearest(name, (*_SECTIONS, "plan"))}')
        elif name != "plan" and not isinstance(table, dict):
            problems.append(f"{name} must be a section: write [{name}], and its settings on the lines below")
            doubtful.add(name)
    sections = {name: table if isinstance(table := tables.get(name, {}), dict) else {} for name in _SECTIONS}
    sections["steps"], wrong_steps = accept_values(Steps, sections["steps"])
    problems += wrong_steps
    doubtful |= {"steps"} if wrong_steps else set()
    for section, names in _TEXTS.items():
        wrong = {name: value for name in names if not isinstance(value := sections[section].get(name, ""), str)}
        problems += [f"{statement(section, *entry)} must be text, in quotes" for entry in wrong.items()]
        sections[section] = {name: value for name, value in sections[section].items() if name not in wrong}
        doubtful |= {section} if wrong else set()
    if {"name", "hf"} <= sections["model"].keys():
        problems.append("[model] has both a name and hf; a Hugging Face model needs no name, leave one of them out")
        doubtful.add("model")
    before = len(problems)
    plan = _plan_of(tables.get("plan"), directory, problems)
    doubtful |= {"plan"} if len(problems) > before else set()
    return Reading(
        job=_assemble(sections, plan, directory),
        problems=tuple(f"{source}: {problem}" for problem in problems),
        doubtful=frozenset(doubtful),
    )


def format_job(job: Job, *, plan: str) -> str:
    """A job as text that reads back as an equal job, with its plan in the file `plan`."""
    tables = {
        "model": {job.model.key: job.model.name, "loss": job.loss, **job.model.settings},
        "dataset": {"name": job.dataset.name, **job.dataset.settings},
        "optimizer": {
            "name": job.optimizer.name,
            **job.optimizer.settings,
            "schedule": job.schedule.name,
            **job.schedule.settings,
        },
        "steps": {name: getattr(job.steps, name) for name in facts_of(Steps)},
    }
    blocks = [f"plan = {toml(plan)}\n"]
    for name, table in tables.items():
        lines = (f"{toml_key(key)} = {toml(value)}" for key, value in table.items())
        blocks.append("\n".join([f"[{name}]", *lines]) + "\n")
    return "\n".join(blocks)


def _assemble(sections: dict[str, dict[str, Any]], plan: Plan | None, directory: Path) -> Job:
    model, dataset, optimizer = (dict(sections[name]) for name in ("model", "dataset", "optimizer"))
    schedule = {key: optimizer.pop(key) for key in _SCHEDULE_SETTINGS if key in optimizer}
    key, name = "name", model.pop("name", "gpt")
    if "hf" in model:
        # Absolute, because the job is written again, into the run's directory.
        key, name = "hf", str((directory / model.pop("hf")).resolve())
    return Job(
        loss=model.pop("loss", "cross-entropy"),
        model=Part(key=key, name=name, settings=model),
        dataset=Part(name=dataset.pop("name", "standard-library"), settings=dataset),
        schedule=Part(name=optimizer.pop("schedule", "constant"), settings=schedule),
        optimizer=Part(name=optimizer.pop("name", "adamw"), settings=optimizer),
        steps=Steps(**sections["steps"]),
        plan=plan,
    )


def _plan_of(value: object, directory: Path, problems: list[str]) -> Plan | None:
    if value == "auto":
        problems.append('plan = "auto" is not built yet; name a plan file, or leave it out for data parallelism')
    elif isinstance(value, str):
        try:
            return read_plan(directory / value)
        except WeftError as error:
            problems.extend(error.problems)
    elif value is not None:
        problems.append(f"plan = {toml(value)} must be the name of a plan file")
    return None
