"""Job files: what they say is built, what is wrong with them is said all at once, and what is written reads back."""

from __future__ import annotations

import math
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from weft.errors import JobError, WeftError
from weft.optim.exclude_one_dim import exclude_one_dim
from weft.optim.lamb import LAMB
from weft.optim.lars import LARS
from weft.plan.check import check
from weft.plan.fields import toml
from weft.plan.plan import Axes, Plan
from weft.plan.text import write_plan
from weft.training.run.components import context_of, prepare
from weft.training.run.job import Job, Part, Steps, default_job, format_job, parse_job, read_job
from weft.training.run.loop import read_run

EXAMPLES = Path(__file__).parents[2] / "examples" / "jobs"

SMALL = """
[model]
num_layers = 1
hidden = 16
heads = 2
context = 8
[dataset]
name = "text"
files = "corpus.txt"
held_out = 0.5
[steps]
global_batch = 4
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place with 1000 bytes of text, which is the current one."""
    (tmp_path / "corpus.txt").write_text("weft " * 200)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def problems_of(text: str) -> str:
    """The message of the one error that parsing and preparing this job raise."""
    with pytest.raises(WeftError) as caught:
        prepare(parse_job(text))
    return str(caught.value)


def small_with(setting: str) -> str:
    """The small job with one more, or another, setting: "section.name = value"."""
    tables = tomllib.loads(SMALL)
    for section, settings in tomllib.loads(setting).items():
        tables[section] = tables.get(section, {}) | settings
    return "\n".join(
        line
        for section, settings in tables.items()
        for line in (f"[{section}]", *(f"{name} = {toml(value)}" for name, value in settings.items()))
    )


def test_the_default_job_is_whole() -> None:
    job = default_job()
    assert (job.model.name, job.dataset.name, job.optimizer.name) == ("gpt", "standard-library", "adamw")
    assert job.schedule == Part(name="warmup-cosine", settings={"warmup_steps": 30})
    assert job.plan is None and job.loss == "cross-entropy"
    assert prepare(job).writes_text


def test_an_empty_job_is_a_job() -> None:
    job = parse_job("")
    assert job == Job(
        model=Part(name="gpt"),
        loss="cross-entropy",
        dataset=Part(name="standard-library"),
        optimizer=Part(name="adamw"),
        schedule=Part(name="constant"),
        steps=Steps(),
    )


ODD_SETTINGS: dict[str, Any] = {
    "text": 'quotes " and \\ and \x7f and\ttab and é and \U0001f9f5',
    "number": 1e-300,
    "huge": 1e16,
    "endless": math.inf,
    "whole": -(2**63),
    "flag": True,
    "empty": [],
    "list": [1, "two", [3.0, False]],
    "a key with spaces.and dots": 1,
    "": "no key at all",
    "table": {"inner": {"deep key": [1, 2], "x": 0.1}, "none": {}},
}


def test_what_is_written_reads_back(tmp_path: Path) -> None:
    write_plan(Plan(axes=Axes(data=2)), tmp_path / "plan.toml")
    odd = Job(
        model=Part(name="my.module:make", settings=ODD_SETTINGS),
        loss="my.module:loss",
        dataset=Part(name="text", settings={"files": ["a.txt", "ü/**/*.txt"], "context": 5}),
        optimizer=Part(name="sgd", settings={"lr": 0.1, "nesterov": True}),
        schedule=Part(name="warmup-linear", settings={"warmup_steps": 3, "final": 0.0}),
        steps=Steps(total=7, seed=12),
        plan=Plan(axes=Axes(data=2)),
    )
    for job in (odd, replace(default_job(), plan=Plan(axes=Axes(data=2)))):
        text = format_job(job, plan="plan.toml")
        assert parse_job(text, directory=tmp_path) == job
        assert format_job(parse_job(text, directory=tmp_path), plan="plan.toml") == text


def test_dates_read_back(tmp_path: Path) -> None:
    write_plan(Plan(), tmp_path / "plan.toml")
    text = "[model]\nwhen = 1979-05-27T07:32:00Z\nday = 1979-05-27\nhour = 07:32:00.5\n"
    job = replace(parse_job(text), plan=Plan())
    assert parse_job(format_job(job, plan="plan.toml"), directory=tmp_path) == job


