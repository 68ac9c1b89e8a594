"""`weft profile --advise` as a user meets it: a ranking, a reason and a plan from a cluster file; what it refuses."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from command import Outcome, Workspace, finish, start
from slow_cluster import slow_cluster

from weft.cli.compression import ModelOptions, model_of
from weft.models.gpt import GPT, GPTConfig
from weft.parallel.state.fragments import fragment_problems
from weft.plan.check import check
from weft.plan.plan import Axes, Plan
from weft.plan.text import parse_plan
from weft.planning.network import uniform_network
from weft.planning.slow_networks import Workload, predict
from weft.profiles.cluster_text import read_cluster, write_cluster
from weft.profiles.presets import preset
from weft.training.setup.codec_problems import codec_problems

RunHere = Callable[..., Outcome]


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    path = tmp_path / "slow.toml"
    write_cluster(slow_cluster(), path)
    return path


def plan_in(stdout: str) -> Plan:
    return parse_plan(re.split(r"^the plan of .*:$", stdout, flags=re.MULTILINE)[1])


def methods_in(stdout: str) -> list[str]:
    ranking = stdout.partition("step × steps")[2].partition("└")[0]
    return [line.split("│")[1].strip() for line in ranking.splitlines() if line.startswith("│")]


def test_it_ranks_methods_says_why_and_prints_a_plan_that_runs(run_here: RunHere, cluster: Path) -> None:
    outcome = run_here("profile", "--advise", "--cluster", cluster, "--step-time", "500ms")
    assert (outcome.code, outcome.stderr) == (0, "")
    assert "25.0 M parameters, trained by AdamW on 4 replicas, links of 95 Mbit/s and 25.2 ms:" in outcome.stdout
    assert "a step takes 500.0 ms of computing (--step-time)" in outcome.stdout
    methods = methods_in(outcome.stdout)
    assert methods[0].startswith("delayed by ") and "all-reduce" in methods and "DiLoCo, every 20, onebit" in methods
    left_out = outcome.stdout.partition("\nleft out: ")[2]
    assert "all-reduce, sign" not in methods and "all-reduce, sign (no use" in left_out
    parts = re.search(
        r"Bandwidth is the bottleneck: a synchronous step takes 11.4 s \(500.0 ms of computing, ([\d.]+) s of bytes "
        r"and ([\d.]+) ms of latency, of which 333.3 ms are hidden behind the backward pass\)",
        outcome.stdout,
    )
    assert parts is not None and 0.5 + float(parts[1]) + float(parts[2]) / 1000 - 0.333 == pytest.approx(11.4, abs=0.15)
    assert f"Advised is {methods[0]}: " in outcome.stdout
    assert "It needs about 1.07 × the steps (between measured points; " in outcome.stdout
    assert ", which sets only [data] and [codec] beside the number of replicas, to be merged " in outcome.stdout
    plan = plan_in(outcome.stdout)
    assert plan.data.sync == "delayed" and check(plan, num_ranks=4) == []


def test_assumed_links_and_replicas_change_the_advice(run_here: RunHere, cluster: Path) -> None:
    arguments = ("profile", "--advise", "--cluster", cluster, "--step-time", "500ms")
    fast = run_here(*arguments, "--bandwidth", "unlimited", "--latency", "0s").stdout
    assert "on 4 replicas, links of unlimited rate and 0 s:" in fast and methods_in(fast)[0] == "all-reduce"
    assert "Computing is the bottleneck" in fast and "Synchronous training is advised" in fast
    assert plan_in(fast) == Plan(axes=Axes(data=4))
    far = run_here(*arguments, "--bandwidth", "10Gbit", "--latency", "0.3s", "--replicas", 8).stdout
    assert "on 8 replicas, links of 10.0 Gbit/s and 300.0 ms:" in far and "Latency is the bottleneck" in far
    assert plan_in(far).data.sync == "delayed" and plan_in(far).axes.data == 8


def test_the_time_of_a_step_is_estimated_or_measured(run_here: RunHere, cluster: Path, workspace: Workspace) -> None:
    arguments = ("profile", "--advise", "--cluster", cluster)
    # 6 × 1.2 M × 4096 operations at 60 G per second
    estimated = run_here(*arguments, "--parameters", "1.2M").stdout
    assert "a step takes 491.5 ms of computing (estimated: 6 × 1.2 M parameters × 4096 tokens per replica" in estimated
    assert "; --step-time or --job give it better)" in estimated
    measured = run_here(*arguments, "--job", workspace.job)
    assert measured.code == 0 and measured.stderr == ""
    assert re.search(r"a step takes [\d.]+ [mµ]?s of computing \(measured: 2 samples of job.toml ", measured.stdout)
    assert "trained by adamw" in measured.stdout


def test_every_plan_for_a_job_is_one_that_training_takes(run_here: RunHere, cluster: Path, tmp_path: Path) -> None:
    """Also for a model with fewer blocks than streaming has fragments, on links where streaming is advised."""
    job, head = tmp_path / "two.toml", '[model]\nname = "gpt"\nnum_layers = 2\nhidden = 512\nheads = 8\ncontext = 64\n'
    job.write_text(head + '[dataset]\nname = "standard-library"\n[optimizer]\nname = "adamw"\n')
    known = model_of(ModelOptions(job=job))
    assert known.num_blocks == 2
    workload = Workload(
        shapes=known.shapes,
        num_blocks=known.num_blocks,
        compute_s=0.2,
        compressions=slow_cluster().compressions,
    )
    with torch.device("meta"):
        model = GPT(GPTConfig(num_layers=2, hidden=512, heads=8, context=64))
    ranked = predict(workload, uniform_network(num_replicas=4, bytes_per_s=1.25e6, latency_s=0.5))
    assert {one.method for one in ranked} == {"all-reduce", "local", "diloco", "streaming", "delayed"}
    for one in ranked:
        assert [*fragment_problems(model, one.plan), *codec_problems(model, one.plan)] == [], one.name
    arguments = ("profile", "--advise", "--cluster", cluster, "--step-time", "200ms", "--job", job)
    plan = plan_in(run_here(*arguments, "--bandwidth", "10Mbit", "--latency", "500ms").stdout)
    assert plan == ranked[0].plan and (plan.data.fragments, plan.data.sync) == (2, "local")


def test_links_inside_one_host_are_no_network(run_here: RunHere, cluster: Path, tmp_path: Path) -> None:
    write_cluster(preset("laptop"), tmp_path / "laptop.toml")
    hint = "these links are inside one host; for a network start this command with torchrun on every host, or assume "
    arguments = ("profile", "--advise", "--parameters", "1M", "--cluster")
    assert hint in run_here(*arguments, tmp_path / "laptop.toml").stdout
    assert hint not in run_here(*arguments, cluster).stdout
    for assumed in (("--bandwidth", "1Gbit"), ("--latency", "5ms")):
        assert hint not in run_here(*arguments, tmp_path / "laptop.toml", *assumed).stdout


def test_the_page_shows_what_is_printed(run_here: RunHere, cluster: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "profile.md").read_text()
    shown = page.partition(" --parameters 820K --step-time 185ms` prints:\n\n```\n")[2].partition("\n```\n")[0]
    outcome = run_here("profile", "--advise", "--cluster", cluster, "--parameters", "820K", "--step-time", "185ms")
    assert outcome.stdout.rstrip() == shown


def test_the_optimizer_of_a_job_decides_what_is_safe(run_here: RunHere, cluster: Path, tmp_path: Path) -> None:
    job = tmp_path / "sgd.toml"
    job.write_text('[model]\nname = "convnet"\n[dataset]\nname = "digits"\n[optimizer]\nname = "sgd"\nlr = 0.1\n')
    told = run_here("profile", "--advise", "--cluster", cluster, "--job", job, "--step-time", "20ms").stdout
    assert "trained by sgd" in told and "all-reduce, topk 0.01" in methods_in(told)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--latency", "5ms"], "--latency: without --advise this has no effect; add --advise"),
        (
            ["--cluster", "x.toml", "--bandwidth", "1Gbit"],
            "--bandwidth, --cluster: without --advise this has no effect",
        ),
        (["--advise", "--preflight"], "--advise needs measured links, and --preflight measures nothing"),
        (["--advise", "--ranks", "1"], "there is 1 rank, so no link to measure; profile 2 ranks or more"),
        (["--advise", "--ranks", "1", "--replicas", "4", "--latency", "1ms"], "there is 1 rank"),
        (["--advise", "--cluster", "x.toml", "--quick"], "--cluster reads a file and measures no links; leave out"),
        (["--advise", "--cluster", "nowhere.toml"], "nowhere.toml: cannot be read"),
        (["--advise", "--step-time", "5"], '--step-time 5 must be a time with its unit, like "25ms"'),
        (["--advise", "--step-time", "0s"], "--step-time 0s leaves nothing to compute; give a time above 0"),
        (["--advise", "--bandwidth", "fast"], '--bandwidth fast must be a rate above 0, like "100Mbit"'),
        (["--advise", "--latency", "-1ms"], "--latency -1ms must be a time with its unit"),
    ],
)
def test_what_it_refuses_before_it_starts(run_here: RunHere, arguments: list[str], told: str) -> None:
    outcome = run_here("profile", *arguments)
    assert outcome.code == 2 and outcome.stderr.count(told) == 1 and outcome.stderr.count("weft:") == 1


def test_all_bad_options_are_told_at_once(run_here: RunHere) -> None:
    outcome = run_here("profile", "--advise", "--step-time", "5", "--bandwidth", "fast", "--latency", "-1ms")
    assert outcome.code == 2 and outcome.stderr.count("\n- ") == 3


def test_a_cluster_of_one_rank_needs_assumed_links(run_here: RunHere, tmp_path: Path) -> None:
    alone = replace(slow_cluster(), devices=slow_cluster().devices[:1], links=(), timings=())
    write_cluster(alone, tmp_path / "alone.toml")
    arguments = ("profile", "--advise", "--cluster", tmp_path / "alone.toml", "--step-time", "1s")
    refused = run_here(*arguments)
    assert refused.code == 2 and "there is 1 rank, so no link to measure" in refused.stderr
    assumed = run_here(*arguments, "--replicas", 8, "--bandwidth", "50Mbit", "--latency", "40ms")
    assert assumed.code == 0 and "on 8 replicas, links of 50 Mbit/s and 40.0 ms:" in assumed.stdout


def test_a_launcher_has_no_use_for_a_cluster_file(
    run_here: RunHere, cluster: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    outcome = run_here("profile", "--advise", "--cluster", cluster)
    assert outcome.code == 2 and "--cluster needs one process, and a launcher started this one" in outcome.stderr


@pytest.mark.long
def test_it_measures_links_and_the_step_of_a_job(workspace: Workspace, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    outcome = finish(
        start("profile", "--advise", "--quick", "--output", path, "--job", workspace.job, folder=workspace.folder)
    )
    assert outcome.code == 0, outcome.stderr
    assert re.search(r"a step takes [\d.]+ [mµ]?s of computing \(measured: 4 samples of job.toml", outcome.stdout)
    assert read_cluster(path).num_ranks == 2 and check(plan_in(outcome.stdout), num_ranks=2) == []
