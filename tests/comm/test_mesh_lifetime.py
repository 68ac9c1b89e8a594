"""A mesh's process groups: declared by the plan, made with the mesh, looked up without exchange, given back."""

from __future__ import annotations

import copy
import gc
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from oracle import (
    MLP,
    SGD,
    batch_of,
    cut_evenly,
    data_plan,
    make_trainer,
    pipeline_plan,
    small_gpt,
    tensor_plan,
    token_batch,
)
from ranks import ranks

import weft
from weft.comm.collectives import all_reduce
from weft.comm.p2p import receive, send
from weft.errors import PlanError
from weft.mesh import Mesh, make_mesh
from weft.plan.partition.groups import num_communicators, plan_groups
from weft.world import World, join_world

PURPOSES = ["control", "gradients", "messages"]
both_transports = pytest.mark.parametrize("transport", ["c10d", "shared"])


def test_a_plan_declares_the_groups_it_uses() -> None:
    control = ("world", "control"), ("world", "saving"), ("data", "control")
    assert plan_groups(data_plan(1), batch_norms=True) == ()
    assert plan_groups(data_plan(2), batch_norms=False) == (*control, ("data", "gradients"))
    assert plan_groups(data_plan(2), batch_norms=True)[-1] == ("data", "statistics")
    assert ("data", "parameters") in plan_groups(data_plan(2, shard="parameters"), batch_norms=False)
    mixed = plan_groups(tensor_plan(2, pipeline=2, chunks=2), batch_norms=False)
    assert ("tensor", "activations") in mixed and ("pipeline:0,1", "gradients round") in mixed
    assert ("pipeline:0,1", "gradients round") not in plan_groups(pipeline_plan(2), batch_norms=False)
    assert len(set(mixed)) == len(mixed)


def test_each_group_of_device_tensors_is_a_communicator_and_control_is_none() -> None:
    assert num_communicators(data_plan(1)) == 0
    assert num_communicators(data_plan(8)) == 1
    assert num_communicators(data_plan(8), batch_norms=True) == 2
    assert num_communicators(data_plan(8, shard="parameters")) == 2
    # Totals, and two ways to each neighbour, of which the stages in the middle have two.
    assert [num_communicators(pipeline_plan(stages)) for stages in (2, 3, 8)] == [3, 5, 5]


def test_groups_of_one_need_no_declaration() -> None:
    with make_mesh(data_plan(1), World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))) as mesh:
        assert mesh.groups == ()
        assert mesh.group("tensor", "anything") is mesh.group("tensor", "anything")
        assert mesh.everyone("anything").handle is None
    with pytest.raises(RuntimeError, match="this mesh is closed"):
        mesh.everyone("anything")


@ranks(2)
def test_looking_up_a_group_that_was_not_declared() -> None:
    with make_mesh(data_plan(2), join_world("cpu"), groups=[("data", "control")]) as mesh:
        if dist.get_rank() == 0:  # on one rank alone: nothing is exchanged
            with pytest.raises(LookupError, match='"data/gradients" .* which has data/control; declare it'):
                mesh.state_group("gradients")
        assert mesh.batch_group("control") is mesh.groups[0]


def use(mesh: Mesh, ones: torch.Tensor, received: torch.Tensor) -> None:
    all_reduce(ones.fill_(1.0), mesh.group("data", "gradients"), wait=False).wait()
    group = mesh.group("data", "messages")
    sent = send(ones[: len(received)], group, to=1 - group.index)
    receive(received.zero_(), group, source=1 - group.index).wait()
    sent.wait()
    assert bool((received == 2.0).all())


@ranks(2)
@both_transports
def test_exchanges_after_closing(transport: str) -> None:
    mesh = make_mesh(data_plan(2, transport=transport), join_world("cpu"), groups=[("data", one) for one in PURPOSES])
    use(mesh, torch.empty(100_000), torch.empty(20_000))
    group = mesh.group("data", "gradients")
    mesh.close()
    mesh.close()
    with pytest.raises(RuntimeError, match="its mesh was closed"):
        all_reduce(torch.ones(3), group)
    with pytest.raises((RuntimeError, ValueError)):
        send(torch.ones(3), group, to=1 - group.index)
    with pytest.raises(RuntimeError, match="this mesh is closed"):
        mesh.group("data", "gradients")
    with pytest.raises(RuntimeError, match="this mesh is closed"):
        mesh.add_groups([("data", "more")])


