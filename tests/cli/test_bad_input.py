"""Bad input at the command line: exit code 2, one message, printed once, no traceback, and nothing left on the disk.

What can be known without ranks is refused before any is started; the last part is what only ranks can know.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from command import Outcome, Workspace, finish, start_torchrun

from weft.checkpoint.folders import all_checkpoints

RunHere = Callable[..., Outcome]
Reference = tuple[Path, Outcome]


class Refusal:
    """Runs a command that must be refused, in this process, and looks at everything it may and may not do."""

    def __init__(self, run_here: RunHere, folder: Path) -> None:
        self._run = run_here
        self.folder = folder

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_text(text)
        return path

    def job_with(self, workspace: Workspace, plan: str) -> Path:
        """The tiny job under a plan."""
        self.write("plan.toml", plan)
        return self.write("job.toml", f'plan = "plan.toml"\n{workspace.job.read_text()}')

    def __call__(self, *arguments: str | Path, words: tuple[str, ...]) -> str:
        before = sorted(self.folder.rglob("*"))
        outcome = self._run(*arguments)
        assert outcome.code == 2, outcome
        assert outcome.stdout == ""
        message = outcome.stderr
        assert message.startswith("weft:") and message.count("weft:") == 1, message
        assert "Traceback" not in message and ".py" not in message, message
        for word in words:
            assert message.count(word) == 1, f"{word!r} is not once in:\n{message}"
        assert sorted(self.folder.rglob("*")) == before, "something was left on the disk"
        return message


@pytest.fixture
def refuse(run_here: RunHere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Refusal:
    monkeypatch.chdir(tmp_path)
    return Refusal(run_here, tmp_path)


def test_axes_that_do_not_multiply_to_the_ranks(refuse: Refusal, workspace: Workspace) -> None:
    job = refuse.job_with(workspace, "[axes]\ndata = 2\n")
    refuse("train", job, "--ranks", 3, words=("data 2 = 2 ranks, 3 are running", "set [axes] data = 3, or start 2"))


def test_unknown_names_and_values_in_a_plan(refuse: Refusal, workspace: Workspace) -> None:
    plan = '[axes]\ndatta = 2\n[data]\nsync = "alreduce"\n[comms]\nx = 1\n[step]\nmicrobatches = 0\n'
    job = refuse.job_with(workspace, plan)
    words = ('did you mean "data"?', 'did you mean "all-reduce"?', 'did you mean "comm"?', "microbatches = 0")
    refuse("train", job, words=words)
    refuse("verify", job, words=words)
    refuse("verify", workspace.job, "--plan", refuse.folder / "plan.toml", words=words)


def test_servers_with_what_they_do_not_combine_with(refuse: Refusal, workspace: Workspace) -> None:
    job = refuse.job_with(workspace, '[axes]\ndata = 2\n[data]\nsync = "server"\nshard = "optimizer"\n')
    for command in ("train", "verify"):
        refuse(command, job, words=('[data] sync = "server"', 'shard = "optimizer"'))


def test_unknown_names_and_values_in_a_job(refuse: Refusal) -> None:
    job = refuse.write("job.toml", '[steps]\ntotall = 3\n[optimiser]\nlr = 1\n[model]\nname = "gpt"\n')
    refuse("train", job, words=('did you mean "total"?', 'did you mean "optimizer"?'))
    job = refuse.write("job.toml", '[model]\nname = "gpd"\n[dataset]\nname = "txt"\n[optimizer]\nname = "adamx"\n')
    words = ('did you mean "gpt"?', 'did you mean "text"?', 'name = "adamx" is not known; did you mean')
    refuse("train", job, words=words)
    refuse("verify", job, words=words)


def test_problems_of_plan_and_job_come_together(refuse: Refusal, workspace: Workspace) -> None:
    job = refuse.job_with(workspace, "[axes]\ndata = 16\n[data]\nevery = 2\n")
    job.write_text(job.read_text().replace("heads = 2", "heads = 3").replace("corpus.txt", "corpse.txt"))
    words = (
        "data 16 = 16 ranks, 2 are running",
        '[data] every = 2 has no effect with [data] sync = "all-reduce"',
        "a global batch of 8 is smaller than the 16 data ranks",
        "heads 3 do not divide hidden 32",
        "no file matches",
    )
    message = refuse("train", job, "--ranks", 2, words=words)
    assert message.count("\n- ") == len(words)


@pytest.mark.parametrize("command", ["train", "verify"])
def test_files_that_cannot_be_read(refuse: Refusal, command: str) -> None:
    refuse(command, refuse.folder / "nowhere.toml", words=("nowhere.toml: cannot be read: No such file",))
    refuse(command, refuse.folder, words=("cannot be read: Is a directory",))
    (refuse.folder / "bytes.toml").write_bytes(b"\x80\x81")
    refuse(command, refuse.folder / "bytes.toml", words=("byte 0 is not UTF-8",))
    job = refuse.write("job.toml", 'plan = "missing.toml"\n')
    refuse(command, job, words=("missing.toml: cannot be read",))
    job = refuse.write("job.toml", '[dataset]\nname = "tokens"\nfile = "missing.bin"\n')
    refuse(command, job, words=("there is no token file missing.bin",))


def test_a_file_without_permission(refuse: Refusal, monkeypatch: pytest.MonkeyPatch) -> None:
    job = refuse.write("job.toml", "")

    def read_bytes(path: Path) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", read_bytes)  # the user who runs the tests may be allowed everything
    refuse("train", job, words=("job.toml: cannot be read: Permission denied",))


def test_too_little_data_for_one_batch(refuse: Refusal, workspace: Workspace) -> None:
    corpus = refuse.write("small.txt", "weft " * 60)
    text = workspace.job.read_text().replace(str(workspace.folder / "corpus.txt"), str(corpus))
    job = refuse.write("job.toml", text.replace("global_batch = 8", "global_batch = 100"))
    refuse("train", job, words=("the training data holds 16 samples, one global batch needs 100",))
    corpus.write_text("weft")
    refuse("train", job, words=("the training part has", "the held-out part has"))


@pytest.mark.long
def test_directories_that_are_in_the_way(refuse: Refusal, workspace: Workspace, reference: Reference) -> None:
    directory, _ = reference
    message = refuse("train", workspace.job, "--output", directory, words=("holds a run already",))
    assert f"go on with --resume {directory}, or give another --output" in message
    refuse("train", "--resume", refuse.folder, words=("holds no run: there is no job.toml in it",))
    refuse("train", "--resume", refuse.folder / "nowhere", words=("holds no run",))
    refuse(
        "train",
        workspace.job,
        "--resume",
        directory,
        words=("--resume DIR takes job and output directory from the run in DIR",),
    )


def test_a_run_whose_files_are_damaged(refuse: Refusal, reference: Reference) -> None:
    directory = refuse.folder / "run"
    shutil.copytree(reference[0], directory)
    (directory / "plan.toml").unlink()
    refuse("train", "--resume", directory, words=("plan.toml: cannot be read: No such file",))
    (directory / "job.toml").write_text("[steps")
    refuse("train", "--resume", directory, words=("job.toml: is not valid TOML",))


def test_problems_of_a_jobs_form_do_not_hide_those_of_its_parts(refuse: Refusal) -> None:
    refuse.write("plan.toml", "[axes]\ndatta = 2\n")
    text = '[steps]\ntotal = "x"\n[model]\nname = "gpd"\n[dataset]\nname = 3\n[optimizer]\nname = "adamx"\n'
    job = refuse.write("job.toml", f'plan = "plan.toml"\n{text}')
    words = (
        'did you mean "data"?',
        'total = "x" must be',
        'did you mean "gpt"?',
        "[dataset] name = 3 must be text, in quotes",
        'name = "adamx" is not known',
    )
    message = refuse("train", job, words=words)
    assert message.count("\n- ") == len(words), "and nothing follows from what is in doubt"


def test_an_optimizer_that_does_not_go_with_the_plan_is_found_before_ranks(
    refuse: Refusal, workspace: Workspace
) -> None:
    job = refuse.job_with(workspace, '[axes]\ndata = 2\n[data]\nshard = "optimizer"\n')
    job.write_text(job.read_text().replace('"adamw"', '"adafactor"').replace("heads = 2", "heads = 3"))
    words = ("heads 3 do not divide hidden 32", "Adafactor needs whole tensors")
    assert refuse("train", job, words=words).count("\n- ") == 2


@pytest.mark.parametrize("arguments", [["--steps", "0"], ["--ranks", "0"], ["--restart", "1"], ["a", "b"]])
def test_wrong_usage(run_here: RunHere, arguments: list[str]) -> None:
    outcome = run_here("train", *arguments)
    assert outcome.code == 2 and "Usage:" in outcome.stderr and "Traceback" not in outcome.stderr


def test_a_traceback_only_if_asked_for(run_here: RunHere) -> None:
    outcome = run_here("train", "nowhere.toml", "--traceback")
    assert outcome.code == 2
    assert outcome.stderr.startswith("Traceback (most recent call last)")
    assert outcome.stderr.rstrip().endswith("JobError: nowhere.toml: cannot be read: No such file or directory")


# From here on ranks are started: only they know.

MODELS = """
import os

