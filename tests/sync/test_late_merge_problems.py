"""What is refused of exchanges that are merged later: one clear message each, before the first step."""

from __future__ import annotations

import re
from unittest import mock

import pytest
import torch
from oracle import make_trainer, small_gpt
from ranks import ranks
from torch import nn

from weft.errors import PlanError
from weft.plan.check import check
from weft.plan.late_merges import late_merge_problems
from weft.plan.partition.replicas import in_process_problems
from weft.plan.plan import Axes, Data, Plan
from weft.sync import late_merge
from weft.sync.delayed import DelayedSync
from weft.sync.exchange import in_flight_memory
from weft.sync.exchange.in_flight_memory import USABLE, free_bytes, require_memory


def plan_of(**data: object) -> Plan:
    return Plan(axes=Axes(data=2), data=Data(**{"sync": "delayed", **data}))  # type: ignore[arg-type]


def test_a_delay_longer_than_the_run() -> None:
    (told,) = late_merge_problems(plan_of(every=4, delay=30), total_steps=33)
    assert "merges after step 34 what is first sent after step 4, and the run has 33 steps" in told
    assert list(late_merge_problems(plan_of(every=4, delay=30), total_steps=34)) == []
    streaming = plan_of(sync="local", every=40, fragments=4, delay=20, switch_step=3)
    assert list(late_merge_problems(streaming, total_steps=33)) == []
    (told,) = late_merge_problems(streaming, total_steps=32)
    assert "merges after step 33 what is first sent after step 13" in told


def test_auto_where_nothing_can_be_measured() -> None:
    one = Plan(axes=Axes(data=1), data=Data(sync="delayed", delay="auto"))
    (told,) = check(one, num_ranks=1)
    assert 'delay = "auto" measures how long exchanges between replicas take, and there is one replica' in told
    assert check(plan_of(delay="auto"), num_ranks=2) == []
    (told,) = in_process_problems(plan_of(delay="auto"))
    assert "in process they take no time" in told
    (told,) = check(plan_of(sync="local", every=2, delay="auto"), num_ranks=2)
    assert 'set a number of steps, or [data] sync = "delayed"' in told


def test_a_fragment_that_is_sent_again_before_it_is_merged() -> None:
    assert len(check(plan_of(sync="local", every=4, delay=4), num_ranks=2)) == 1
    assert check(plan_of(sync="local", every=4, delay=3), num_ranks=2) == []


@ranks(2)
@pytest.mark.parametrize(("fragments", "model"), [(3, small_gpt(num_layers=2)), (2, nn.Linear(4, 3))])
def test_more_fragments_than_blocks(fragments: int, model: nn.Module) -> None:
    plan = plan_of(sync="local", every=8, fragments=fragments)
    num_blocks = 2 if fragments == 3 else 0
    with pytest.raises(PlanError, match=f"fragments = {fragments}.* the model has {num_blocks};"):
        make_trainer(model, plan)


@pytest.mark.parametrize(
    ("data", "remedy"),
    [
        ({"delay": 400}, r"set \[data\] delay to 200 or less, or every to 2 or more, or offload = true$"),
        ({"delay": 400, "offload": True}, r"delay to 200 or less, or every to 2 or more$"),
        (
            {"sync": "local", "every": 4, "fragments": 2, "delay": 2},
            r"set \[data\] fragments higher, or offload = true$",
        ),
        ({"sync": "local", "every": 4, "fragments": 4, "delay": 2}, r"set \[data\] offload = true$"),
    ],
)
def test_what_would_help_where_memory_is_short(data: dict[str, object], remedy: str) -> None:
    plan = plan_of(**data)
    with (
        mock.patch.object(in_flight_memory, "gather_values", side_effect=lambda mine, _: [mine]),
        mock.patch.object(in_flight_memory, "in_flight_bytes", return_value=2 << 30),
        pytest.raises(PlanError, match=remedy),
    ):
        require_memory([], plan, int((1 << 30) / USABLE) + 1, mock.Mock(), can_move=not plan.data.offload)


def test_memory_that_a_step_needs_later_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, mib = torch.device("cpu"), 1 << 20
    status = {"VmHWM": "3072 kB", "VmRSS": "1024 kB"}
    monkeypatch.setattr(in_flight_memory, "read_proc", lambda file, key: status[key])
    monkeypatch.setattr(in_flight_memory, "available_bytes", lambda: 20 * mib)
    assert free_bytes(cpu, num_sharing=4) == 5 * mib
    assert free_bytes(cpu, num_sharing=4, at_peak=True) == 3 * mib
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (20 * mib, 99 * mib))
    for name, number in (("memory_reserved", 9), ("memory_allocated", 4), ("max_memory_allocated", 7)):
        monkeypatch.setattr(torch.cuda, name, lambda device, number=number: number * mib)
    assert free_bytes(torch.device("cuda"), num_sharing=1) == 25 * mib
    assert free_bytes(torch.device("cuda"), num_sharing=2, at_peak=True) == 12 * mib


@ranks(2)
def test_exchanges_under_way_that_do_not_fit_into_memory() -> None:
    """One rank alone has too little; all of them say so."""
    import torch.distributed as dist

    free = 4_000_000 if dist.get_rank() == 0 else 3_000_000
    with mock.patch.object(late_merge, "free_bytes", return_value=free):
        with pytest.raises(PlanError) as refused:
            make_trainer(small_gpt(), plan_of(delay=400))
        found = re.search(
            r"keeps 400 exchanges under way, (\S+) MiB on rank 1, .* set \[data\] delay to (\d+)", str(refused)
        )
        assert found and float(found[1]) > 3
        assert "offload" not in str(refused.value), "it is in host memory already"
        fits = int(found[2])
        trainer = make_trainer(small_gpt(), plan_of(delay=fits))
        assert isinstance(trainer.sync, DelayedSync) and fits <= trainer.sync.further_delay_that_fits() < 400
        trainer.close()
        with pytest.raises(PlanError):
            make_trainer(small_gpt(), plan_of(delay=2 * fits))
