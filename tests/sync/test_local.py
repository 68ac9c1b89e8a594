"""Local steps on real ranks against a loop written by hand: several models in one process, averaged by the rule."""

from __future__ import annotations

import copy
import dataclasses
from unittest import mock

import pytest
import torch
from oracle import ADAMW, SGD, MakeOptimizer, batch_of, cut_evenly, make_trainer
from ranks import ranks
from torch import Tensor, nn

from weft.comm.objects import gather_values
from weft.plan.late_merges import exchanges_after
from weft.plan.plan import Axes, Data, Plan
from weft.sync.local import LocalSync

NUM_STEPS = 7


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def train_by_hand(
    data: Data, num_replicas: int, optimizer: MakeOptimizer, batches: list[tuple[Tensor, Tensor]]
) -> list[list[nn.Module]]:
    """The replicas after every step."""
    replicas = [model_of() for _ in range(num_replicas)]
    optimizers = [optimizer(replica.parameters()) for replica in replicas]
    anchor = model_of()
    outer = torch.optim.SGD(
        anchor.parameters(), lr=data.outer_lr, momentum=data.outer_momentum, nesterov=data.outer_momentum > 0
    )
    seen = []
    for step, batch in enumerate(batches, start=1):
        for number, (replica, inner) in enumerate(zip(replicas, optimizers, strict=True)):
            inner.zero_grad()
            inputs, targets = cut_evenly(batch, num_replicas)[number]
            nn.functional.cross_entropy(replica(inputs), targets).backward()
            inner.step()
        if exchanges_after(data, step):
            with torch.no_grad():
                for old, *new in zip(anchor.parameters(), *(one.parameters() for one in replicas), strict=True):
                    mean = torch.stack(list(new)).mean(0)
                    old.grad = old - mean
                    if data.outer == "average":
                        old.copy_(mean)
            if data.outer == "nesterov":
                outer.step()
            for replica in replicas:
                replica.load_state_dict(anchor.state_dict())
        seen.append(copy.deepcopy(replicas))
    return seen


@pytest.mark.sampled(3)
@ranks(4)
@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=["sgd", "adamw"])
@pytest.mark.parametrize(
    "data",
    [
        Data(sync="local", every=3, check_every=0),
        Data(sync="local", every=2, switch_step=3, check_every=0),
        Data(sync="local", every=3, outer="nesterov", outer_lr=0.7, outer_momentum=0.9, check_every=0),
    ],
    ids=["average", "switch", "nesterov"],
)
@pytest.mark.parametrize("sharded", [False, True])
def test_local_steps_follow_the_rule(data: Data, optimizer: MakeOptimizer, sharded: bool) -> None:
    axes = Axes(replicate=2, data=2) if sharded else Axes(data=4)
    data = dataclasses.replace(data, shard="parameters") if sharded else data
    trainer = make_trainer(model_of(), Plan(axes=axes, data=data), optimizer=optimizer)
    num_replicas = trainer.mesh.num_replicas
    batches = [batch_of(8, seed) for seed in range(NUM_STEPS)]
    expected = train_by_hand(data, num_replicas, optimizer, batches)
    for step, batch in enumerate(batches, start=1):
        trainer.step(*cut_evenly(batch, trainer.data_size)[trainer.data_rank])
        mine = dict(expected[step - 1][trainer.mesh.replica].named_parameters())
        for piece in trainer.sync.pieces:
            first, last = piece.layout.flat_range or (0, mine[piece.name].numel())
            true = mine[piece.name].detach().flatten()[first:last]
            torch.testing.assert_close(piece.tensor.detach().flatten(), true, rtol=1e-11, atol=1e-13)
        assert trainer.sync.agrees == exchanges_after(data, step)


@ranks(3)
def test_replicas_are_equal_to_the_bit_after_an_exchange_and_differ_before() -> None:
    data = Data(sync="local", every=2, outer="nesterov", outer_lr=0.7, outer_momentum=0.9, check_every=0)
    trainer = make_trainer(model_of().float(), Plan(axes=Axes(data=3), data=data), optimizer=ADAMW)
    assert isinstance(trainer.sync, LocalSync)
    for step in range(1, 5):
        inputs, targets = cut_evenly(batch_of(9, step), 3)[trainer.data_rank]
        trainer.step(inputs.float(), targets)
        group = trainer.mesh.between_replicas("control")
        found = gather_values([p.detach().flatten().tolist() for p in trainer.model.parameters()], group)
        assert all(one == found[0] for one in found) == (step % 2 == 0)
    assert trainer.sync.spread is not None and 0 < float(trainer.sync.spread) < 1


@ranks(2)
def test_a_gpu_has_read_the_mean_before_the_host_overwrites_it() -> None:
    """With `[data] offload` masters are in page-locked memory, which a GPU copies when it comes to it."""
    plan = Plan(axes=Axes(data=2), data=Data(sync="local", every=4, check_every=0))
    trainer = make_trainer(model_of(), plan)
    trainer.step(*cut_evenly(batch_of(8), 2)[trainer.data_rank])

    def copies() -> list[Tensor]:
        return [piece.tensor.detach().clone() for piece in trainer.sync.pieces]

    own, waited = copies(), list[list[Tensor]]()
    with (
        mock.patch.object(torch.Tensor, "is_pinned", lambda _: True),
        mock.patch("torch.cuda.synchronize", lambda: waited.append(copies())),
        trainer.sync.consensus(),
    ):
        mean = copies()
    assert len(waited) == 1 and all(map(torch.equal, waited[0], mean))
    assert all(map(torch.equal, copies(), own)) and not all(map(torch.equal, mean, own))
