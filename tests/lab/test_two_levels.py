"""Two emulated hosts of two ranks each: training equals one process, and what crosses between them is foreseen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from emulated import Ended, needs_lab, run_script

from weft.plan.partition.wire import between_hosts_bytes

pytestmark = needs_lab

NUMEL = 1_000_000
SCRIPT = f"""
import functools, json, sys
import torch
import weft
from weft.comm.collectives import all_gather, all_reduce, reduce_scatter
from weft.mesh import make_mesh
from weft.world import join_world, leave_world
from weft.models.gpt import GPT, GPTConfig
from weft.plan.plan import Axes, Comm, Data, Plan

torch.set_num_threads(1)
transport = sys.argv[1]
world = join_world("cpu")
plan = Plan(axes=Axes(data=4), comm=Comm(transport=transport))
group = make_mesh(plan, world, groups=[("data", "test")]).group("data", "test")
whole, part = torch.full(({NUMEL},), float(world.rank)), torch.empty({NUMEL} // 4)
all_reduce(whole, group)
reduce_scatter(part, whole, group)
all_gather(whole, part, group)
assert bool((whole == 24.0).all()), whole
leave = {{"hosts": world.hosts, "levels": group.levels is not None}}
if transport == "auto":
    text = torch.randint(17, (6, 9), generator=torch.Generator().manual_seed(0))
    for shard in ("nothing", "parameters"):
        torch.manual_seed(0)
        outcome = weft.verify(
            GPT(GPTConfig(vocab_size=17, context=8, num_layers=2, hidden=16, heads=2, mlp_hidden=24)),
            Plan(axes=Axes(data=4), data=Data(shard=shard)),
            loss="cross-entropy",
            optimizer=functools.partial(torch.optim.AdamW, lr=1e-3),
            batches=[(text[:, :-1], text[:, 1:])],
            device="cpu",
        )
        outcome.require()
        leave[shard] = outcome.ok
if world.rank == 0:
    print(json.dumps(leave))
leave_world()
"""


def run(folder: Path, transport: str) -> tuple[Ended, dict[str, object]]:
    folder.mkdir()
    flags = ("--hosts", "2", "--ranks-per-host", "2", "--bandwidth", "1Gbit", "--delay", "1ms")
    ended = run_script(folder, SCRIPT, *flags, words=[transport])
    assert ended.code == 0, ended.stderr
    return ended, json.loads(ended.stdout.splitlines()[-1])


def predicted(num_levels: int) -> float:
    return sum(
        between_hosts_bytes(each, 4 * NUMEL, num_hosts=2, ranks_per_host=2, num_levels=num_levels)
        for each in ("all-reduce", "reduce-scatter", "all-gather")
    )


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("transport", "num_levels"), [("auto", 2), pytest.param("c10d", 1, marks=pytest.mark.long)], ids=["two", "one"]
)
@pytest.mark.long
def test_what_crosses_between_hosts_in_two_levels_and_in_one(tmp_path: Path, transport: str, num_levels: int) -> None:
    """In two levels training equals one process too, and an all-reduce, a reduce-scatter and an all-gather together
    send 2 instead of 3.5 times their size."""
    assert predicted(2) == 2 * 4 * NUMEL and predicted(1) == 3.5 * 4 * NUMEL
    ended, said = run(tmp_path / transport, transport)
    assert said["hosts"] == [0, 0, 1, 1] and said["levels"] is (num_levels == 2)
    if num_levels == 2:
        assert said["nothing"] is True and said["parameters"] is True
    for source, target in ((0, 1), (1, 0)):
        crossed = ended.pair(source, target)["bytes"]
        # Beyond the exchanges: headers, connections, and in two levels three small trainings.
        assert predicted(num_levels) <= crossed <= 1.05 * predicted(num_levels) + 400_000