@ranks(2)
def test_meshes_share_process_groups() -> None:
    world, plan = join_world("cpu"), data_plan(2, transport="shared")
    first = make_mesh(plan, world)
    with make_mesh(data_plan(2, bucket_bytes=10, transport="shared"), world, sharing=first) as second:
        assert second.state_group("gradients").handle is first.state_group("gradients").handle
        all_reduce(torch.ones(3), second.state_group("gradients"))
        assert first.traffic["data"].num_calls == 0 < second.traffic["data"].num_calls
    all_reduce(torch.ones(3), first.state_group("gradients"))
    with pytest.raises(PlanError, match="the mesh given is for"):
        make_mesh(data_plan(2, transport="c10d"), world, sharing=first)
    first.close()
    with pytest.raises(RuntimeError, match="this mesh is closed"):
        make_mesh(plan, world, sharing=first)


def in_use() -> tuple[int, int, int]:
    """Threads, file descriptors and resident bytes of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.long
@ranks(2, fresh=True, timeout_s=180.0)
@both_transports
def test_making_and_closing_leaves_nothing_behind(transport: str) -> None:
    world, plan, seen = join_world("cpu"), data_plan(2, transport=transport), {}
    tensors = torch.empty(100_000), torch.empty(20_000)  # kept: what malloc keeps of others is not the mesh's
    for number in range(1, 51):
        with make_mesh(plan, world, groups=[("data", one) for one in PURPOSES]) as mesh:
            use(mesh, *tensors)
        del mesh
        dist.barrier()
        seen[number] = in_use()
    threads, files, num_bytes = zip(seen[10], seen[50], strict=True)
    assert threads[0] == threads[1] and files[0] == files[1]
    assert num_bytes[1] - num_bytes[0] < 4 * 2**20, f"{seen}"


@pytest.mark.sampled(1)
@ranks(2, fresh=True, timeout_s=180.0)
@both_transports
@pytest.mark.parametrize("shard", ["nothing", "parameters"])
def test_trainers_in_a_with_statement(transport: str, shard: str, tmp_path: Path) -> None:
    model, parts, seen = MLP(), cut_evenly(batch_of(8), 2), {}
    for number in range(1, 9):
        plan = data_plan(2, transport=transport, shard=shard)
        with weft.parallelize(copy.deepcopy(model), plan, loss="cross-entropy", optimizer=SGD, device="cpu") as trainer:
            loss = float(trainer.step(*parts[trainer.data_rank]))
            trainer.save(tmp_path / str(number), wait=False)
        assert (tmp_path / str(number)).is_dir(), "closing waits for a save"
        with pytest.raises(RuntimeError, match="this mesh is closed"):
            trainer.check_divergence()
        del trainer
        dist.barrier()
        seen[number] = (loss, *in_use()[:2])
    assert seen[3] == seen[8], "the same loss, threads and file descriptors"


@ranks(2)
def test_a_trainer_leaves_groups_that_it_was_given() -> None:
    with make_mesh(data_plan(2), join_world("cpu")) as mesh:
        for _ in range(2):
            with make_trainer(MLP(), data_plan(2), mesh=mesh) as trainer:
                trainer.step(*cut_evenly(batch_of(8), 2)[trainer.data_rank])
        ones = torch.ones(1)
        all_reduce(ones, mesh.state_group("gradients"))
        assert ones.item() == 2.0, "the mesh outlives the trainers that used it"


def two_bw_losses(trainer: weft.Trainer, num_steps: int) -> list[float]:
    """After the first step, which returns before any batch is through."""
    return [float(trainer.step(*token_batch(4, seed=seed))) for seed in range(num_steps)][1:]


@ranks(2)
@both_transports
def test_pipelines_that_never_empty_do_not_meet_on_a_shared_mesh(transport: str) -> None:
    """Each has a gradient under way between two steps, which must not reach the other."""
    plan = pipeline_plan(2, schedule="2bw", microbatches=2, cuts=(1,), transport=transport)

    def make(mesh: Mesh | None) -> weft.Trainer:
        torch.manual_seed(0)
        example = token_batch(2)[0]
        return weft.parallelize(
            small_gpt(), plan, loss="cross-entropy", optimizer=SGD, example=example, device="cpu", mesh=mesh
        )

    with make(None) as first, make(first.mesh) as second:
        two_bw_losses(first, 1)
        found = two_bw_losses(second, 4)
    with make(None) as alone:
        assert found == two_bw_losses(alone, 4)


@ranks(2)
@both_transports
def test_a_shared_mesh_whose_owner_was_closed(transport: str, tmp_path: Path) -> None:
    plan = data_plan(2, transport=transport)
    batch = cut_evenly(batch_of(4), 2)[dist.get_rank()]
    first = make_trainer(MLP(), plan, mesh=None)
    second = make_trainer(MLP(), plan, mesh=first.mesh)
    first.save(tmp_path / "first", wait=False)  # each has a group of its own for saves
    second.save(tmp_path / "second", wait=False)
    second.step(*batch)
    first.close()
    with pytest.raises(RuntimeError, match="its mesh was closed|process groups are gone"):
        second.step(*batch)
    second.close()
    assert (tmp_path / "first").is_dir() and (tmp_path / "second").is_dir()