from weft.errors import ModelError
from weft.models.gpt import GPT, GPTConfig


def tiny():
    return GPT(GPTConfig(context=16, num_layers=1, hidden=16, heads=2))


def refused_on_one():
    if os.environ["RANK"] == "1":
        raise ModelError(["the weights are not here", "nor are the sizes"])
    return tiny()


def broken():
    raise KeyError("weights.bin")


def broken_on_one():
    if os.environ["RANK"] == "1":
        raise KeyError("weights.bin")
    return tiny()
"""


def model_job(refuse: Refusal, workspace: Workspace, name: str, *, plan: str = "") -> Path:
    """The tiny job with a model of our own."""
    (workspace.folder / "weft_cli_models.py").write_text(MODELS)
    os.chdir(workspace.folder)  # where modules are looked for; the test's own folder stays the one that is watched
    text = workspace.job.read_text().split("[dataset]")[1]
    return refuse.write("job.toml", f'{plan}[model]\nname = "weft_cli_models:{name}"\n[dataset]\ncontext = 16\n{text}')


def test_a_mistake_that_one_rank_finds(refuse: Refusal, workspace: Workspace) -> None:
    """The others wait for it in an exchange; none may hang, and none may print."""
    job = model_job(refuse, workspace, "refused_on_one")
    words = ("the weights are not here", "nor are the sizes")
    message = refuse("train", job, "--output", refuse.folder / "run", words=words)
    assert message == "weft:\n- the weights are not here\n- nor are the sizes\n"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["broken", "broken_on_one"])
def test_an_exception_of_the_users_own_code(
    run_here: RunHere, refuse: Refusal, workspace: Workspace, name: str
) -> None:
    """It is tried once more, not three times."""
    job = model_job(refuse, workspace, name)
    arguments = ("train", job, "--output", refuse.folder / "run", "--restarts")
    message = refuse(*arguments, "0", words=("ended with code 1: KeyError: 'weights.bin'",))
    assert "started again" not in message
    outcome = run_here(*map(str, arguments), "3")
    said, message = outcome.stderr.splitlines()
    assert re.fullmatch(
        r"rank [01] ended with code 1: KeyError: 'weights.bin'; all ranks are started again \(restart 1 of 3\)", said
    )
    assert re.fullmatch(
        r"weft: rank [01] ended with code 1 and was started again once in vain \(the same error came again, so there "
        r"are no more restarts\): KeyError: 'weights.bin' \(--traceback shows where\)",
        message,
    )


@pytest.mark.long
def test_a_traceback_of_a_rank_if_asked_for(run_here: RunHere, refuse: Refusal, workspace: Workspace) -> None:
    job = model_job(refuse, workspace, "broken_on_one")
    output = refuse.folder / "run"
    outcome = run_here("train", job, "--output", output, "--restarts", "0", "--traceback")
    assert outcome.code == 2 and not output.exists()
    assert 'raise KeyError("weights.bin")' in outcome.stderr and "weft_cli_models.py" in outcome.stderr


@pytest.mark.long
def test_a_batch_that_does_not_divide_where_it_must(refuse: Refusal) -> None:
    refuse.write("plan.toml", '[axes]\ndata = 2\n[data]\nbuffers = "broadcast"\n')
    job = refuse.write(
        "job.toml",
        'plan = "plan.toml"\n[model]\nname = "convnet"\nwidth = 4\nnum_blocks = 1\n'
        '[dataset]\nname = "digits"\n[steps]\nglobal_batch = 7\n',
    )
    words = ("a global batch of 7 does not divide by 2 data ranks", "use a global batch of 6 or 8")
    refuse("train", job, "--output", refuse.folder / "run", words=words)


def test_a_checkpoint_of_another_model(refuse: Refusal, reference: Reference) -> None:
    directory = refuse.folder / "run"
    shutil.copytree(reference[0], directory)
    text = (directory / "job.toml").read_text()
    (directory / "job.toml").write_text(text.replace("hidden = 32", "hidden = 16").replace('"adamw"', '"adam"'))
    words = (
        "step-60 is a checkpoint of another model; use the model it was written with",
        '"embedding.weight" has shape [256, 16] here, [256, 32] in the checkpoint',
        "was written with optimizer AdamW, this run's is Adam;",
    )
    refuse("train", "--resume", directory, words=words)


@pytest.mark.long
def test_checkpoints_that_are_all_damaged(refuse: Refusal, reference: Reference) -> None:
    directory = refuse.folder / "run"
    shutil.copytree(reference[0], directory)
    damaged = directory / "checkpoints" / "step-60" / "optimizer-00001-of-00001.safetensors"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 4
    damaged.write_bytes(content)
    for other in (10 * n for n in (4, 5)):
        (directory / "checkpoints" / f"step-{other}" / "checkpoint.json").write_text("{")
    words = (
        f"{damaged} is damaged: the checksum of its piece",
        "no checkpoint in",
        "step-40/checkpoint.json is damaged",
    )
    refuse("train", "--resume", directory, words=words)
    assert len(all_checkpoints(directory / "checkpoints")) == 3


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "told"), [("refused_on_one", "the weights are not here"), ("tiny", "holds a run already")]
)
def test_inside_torchrun_a_mistake_is_printed_once(
    refuse: Refusal, workspace: Workspace, reference: Reference, name: str, told: str
) -> None:
    job = model_job(refuse, workspace, name)
    output = refuse.folder / "run" if name != "tiny" else reference[0]
    outcome = finish(start_torchrun("train", job, "--output", output, folder=workspace.folder))
    assert outcome.code != 0
    assert outcome.stderr.count(told) == 1
    assert "weft/cli/main.py" not in outcome.stderr  # torchrun prints a traceback of its own; no rank does
    assert not (refuse.folder / "run").exists()
