"""The pool's own tests: what a raise, a death and a hang look like, and that the test after each of them passes."""

from __future__ import annotations

import os
import random
import signal
import time
import warnings
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed as dist
from ranks import close_pools, kept_pools, ranks


def failure_of(body, **parameters) -> str:
    """The text pytest would print for a decorated body that must fail."""
    with pytest.raises(pytest.fail.Exception) as caught:
        body(**parameters)
    return str(caught.value)


def check_group(world: int) -> None:
    tensor = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(tensor)
    assert dist.get_world_size() == world
    assert tensor.item() == world * (world + 1) / 2


@ranks(1)
def test_one_rank() -> None:
    check_group(1)


@ranks(2)
def test_two_ranks() -> None:
    check_group(2)


@ranks(4)
def test_four_ranks() -> None:
    check_group(4)


@ranks(2)
def sum_two() -> None:
    check_group(2)


@ranks(2)
@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["single", "double"])
def test_parameters_and_fixtures_reach_the_ranks(size: int, dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = torch.ones(size, dtype=dtype)
    dist.all_reduce(tensor)
    assert tensor.sum().item() == 2 * size
    (tmp_path / f"{dist.get_rank()}").write_text("here")
    dist.barrier()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def test_parametrisation_keeps_its_ids(request: pytest.FixtureRequest) -> None:
    names = [item.name for item in request.node.parent.collect()]
    ids = [name.split("[")[1] for name in names if name.startswith("test_parameters_and_fixtures")]
    assert sorted(ids) == ["double-1000]", "double-1]", "single-1000]", "single-1]"]


@ranks(2)
def write_pid(folder: Path) -> None:
    (folder / str(dist.get_rank())).write_text(str(os.getpid()))


def pids(folder: Path, body=write_pid) -> list[str]:
    folder.mkdir()
    body(folder=folder)
    return sorted(path.read_text() for path in folder.iterdir())


def test_a_pool_is_used_again(tmp_path: Path) -> None:
    first = pids(tmp_path / "first")
    assert len(set(first)) == 2
    assert str(os.getpid()) not in first
    assert pids(tmp_path / "second") == first


@ranks(2, fresh=True)
def write_fresh_pid(folder: Path) -> None:
    (folder / str(dist.get_rank())).write_text(str(os.getpid()))
    dist.destroy_process_group()


def test_a_fresh_pool_is_thrown_away(tmp_path: Path) -> None:
    kept = pids(tmp_path / "kept")
    fresh = pids(tmp_path / "fresh", write_fresh_pid)
    assert not set(fresh) & set(kept)
    assert not any(Path(f"/proc/{pid}").exists() for pid in fresh)
    assert pids(tmp_path / "again") == kept


@ranks(2)
def raise_on_one(tmp_path: Path) -> None:
    (tmp_path / str(dist.get_rank())).write_text(str(os.getpid()))
    limit, found = 3, {"loss": 4}
    if dist.get_rank() == 1:
        assert found["loss"] < limit, "too large"
    dist.barrier()


def test_a_raise_names_its_rank_and_shows_the_values(tmp_path: Path) -> None:
    text = failure_of(raise_on_one, tmp_path=tmp_path)
    assert "raise_on_one: rank 1 of 2 failed" in text
    assert 'assert found["loss"] < limit, "too large"' in text
    assert "assert 4 < 3" in text
    assert "rank 0 of 2: waiting in:" in text
    assert "in barrier" in text
    assert not any(Path(f"/proc/{path.read_text()}").exists() for path in tmp_path.iterdir())
    sum_two()


@ranks(4)
def raise_everywhere() -> None:
    raise ValueError("all of us")


def test_one_error_on_all_ranks_is_shown_once() -> None:
    text = failure_of(raise_everywhere)
    assert text.count("ValueError: all of us") == 1
    assert text.count("the same") == 3


@ranks(2)
def exit_on_one() -> None:
    if dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()


@ranks(4)
def kill_two() -> None:
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


@pytest.mark.parametrize(
    ("body", "first"),
    [(exit_on_one, "rank 1 of 2: died: exit code 3"), (kill_two, "rank 2 of 4: died: killed by SIGKILL")],
    ids=["exit", "kill"],
)
def test_a_death_names_its_rank(body, first: str) -> None:
    lines = failure_of(body).splitlines()
    assert lines[0].endswith("failed")
    assert lines[1] == f"--- {first}"
    sum_two()


@ranks(2, timeout_s=0.5)
def hang_on_zero() -> None:
    if dist.get_rank() == 0:
        time.sleep(60)


@ranks(2, timeout_s=0.5)
def stop_on_one() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


def test_a_hang_shows_where() -> None:
    text = failure_of(hang_on_zero)
    assert text.startswith("hang_on_zero: rank 0 of 2 silent after 0.5 s")
    assert "in hang_on_zero" in text
    assert "--- rank 1" not in text
    sum_two()


def test_a_stopped_process_is_reported_and_killed() -> None:
    assert "does not answer signals" in failure_of(stop_on_one)
    sum_two()


@ranks(2, dies=[1])
def test_an_announced_death_is_no_failure() -> None:
    if dist.get_rank() == 1:
        os._exit(1)
    with pytest.raises(RuntimeError):
        dist.barrier()


@ranks(2, dies=[1])
def forget_to_die() -> None:
    pass


def test_an_announced_death_must_happen() -> None:
    assert "rank 1 of 2: was to die, but returned" in failure_of(forget_to_die)


@ranks(2)
def lose_the_group() -> None:
    dist.destroy_process_group()


def test_a_lost_group_is_refused() -> None:
    assert "use fresh=True" in failure_of(lose_the_group)
    sum_two()


@ranks(2)
def warn() -> None:
    warnings.warn("careless", stacklevel=1)


def test_warnings_are_errors_in_ranks_as_in_the_parent() -> None:
    assert "UserWarning: careless" in failure_of(warn)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="careless")
        warn()