def test_a_plan_is_found_beside_its_job(tmp_path: Path) -> None:
    (tmp_path / "plans").mkdir()
    write_plan(Plan(axes=Axes(data=3)), tmp_path / "plans" / "three.toml")
    (tmp_path / "job.toml").write_bytes(b'\xef\xbb\xbfplan = "plans/three.toml"\n')  # with a byte order mark
    assert read_job(tmp_path / "job.toml").plan == Plan(axes=Axes(data=3))


def test_a_run_directory_names_its_job(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="holds no run: there is no job.toml"):
        read_run(tmp_path)
    write_plan(Plan(axes=Axes(data=2)), tmp_path / "plan.toml")
    (tmp_path / "job.toml").write_text(format_job(default_job(), plan="plan.toml"))
    assert read_run(tmp_path) == replace(default_job(), plan=Plan(axes=Axes(data=2)))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[model", ["is not valid TOML"]),
        ("[steps]\ntotal = " + "9" * 5000, ["is not valid TOML"]),
        ("[modle]", ['"modle" is not a part of a job', 'did you mean "model"?']),
        ("model = 3", ["model must be a section: write [model]"]),
        ("[[steps]]", ["steps must be a section"]),
        ("[steps]\ntotl = 3", ["[steps] totl = 3 is not a field of [steps]", 'did you mean "total"?']),
        ("[steps]\ntotal = 0", ["[steps] total = 0 must be a whole number, at least 1"]),
        ("[steps]\nglobal_batch = 2.5", ["[steps] global_batch = 2.5 must be a whole number"]),
        ("[steps]\nseed = true", ["[steps] seed = true must be a whole number"]),
        ("[model]\nname = 3", ["[model] name = 3 must be text"]),
        ("[model]\nloss = 3", ["[model] loss = 3 must be text"]),
        ("[dataset]\nname = []", ["[dataset] name = [] must be text"]),
        ("[optimizer]\nname = {}\nschedule = 1", ["[optimizer] name = {} must be text", "schedule = 1 must be text"]),
        ('plan = "auto"', ['plan = "auto" is not built yet']),
        ("plan = 3", ["plan = 3 must be the name of a plan file"]),
        ('plan = "nowhere.toml"', ["nowhere.toml: cannot be read: No such file"]),
        ('plan = ""', ["cannot be read: Is a directory"]),
    ],
)
def test_bad_form(folder: Path, text: str, words: list[str]) -> None:
    message = problems_of(text)
    assert [word for word in words if word not in message] == [], message


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("model.name = 'gtp'", ['name = "gtp" is not known', 'did you mean "gpt"?', "or module:function"]),
        ("model.layers = 2", ['[model] takes no setting "layers"', 'did you mean "num_layers"?']),
        ("model.hidden = 'big'", ["hidden is 'big'; it must be a whole number"]),
        ("model.heads = 3", ["heads 3 do not divide hidden 16"]),
        ("model.tied = 'no'", ["tied is 'no'; it must be true or false"]),
        ("model.vocab_size = 'many'", ["vocab_size is 'many'"]),
        ("model.vocab_size = 100", ["holds token 119", "vocab_size = 100 knows 0 to 99", "use vocab_size = 120"]),
        ("model.context = '8'", ["context is '8'; it must be a whole number"]),
        ("model.context = 0", ["context is 0"]),
        ("model.name = 'nowhere:make'", ['there is no module "nowhere"']),
        ("model.name = 'math:sinn'", ['has no function "sinn"', 'did you mean "sin"?']),
        ("model.loss = 'cross-entrop'", ['unknown loss "cross-entrop"', 'did you mean "cross-entropy"?']),
        ("dataset.name = 'texts'", ['[dataset] name = "texts" is not known', 'did you mean "text"?']),
        ("dataset.files = 'nothing.txt'", ['no file matches "nothing.txt"']),
        ("dataset.files = 3", ["[dataset] files = 3 must be a list of file names"]),
        ("dataset.files = [3, 4]", ["[dataset] files = [3, 4] must be a list of file names"]),
        ("dataset.held_out = 'some'", ['[dataset] held_out = "some" must be a number']),
        ("dataset.held_out = 1.5", ["held-out fraction is 1.5"]),
        ("dataset.context = 16", ["[dataset] context = 16 is longer than [model] context = 8"]),
        ("dataset.context = 2.0", ["2.0 tokens of context; give a whole number"]),
        ("dataset.shuffle = true", ['[dataset] takes no setting "shuffle"']),
        ("optimizer.name = 'adam-w'", ['name = "adam-w" is not known', 'did you mean "adamw"?']),
        ("optimizer.lr = 'fast'", ["[optimizer] AdamW:"]),
        ("optimizer.lr = -1.0", ["[optimizer] AdamW: Invalid learning rate: -1.0"]),
        ("optimizer.betas = []", ["[optimizer] AdamW:"]),
        ("optimizer.momentum = 0.9", ['[optimizer] takes no setting "momentum"']),
        ("optimizer.schedule = 'warmup-cosin'", ['no learning-rate schedule "warmup-cosin"', '"warmup-cosine"?']),
        ("optimizer.warmup_steps = 3", ['schedule "constant" takes no setting "warmup_steps"; it takes none']),
        ("optimizer.name = 'lars'\noptimizer.variant = '2017'", ['[optimizer] LARS has no variant "2017"; known:']),
        ("optimizer.name = 'lamb'\noptimizer.lr = -1.0\noptimizer.eps = 'x'", ["LAMB: lr is -1.0", "LAMB: eps is 'x'"]),
        ("optimizer.name = 'lamb'\noptimizer.exclude_one_dim = 1", ["exclude_one_dim = 1 must be true or false"]),
        ("optimizer.exclude_one_dim = true", ['[optimizer] takes no setting "exclude_one_dim"']),
        ("optimizer.batch_scaling = 'linear'", ['batch_scaling = "linear" needs base_batch']),
        ("optimizer.base_batch = 32", ["base_batch = 32 has no effect without batch_scaling"]),
        (
            "optimizer.batch_scaling = 'squared'\noptimizer.base_batch = 0",
            ["[optimizer] batch_scaling is 'squared'; did you mean \"sqrt\"?", "[optimizer] base_batch is 0"],
        ),
        ("optimizer.schedule = 'warmup-step'", ['schedule "warmup-step" needs the setting "drops"']),
        ("optimizer.schedule = 'warmup-linear'\noptimizer.power = 2", ['"warmup-linear" takes no setting "power"']),
        ("steps.global_batch = 1000", ["training data holds 62 samples, one global batch needs 1000"]),
    ],
)
def test_bad_values(folder: Path, setting: str, words: list[str]) -> None:
    message = problems_of(small_with(setting))
    assert [word for word in words if word not in message] == [], message


