"""Shared memory when a rank dies, comes late, disagrees, forks or forgets: nobody gets a wrong number for it, and
nobody waits for ever."""

from __future__ import annotations

import copy
import gc
import os
import signal
import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from exchanges import kept_group, new_group, results_of, truths_of
from oracle import data_plan, make_trainer, small_gpt, token_batch
from ranks import ranks
from torch import Tensor

from weft.comm import collectives
from weft.comm.collectives import Pending
from weft.comm.exchange_buffers import BufferAllocator, common_empty
from weft.comm.group import Group
from weft.comm.p2p import receive, send
from weft.comm.shared_memory.mailbox import NUM_ENVELOPES

CPU = torch.device("cpu")


def fill_the_ring(group: Group) -> None:
    for _ in range(NUM_ENVELOPES + 1):
        send(torch.zeros(1), group, to=2)


def waits_for_rank_2() -> dict[str, Callable[[Group, Tensor, Tensor], object]]:
    """Everything a rank waits in, given a group, a tensor in an arena of it, and one that is common memory."""
    short, long = torch.zeros(3), torch.zeros(30_000)
    return {
        "small all-reduce": lambda group, *_: collectives.all_reduce(short.clone(), group),
        "all-reduce by slots": lambda group, *_: collectives.all_reduce(long.clone(), group),
        "all-reduce in an arena": lambda group, placed, _: collectives.all_reduce(placed, group),
        "pending all-reduce": lambda group, placed, _: collectives.all_reduce(placed, group, wait=False).wait(),
        "broadcast": lambda group, *_: collectives.broadcast(short.clone(), group, root=2),
        "all-gather": lambda group, *_: collectives.all_gather(torch.zeros(9), short, group),
        "all-gather of common memory": lambda group, _, common: collectives.all_gather(common, common[:100], group),
        "reduce-scatter": lambda group, *_: collectives.reduce_scatter(torch.zeros(10_000), long, group),
        "all-to-all": lambda group, *_: collectives.all_to_all(torch.zeros(3), short, group),
        "receive": lambda group, *_: receive(torch.zeros(3), group, source=2).wait(),
        "send with a full ring": lambda group, *_: fill_the_ring(group),
    }


@ranks(3, dies={2})
def test_a_dead_rank_is_noticed_in_every_wait() -> None:
    """All waits at once, each in a thread and a group of its own; the other two ranks live on."""
    found: dict[str, str] = {}
    given = []
    for name, wait in waits_for_rank_2().items():
        group = new_group("shared", name)
        common = common_empty(group, CPU, 300, torch.float32)
        assert common is not None
        given.append(
            (name, wait, group, BufferAllocator(group, CPU, num_bytes=2**17).empty(30_000, torch.float32), common)
        )

    def run(name: str, wait: Callable[..., object], *given: object) -> None:
        try:
            wait(*given)
        except RuntimeError as error:
            found[name] = str(error)

    dist.barrier()
    if dist.get_rank() == 2:
        time.sleep(0.2)  # they wait already
        os.kill(os.getpid(), signal.SIGKILL)
    threads = [threading.Thread(target=run, args=one, daemon=True) for one in given]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found.keys() == waits_for_rank_2().keys()
    for text in found.values():
        assert "Connection closed by peer" in text and "rank 2" in text


@pytest.mark.timing
@ranks(2, dies={1})
def test_a_dead_rank_is_noticed_within_a_second() -> None:
    group = new_group("shared", "second")
    dist.barrier()
    if group.index == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 1"):
        collectives.all_reduce(torch.zeros(1), group)
    assert time.monotonic() - started < 0.5 + 1.0


