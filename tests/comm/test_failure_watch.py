"""One rank's end ends the others, told once per host; and who waits for whom when an exchange is stuck.

Each test has processes of its own that look like a launcher's ranks, on hosts that exist by name only. There is no
launcher that would end them: what ends them is the watch. Ranks that must be ended sleep, as a host does that waits for
a GPU, and ignore SIGTERM, as a rank does in the middle of a run.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launched_ranks import Body, printed, run
from oracle import ADAMW, data_plan, make_trainer, small_gpt, token_batch
from torch._C._distributed_c10d import HashStore

from weft.comm.failures import stall_watch, stuck_exchanges, wait_reports
from weft.comm.failures import watch as failure_watch
from weft.comm.failures.activity import Calls, record_exchanges
from weft.comm.failures.hang_report import describe_wait
from weft.comm.failures.limits import Limits
from weft.comm.failures.lines import as_line
from weft.comm.failures.rank_status import RankStatus
from weft.comm.failures.server import Failure
from weft.comm.failures.stall_watch import StallWatch
from weft.comm.failures.stuck_exchanges import Exchange, ExchangeStatus
from weft.comm.failures.wait_reports import WaitReports
from weft.comm.failures.watch import FailureWatch
from weft.mesh import make_mesh
from weft.plan.plan import Axes, Comm, Plan
from weft.world import join_world, leave_world

FOREVER_S = 600.0


def raises_on_the_last(rank: int) -> None:
    if rank == dist.get_world_size() - 1:
        raise ValueError("planted")
    time.sleep(FOREVER_S)


def test_an_error_ends_all_ranks_and_is_told_once_on_every_host(tmp_path: Path) -> None:
    ended = run(raises_on_the_last, 4, tmp_path, ranks_per_host=2)
    assert [one.code for one in ended] == [1, 1, 1, 1]
    assert ended[3].stderr.endswith("ValueError: planted\n") and "Traceback" in ended[3].stderr
    assert printed(ended) == [
        f"0 weft: rank 3 (on {socket.gethostname()}) failed, and ends this run: ValueError: planted"
    ]
    assert ended[1].stderr + ended[2].stderr == ""


def leaves_the_world_in_finally(rank: int) -> None:
    try:
        raises_on_the_last(rank)
    finally:
        leave_world()


def test_leaving_the_world_because_of_an_error_is_not_leaving_in_order(tmp_path: Path) -> None:
    ended = run(leaves_the_world_in_finally, 2, tmp_path)
    assert [one.code for one in ended] == [1, 1]
    assert ended[0].stderr == "" and ended[1].stderr.count("ValueError: planted") == 1


def killed_in_the_middle(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(FOREVER_S)


def killed_first(rank: int) -> None:
    if rank == 0:
        child = os.fork()  # a worker of a data loader, which must not keep the connections open
        if child == 0:
            time.sleep(FOREVER_S)
        print(f"child {child}", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(FOREVER_S)


@pytest.mark.parametrize(("body", "dead", "printing"), [(killed_in_the_middle, 1, [0, 2]), (killed_first, 0, [1, 2])])
def test_a_killed_rank_ends_the_others(tmp_path: Path, body: Body, dead: int, printing: list[int]) -> None:
    ended = run(body, 4, tmp_path, ranks_per_host=2)
    if "child" in ended[0].stderr:
        os.kill(int(ended[0].stderr.split()[1]), signal.SIGKILL)
    assert [one.code for one in ended] == [-signal.SIGKILL if rank == dead else 1 for rank in range(4)]
    assert [int(line.split()[0]) for line in printed(ended)] == printing
    assert all(f"rank {dead} (on {socket.gethostname()}) failed" in line for line in printed(ended))


def raises_while_the_other_exchanges(rank: int) -> None:
    if rank == 1:
        raise ValueError("planted")
    dist.all_reduce(torch.ones(2))


def test_an_error_that_follows_from_another_is_not_told(tmp_path: Path) -> None:
    """gloo notices that the peer is gone; its own error is not what the user must see."""
    ended = run(raises_while_the_other_exchanges, 2, tmp_path)
    assert [one.code for one in ended] == [1, 1]
    assert ended[0].stderr == "" and "ValueError: planted" in ended[1].stderr


def ends_early_in_order(rank: int) -> None:
    if rank == 1:
        raise KeyboardInterrupt
    if rank == 2:
        leave_world()
        raise ValueError("after the run")
    time.sleep(1.5)


def test_an_interrupt_or_an_error_after_leaving_ends_no_other_rank(tmp_path: Path) -> None:
    ended = run(ends_early_in_order, 3, tmp_path)
    assert [one.code for one in ended] == [0, 1, 1]
    assert printed(ended) == []


def returns_early(rank: int) -> None:
    if rank == 0:
        time.sleep(1.5)


def test_a_process_of_multiprocessing_that_returns_early_ends_no_other_rank(tmp_path: Path) -> None:
    """Such processes end without `atexit`."""
    ended = run(returns_early, 2, tmp_path, is_script=False)
    assert [one.code for one in ended] == [0, 0] and printed(ended) == []


def test_an_error_in_a_process_of_multiprocessing_ends_all_ranks(tmp_path: Path) -> None:
    """Such processes print their errors without `sys.excepthook`."""
    ended = run(raises_on_the_last, 2, tmp_path, is_script=False)
    assert [one.code for one in ended] == [1, 1]
    assert ended[0].stderr == "" and "ValueError: planted" in ended[1].stderr


def ends_with_a_step(rank: int) -> None:
    model = small_gpt()
    trainer = make_trainer(model, data_plan(2, shard="optimizer", transport="c10d"), optimizer=ADAMW, mesh=None)
    if rank == 0:
        trainer.optimizer.register_step_post_hook(lambda *_: time.sleep(0.5))
    trainer.step(*token_batch(4))
    if rank == 0:
        assert all(torch.isfinite(tensor).all() for tensor in model.state_dict().values())


def test_a_rank_that_ends_with_a_step_still_sends_its_weights(tmp_path: Path) -> None:
    """The other one, which is slower, reads them after that."""
    ended = run(ends_with_a_step, 2, tmp_path, is_script=False)
    assert [one.code for one in ended] == [0, 0], [one.stderr for one in ended]


def test_a_rank_that_did_not_reach_the_server_does_not_wait_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks that did reach it make no second one when they join again."""
    asked = []
    monkeypatch.setattr(failure_watch, "connect_to_failure_server", lambda *_: asked.append(1))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for _ in range(2):
        failure_watch.watch_world(HashStore(), 1, 2, timeout_s=1.0)
    failure_watch.leave_watch()
    assert len(asked) == 1