def test_lars_and_lamb_leave_biases_and_norms_alone_unless_told(folder: Path) -> None:
    for name, kind in (("lars", LARS), ("lamb", LAMB)):
        prepared = prepare(parse_job(small_with(f"optimizer.name = '{name}'\noptimizer.weight_decay = 0.1")))
        assert prepared.groups is exclude_one_dim
        (group,) = prepared.optimizer([torch.nn.Parameter(torch.ones(2))]).param_groups
        assert (
            isinstance(prepared.optimizer([torch.nn.Parameter(torch.ones(2))]), kind) and group["weight_decay"] == 0.1
        )
        all_alike = prepare(parse_job(small_with(f"optimizer.name = '{name}'\noptimizer.exclude_one_dim = false")))
        assert all_alike.groups is None
    assert prepare(parse_job(small_with("optimizer.lr = 0.1"))).groups is None


def test_batch_scaling_and_schedules_of_a_job(folder: Path) -> None:
    text = small_with(
        "optimizer.schedule = 'warmup-stable-decay'\noptimizer.decay_steps = 1\noptimizer.batch_scaling = 'sqrt'\n"
        "optimizer.base_batch = 1\nsteps.global_batch = 4\nsteps.total = 3"
    )
    job = parse_job(text)
    assert [prepare(job).schedule(step) for step in range(3)] == [2.0, 2.0, 0.0]
    again = parse_job(format_job(replace(job, plan=None), plan="plan.toml").partition("\n")[2])
    assert (again.optimizer, again.schedule) == (job.optimizer, job.schedule)


