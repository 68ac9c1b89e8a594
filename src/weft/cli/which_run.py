"""Which job `weft train` runs, and in which directory: a new run, one to resume, or by `--resume auto` either."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from weft.errors import JobError, PlanError
from weft.plan.text import read_plan
from weft.training.run.job import Job, Reading, default_job, examine_job
from weft.training.run.loop import JOB_FILE, read_run

AUTO = "auto"
RUNS = Path("runs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A job as it was read, with the plan and the number of steps asked for, and where it runs."""

    reading: Reading
    directory: Path
    resumes: bool

    @property
    def job(self) -> Job:
        return self.reading.job


def which_run(
    job_file: Path | None,
    *,
    output: Path | None,
    resume: str | None,
    plan_file: Path | None,
    steps: int | None,
    restarted: bool,
    joins: bool = False,
) -> Run:
    """`restarted`: a launcher started its ranks again, and goes on with the run that it began in `output`. `joins`: as
    one more worker, of a run that may have begun there."""
    if resume == AUTO:
        run = _begun_or_new(job_file, output, joins=joins)
    elif resume is not None:
        if job_file is not None or output is not None:
            raise JobError(
                "--resume DIR takes job and output directory from the run in DIR; leave JOB.toml and --output out"
            )
        run = Run(reading=Reading(job=read_run(resume)), directory=Path(resume), resumes=True)
    else:
        run = _new(job_file, output, restarted=restarted, joins=joins)
    if plan_file is not None:
        run = replace(run, reading=_with_plan(run.reading, plan_file))
    if steps is not None:
        run = replace(run, reading=replace(run.reading, job=_of_length(run.job, steps)))
    return run


def _new(job_file: Path | None, output: Path | None, *, restarted: bool, joins: bool) -> Run:
    if restarted and output is None:
        raise JobError(
            "the launcher started the ranks again, and only --output says in which directory the run began; give it "
            "from the first start"
        )
    directory = output or _next_free(RUNS)
    if (directory / JOB_FILE).exists() and not restarted and not joins:
        raise JobError(f"{directory} holds a run already; go on with --resume {directory}, or give another --output")
    return Run(reading=read_given_job(job_file), directory=directory, resumes=False)


def _begun_or_new(job_file: Path | None, output: Path | None, *, joins: bool) -> Run:
    """The run in `output`, or the newest of `runs/`, if there is one; else a new run. A job file that is given counts:
    it may ask for more steps, but not be another job."""
    directory = output or max(_numbered(RUNS), key=lambda path: int(path.name), default=None)
    if directory is None or not (directory / JOB_FILE).exists():
        return _new(job_file, output, restarted=False, joins=joins)
    begun = read_run(directory)
    if job_file is None:
        return Run(reading=Reading(job=begun), directory=directory, resumes=True)
    reading = read_given_job(job_file)
    if not reading.problems:
        differs = [name for name in ("model", "loss", "dataset") if getattr(begun, name) != getattr(reading.job, name)]
        if differs:
            raise JobError(
                f"--resume auto found a run in {directory}, whose {' and '.join(differs)} "
                f"{'differs' if len(differs) == 1 else 'differ'} from {job_file}; give the directory of the run with "
                "--output, or leave --resume out for a new one"
            )
    return Run(reading=reading, directory=directory, resumes=True)


def read_given_job(job_file: Path | None, plan_file: Path | None = None) -> Reading:
    """The job of a file, or the default one, under the plan of another file where one is given."""
    reading = Reading(job=default_job()) if job_file is None else examine_job(job_file)
    return reading if plan_file is None else _with_plan(reading, plan_file)


def _with_plan(reading: Reading, plan_file: Path) -> Reading:
    try:
        plan = read_plan(plan_file)
    except PlanError as error:
        problems = (*reading.problems, *error.problems)
        return replace(reading, problems=problems, doubtful=reading.doubtful | {"plan"})
    return replace(reading, job=replace(reading.job, plan=plan))


def _of_length(job: Job, num_steps: int) -> Job:
    """The job with another number of steps; a warm-up or decay longer than that is cut to a tenth."""
    schedule = job.schedule
    for name, least in (("warmup_steps", 0), ("decay_steps", 1)):
        if schedule.settings.get(name, 0) >= num_steps:
            schedule = replace(schedule, settings={**schedule.settings, name: max(num_steps // 10, least)})
    return replace(job, schedule=schedule, steps=replace(job.steps, total=num_steps))


def _numbered(parent: Path) -> list[Path]:
    return [path for path in parent.glob("[0-9]*") if path.name.isdigit()]


def _next_free(parent: Path) -> Path:
    """runs/0001, runs/0002, ..."""
    return parent / f"{max((int(path.name) for path in _numbered(parent)), default=0) + 1:04d}"