ADDRESS = {"token": "0123456789", "host": "elsewhere", "host_name": "elsewhere", "pid": 1}


def test_a_rank_that_prints_its_error_is_not_ended_by_the_end_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(FailureWatch, "end", lambda self: ended.append(1))
    ours, theirs = socket.socketpair()
    watch = FailureWatch(ours, ADDRESS, None, rank=1, timeout_s=60.0)
    first = Failure(rank=1, host_name="here", kind="ValueError", message="planted", prints_itself=True)
    both = as_line({"failure": asdict(first), "printed_by": []}) + as_line({"closed": True})
    threading.Timer(0.1, theirs.sendall, [both]).start()  # after `report` has begun
    assert watch.report(ValueError("planted")), "this rank prints it"
    watch._thread.join(10.0)
    theirs.close()
    ours.close()
    assert not watch._thread.is_alive() and not ended


def test_who_waits_for_rank_0_after_it_has_ended_in_order_says_so_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(wait_reports, "print_line", said.append)
    monkeypatch.setenv(wait_reports.STACKS, str(tmp_path))
    record = record_exchanges("7", "data/gradients", (0, 1))
    record.waiting, record.since_s = ("all-reduce", 64, 7, ()), time.perf_counter() - 10
    expected = (
        "rank 1 has waited 10 s in all-reduce of 64 B (number 7 along data/gradients, ranks 0, 1); rank 0: has ended"
    )
    for timeout_s in (60.0, 5.0):
        reports = WaitReports(1, ADDRESS, None, lambda message: None, limits=Limits(), timeout_s=timeout_s)
        failure = reports.check_alone()
        text = said.pop() if failure is None else failure.message
        assert (failure is None) == (timeout_s == 60.0) and expected in text
    record.waiting = None
    assert "test_who_waits_for_rank_0" in (tmp_path / "rank-1.txt").read_text()


def waits_for_one_that_is_elsewhere(rank: int) -> None:
    mesh = make_mesh(
        Plan(axes=Axes(data=2, tensor=2), comm=Comm(transport="c10d")),
        join_world("cpu"),
        groups=[("data", "gradients"), ("tensor", "activations")],
    )
    data, tensor = mesh.group("data", "gradients"), mesh.group("tensor", "activations")
    dist.all_reduce(torch.ones(2), group=data.handle)
    if rank == 3:
        time.sleep(FOREVER_S)
    dist.all_reduce(torch.ones(1024), group=(tensor if rank == 2 else data).handle)
    time.sleep(FOREVER_S)


@pytest.mark.long
def test_a_stuck_exchange_names_its_axis_and_who_is_where(tmp_path: Path) -> None:
    """Ranks (0, 1) and (2, 3) share the tensor axis, (0, 2) and (1, 3) the data axis. Rank 3 is in no exchange."""
    ended = run(waits_for_one_that_is_elsewhere, 4, tmp_path, timeout_s=3.0)
    assert all(one.code not in (0, None) for one in ended)
    (line,) = printed(ended)
    places = {
        0: "in all-reduce of 4.0 KiB (number 2 along data/gradients, ranks 0, 2)",
        1: "in all-reduce of 4.0 KiB (number 2 along data/gradients, ranks 1, 3)",
        2: "in all-reduce of 4.0 KiB (number 1 along tensor/activations, ranks 2, 3)",
    }
    absent = {
        "data": "rank 3: in no exchange (its last one along data/gradients was number 1), at ",
        "tensor": "rank 3: in no exchange, at ",
    }
    first = int(line.split("rank ")[2].split()[0])
    assert f"rank {first} has waited" in line and places[first] in line
    assert absent["data" if first == 1 else "tensor"] in line
    said, stacks = line.split(". Stacks of all ranks: ")
    assert said.endswith(" (waits_for_one_that_is_elsewhere)"), "the line of the test's own code at which rank 3 sleeps"
    for rank in range(4):
        assert "in waits_for_one_that_is_elsewhere" in (Path(stacks) / f"rank-{rank}.txt").read_text()
    assert (f"rank 2: waiting {places[2]}; " in line) == (first == 0)
    assert all("Timed out" not in one.stderr for one in ended)