@ranks(2)
def test_a_late_rank_is_given_up_and_gets_no_wrong_number() -> None:
    """For the one that gave up the group is of no use any more: what it adds up next is not what the other does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("weft.comm.shared_memory.connect.timeout_s", lambda handle: 0.3)
        group = new_group("shared", "late")
    if group.index == 0:
        with pytest.raises(RuntimeError, match="Timed out waiting 300ms for rank 1"):
            collectives.all_reduce(torch.ones(4), group)
        for wait in (True, False):
            with pytest.raises(RuntimeError, match="Timed out waiting 300ms for rank 1"):
                collectives.all_reduce(torch.full((4,), 1000.0), group, wait=wait).wait()
        dist.barrier()
        dist.barrier()
    else:
        dist.barrier()
        late = torch.ones(4)
        collectives.all_reduce(late, group)
        assert late.tolist() == [2.0] * 4, "what both meant"
        with pytest.raises(RuntimeError, match="Timed out"):
            collectives.all_reduce(torch.ones(4), group)
        dist.barrier()


@pytest.mark.sampled(4)
@ranks(2)
@pytest.mark.parametrize("wait", [True, False], ids=["waiting", "pending"])
@pytest.mark.parametrize("about", ["size", "dtype", "kind", "large size"])
def test_ranks_that_disagree_hear_of_it(about: str, wait: bool) -> None:
    group = new_group("shared", f"disagree {about} {wait}")
    first = group.index == 0
    short = torch.zeros(3)
    mine: tuple[Callable[..., Pending], tuple[Tensor, ...]]
    mine, told = {
        "size": ((collectives.all_reduce, (torch.zeros(3 if first else 4),)), "12 bytes .* 16 bytes"),
        "large size": ((collectives.all_reduce, (torch.zeros(30_000 if first else 4),)), "120000 bytes .* 16 bytes"),
        "dtype": ((collectives.broadcast, (short.int() if first else short,)), "int32 .*float32"),
        "kind": (
            (collectives.all_gather, (torch.zeros(6), short)) if first else (collectives.all_reduce, (short,)),
            "all-gather .* all-reduce",
        ),
    }[about]
    with pytest.raises(RuntimeError, match="ranks disagree about an exchange") as caught:
        mine[0](*mine[1], group, wait=wait).wait()
    if first:
        caught.match(told)


@ranks(2)
def test_wrong_sizes_are_refused() -> None:
    for number, exchange in enumerate((collectives.all_gather, collectives.reduce_scatter)):
        for numel in (5, 90_000):
            group = new_group("shared", f"sizes {number} {numel}")
            room = BufferAllocator(group, CPU, num_bytes=2**20)
            with pytest.raises(ValueError, match=f"{numel} elements"):
                exchange(torch.zeros(8), room.zeros(numel, torch.float32), group)


@ranks(2)
def test_a_child_process_changes_nothing() -> None:
    """Workers that read data are forked from a rank in the middle of its work, and end in any way."""
    group, room = kept_group("shared")
    held = room.zeros(30_000, torch.float32)
    pending = collectives.all_reduce(held, group, wait=False)
    child = os.fork()
    if not child:
        held = pending = room = group = None  # type: ignore[assignment]
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    pending.wait()
    found = results_of(kept_group("shared"), 20_000, torch.float32, place="arena", wait=False)
    assert torch.equal(found["sum"], truths_of(2, group.index, 20_000, torch.float32)["sum"])


@ranks(2)
def test_ranks_forget_at_different_times() -> None:
    """One rank's arena is gone while the other's is still in use, and numbers of later ones agree all the same."""
    group = new_group("shared", "forget")
    rooms = [BufferAllocator(group, CPU, num_bytes=2**18) for _ in range(3)]
    held = [room.empty(20_000, torch.float32).fill_(1.0) for room in rooms]
    if group.index == 0:
        held[0] = torch.ones(20_000)
        rooms[0] = rooms[1]
        gc.collect()
    rooms.append(BufferAllocator(group, CPU, num_bytes=2**18))
    held.append(rooms[3].empty(20_000, torch.float32).fill_(1.0))
    for tensor in held:
        collectives.all_reduce(tensor, group)
        assert bool((tensor == 2.0).all())


@ranks(2)
def test_connected_ranks_keep_no_descriptor_of_memory() -> None:
    before = num_memory_descriptors()
    group = new_group("shared", "descriptors")
    rooms = [BufferAllocator(group, CPU, num_bytes=2**18) for _ in range(5)]
    assert num_memory_descriptors() == before and len(rooms) == 5


def num_memory_descriptors() -> int:
    paths = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return sum("memfd:weft" in os.readlink(path) for path in paths if os.path.lexists(path))


@ranks(2)
@pytest.mark.parametrize("shard", ["nothing", "gradients"])
def test_a_copy_of_a_trained_model_is_its_own(shard: str) -> None:
    """Its gradients lie in memory of its own, and training goes on as if it had not been made."""
    batch = token_batch(4)
    losses = []
    for copies in (False, True):
        torch.manual_seed(0)
        trainer = make_trainer(small_gpt(), data_plan(2, shard=shard))
        part = [tensor[dist.get_rank() :: 2] for tensor in batch]
        for _ in range(3):
            losses.append(trainer.step(*part).item())
            if copies:
                for parameter in copy.deepcopy(trainer.model).parameters():
                    parameter.data.zero_()
                    if parameter.grad is not None:
                        parameter.grad.zero_()
    assert losses[:3] == losses[3:]