@ranks(2)
def skip() -> None:
    torch.set_default_dtype(torch.float64)
    pytest.skip("not here")


@ranks(2)
def skip_on_one() -> None:
    if dist.get_rank() == 1:
        pytest.skip("not here")


def test_skips() -> None:
    sum_two()
    pool = kept_pools[2]
    with pytest.raises(pytest.skip.Exception, match="not here"):
        skip()
    assert kept_pools[2] is pool
    find_no_traces()
    assert "ranks [1] of 2 skipped" in failure_of(skip_on_one)


@ranks(2)
def draw(folder: Path) -> None:
    numbers = (torch.rand(1).item(), numpy.random.rand(), random.random(), torch.get_num_threads())
    (folder / str(dist.get_rank())).write_text(repr(numbers))


@ranks(2)
def leave_traces(folder: Path) -> None:
    torch.rand(5)
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    torch.set_grad_enabled(False)
    os.environ["LEFT_BY_A_TEST"] = "1"
    os.chdir(folder)


@ranks(2)
def find_no_traces() -> None:
    assert torch.get_default_dtype() == torch.float32
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.is_grad_enabled()
    assert "LEFT_BY_A_TEST" not in os.environ
    assert Path.cwd().exists()


def test_a_body_leaves_no_traces(tmp_path: Path) -> None:
    draw(folder=tmp_path)
    before = [path.read_text() for path in tmp_path.iterdir()]
    leave_traces(folder=tmp_path)
    find_no_traces()
    draw(folder=tmp_path)
    assert [path.read_text() for path in tmp_path.iterdir()] == before
    assert before[0] == before[1]
    assert before[0].endswith(" 1)")


def test_what_cannot_be_sent_is_said() -> None:
    with pytest.raises(TypeError, match="the ranks are sent folder"):
        write_pid(folder=lambda: None)


def test_a_closure_is_refused() -> None:
    def inner() -> None:
        pass

    with pytest.raises(TypeError, match="not at the top"):
        ranks(2)(inner)


def test_pools_close_and_open_again() -> None:
    sum_two()
    folder = kept_pools[2].folder
    close_pools()
    assert not folder.exists()
    assert not kept_pools
    sum_two()


def test_a_death_between_tests_is_not_blamed_on_the_next_body() -> None:
    sum_two()
    os.kill(kept_pools[2].processes[1].pid, signal.SIGKILL)
    kept_pools[2].processes[1].join()
    text = failure_of(sum_two)
    assert "had died before it began" in text
    assert "rank 1 of 2: died: killed by SIGKILL" in text
    sum_two()