def recorded(kind: str, number: int, **changes: Any) -> dict[str, Any]:
    """An entry of NCCL's recorder, as torch 2.11 and 2.13 write it."""
    entry = {
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "is_p2p": False,
        "input_dtypes": ["BFloat16"],
        "input_sizes": [[2, 512]],
        "output_dtypes": ["BFloat16"],
        "output_sizes": [[4, 512]],
        "process_group": ["7", "data/gradients"],
        "profiling_name": f"nccl:{kind}",
        "retired": False,
        "state": "started",
        "time_created_ns": int((time.time() - 100) * 1e9),
        "timeout_ms": 1800000,
    }
    return {**entry, **changes}


def test_what_is_under_way_is_read_from_the_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [
        recorded("all_reduce", 1, retired=True, state="completed"),
        recorded("_all_gather_base", 2, state="completed"),
        recorded("_reduce_scatter_base", 3),
        recorded("send 0->1", 3, is_p2p=True, p2p_seq_id=9, process_group=["8", "pipeline:0,1/activations"]),
    ]
    recorder = SimpleNamespace(_dump_nccl_trace_json=lambda **_: json.dumps({"entries": entries}).encode())
    monkeypatch.setattr(stuck_exchanges, "c10d", recorder)
    found = stuck_exchanges.exchange_status()
    assert found.latest == {"7": 3, "8": 9}
    first, second = sorted(found.waiting, key=lambda one: one.group)
    assert (first.kind, first.number, first.num_bytes, first.timeout_s) == ("reduce-scatter", 3, 4096, 1800.0)
    assert (second.kind, second.number, second.name) == ("send 0->1", 9, "pipeline:0,1/activations")
    assert 99 < first.waited_s < 160


def test_an_exchange_that_is_under_way_while_steps_go_on_is_no_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, record = [100.0], {"last_enqueued_collective": 7, "last_completed_collective": 6}
    for name in ("perf_counter", "monotonic"):
        monkeypatch.setattr(time, name, lambda: clock[0])
    monkeypatch.setattr(stuck_exchanges, "_progress", lambda: {"nccl/0": record})
    monkeypatch.setattr(stall_watch, "calls", calls := Calls())
    stalls = StallWatch(Limits(), 1800.0)
    for _ in range(200):
        calls.enter("trainer.step")
        clock[0] += 0.05
        calls.leave()
        assert stalls.check() is None
    calls.enter("trainer.step")
    clock[0] += Limits().slack_s + 1.0
    assert stalls.check() == "look", "the step that waits for it is"


def test_a_recorder_that_a_broken_device_makes_raise_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def dump(**_: bool) -> bytes:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(stuck_exchanges, "c10d", SimpleNamespace(_dump_nccl_trace_json=dump))
    assert stuck_exchanges.exchange_status().waiting == ()


def exchange(group: str, number: int, ranks: tuple[int, ...], *, kind: str = "all-gather") -> Exchange:
    return Exchange(
        group=group,
        name=group,
        ranks=ranks,
        kind=kind,
        number=number,
        num_bytes=12 << 20,
        waited_s=1620,
        timeout_s=1800,
    )


def test_the_message_follows_the_waiting_ranks_to_the_one_that_waits_for_nobody() -> None:
    gradients = exchange("data/gradients", 812, (1, 3, 5, 7))
    activations = exchange("tensor/activations", 40, (6, 7), kind="reduce-scatter")
    here = ExchangeStatus(waiting=(gradients,), latest={})
    statuses = {
        **{rank: here for rank in (1, 3)},
        7: ExchangeStatus(waiting=(activations,), latest={}),
        6: ExchangeStatus(waiting=(), latest={"tensor/activations": 39, "data/gradients": 811}),
    }
    said = {rank: RankStatus.from_json(RankStatus(exchanges=one).as_json()) for rank, one in statuses.items()}
    assert describe_wait(3, said, {}) == (
        "rank 3 has waited 1,620 s in all-gather of 12.0 MiB (number 812 along data/gradients, ranks 1, 3, 5, 7); "
        "rank 1: waiting in it too; rank 5: no answer; "
        "rank 7: waiting in reduce-scatter of 12.0 MiB (number 40 along tensor/activations, ranks 6, 7); "
        "rank 6: in no exchange (its last one along tensor/activations was number 39)"
    )