def test_all_problems_of_the_form_at_once(folder: Path) -> None:
    (folder / "plan.toml").write_text("[axes]\ndata = 0\nfoo = 1\n[codec]\nname = 'top'\n")
    message = problems_of('plan = "plan.toml"\nextra = 1\n[steps]\ntotal = 0\nkep = 1\n[model]\nname = 1\n')
    for word in ('"extra"', "total = 0", "kep = 1", "[model] name", "data = 0", "foo = 1", '"top"'):
        assert word in message
    assert message.count("\n- ") == 6


def test_all_problems_of_the_parts_at_once(folder: Path) -> None:
    text = (
        "[model]\nhidden = 0\nfoo = 1\n[dataset]\nname = 'text'\nfiles = 'none'\n"
        "[optimizer]\nlr = -1.0\nschedule = 'warmup-cosine'\nwarmup_steps = 500\n"
    )
    with pytest.raises(JobError) as caught:
        prepare(parse_job(text), besides=["the plan is bad too"])
    message = str(caught.value)
    for word in ("the plan is bad too", '"foo"', '"none"', "learning rate: -1.0", "warmup_steps 500"):
        assert word in message
    # the model's sizes are looked at once its names are right
    assert "hidden is 0" in problems_of(text.replace("foo = 1\n", ""))


@pytest.mark.parametrize("content", [None, b"\xff\xfe[model]"])
def test_unreadable_files(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "job.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(JobError, match="No such file" if content is None else "byte 0 is not UTF-8"):
        read_job(path)
    with pytest.raises(JobError, match="Is a directory"):
        read_job(tmp_path)


def test_user_functions_are_called_with_the_settings(folder: Path) -> None:
    (folder / "mine_for_test_job.py").write_text(
        "import torch\n"
        "def model(*, width): return torch.nn.Linear(width, 2)\n"
        "def data(*, size): return [(torch.zeros(3), torch.tensor(0))] * size\n"
        "def optimizer(parameters, *, speed): return torch.optim.SGD(parameters, lr=speed)\n"
        "def fails(): raise KeyError('mine')\n"
    )
    text = (
        "[model]\nname = 'mine_for_test_job:model'\nwidth = 3\n[dataset]\nname = 'mine_for_test_job:data'\nsize = 40\n"
        "[optimizer]\nname = 'mine_for_test_job:optimizer'\nspeed = 0.5\n"
    )
    prepared = prepare(parse_job(text))
    assert len(prepared.train_data) == 40 and prepared.held_out is None and not prepared.writes_text
    model = prepared.make_model()
    assert prepared.optimizer(model.parameters()).param_groups[0]["lr"] == 0.5
    assert '"mine_for_test_job:data" needs the setting "size"' in problems_of(text.replace("size = 40", ""))
    with pytest.raises(KeyError, match="mine"):  # not a mistake in the job: it keeps its type and traceback
        prepare(parse_job("[dataset]\nname = 'mine_for_test_job:fails'"))


def test_no_sample_of_text_from_a_small_vocabulary(folder: Path) -> None:
    (folder / "corpus.txt").write_bytes(bytes([1, 2, 3]) * 300)
    assert not prepare(parse_job(SMALL.replace("[model]", "[model]\nvocab_size = 4"))).writes_text
    assert prepare(parse_job(SMALL)).writes_text


def test_the_context_is_the_datasets_before_the_models(folder: Path) -> None:
    job = parse_job(SMALL)
    assert context_of(job) == 8
    assert context_of(replace(job, dataset=Part(name="text", settings={"context": 4}))) == 4
    assert context_of(parse_job("")) == 256


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.name)
def test_every_example_can_be_prepared(path: Path) -> None:
    job = read_job(path)
    prepared = prepare(job, besides=check(job.plan or Plan(), global_batch=job.steps.global_batch))
    assert len(prepared.train_data) >= job.steps.global_batch
