"""Local steps whose exchange travels in 16 bits, against the rule: the change since the last exchange is rounded, added
up in bfloat16, and nothing of what the rounding lost is kept."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from oracle import SGD, batch_of, cut_evenly, make_trainer
from ranks import ranks
from torch import Tensor, nn

from weft.comm.objects import gather_values
from weft.errors import PlanError
from weft.plan.plan import Axes, Codec, Comm, Data, Plan
from weft.sync.exchange.outer import average_, nesterov_
from weft.training.parallelize import parallelize

HALF = Codec(name="half")
AVERAGE = Data(sync="local", every=2, check_every=0)
NESTEROV = replace(AVERAGE, outer="nesterov", outer_lr=0.7, outer_momentum=0.9)


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def train_by_hand(data: Data, batches: list[tuple[Tensor, Tensor]]) -> nn.Module:
    """Two replicas in one process; an exchange after the last step."""
    anchor, momenta = model_of(), [torch.zeros_like(one) for one in model_of().parameters()]
    replicas = [copy.deepcopy(anchor) for _ in range(2)]
    optimizers = [SGD(replica.parameters()) for replica in replicas]
    for step, batch in enumerate(batches, start=1):
        for replica, optimizer, part in zip(replicas, optimizers, cut_evenly(batch, 2), strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(replica(part[0]), part[1]).backward()
            optimizer.step()
        if step % data.every == 0:
            with torch.no_grad():
                for old, momentum, *new in zip(
                    anchor.parameters(), momenta, *(one.parameters() for one in replicas), strict=True
                ):
                    first, second = ((old - one).bfloat16() for one in new)
                    change = (first + second).double() / 2
                    if data.outer == "nesterov":
                        nesterov_(old, change, momentum, rate=data.outer_lr, beta=data.outer_momentum)
                    else:
                        average_(old, change)
                for replica in replicas:
                    replica.load_state_dict(anchor.state_dict())
    return anchor


@ranks(2)
@pytest.mark.parametrize("data", [AVERAGE, NESTEROV], ids=["average", "nesterov"])
def test_the_change_travels_in_16_bits(data: Data) -> None:
    plan = Plan(axes=Axes(data=2), data=data, codec=HALF, comm=Comm(bucket_bytes=100))
    trainer = make_trainer(model_of(), plan)
    batches = [batch_of(8, seed) for seed in range(4)]
    expected = train_by_hand(data, batches)
    for batch in batches:
        trainer.step(*cut_evenly(batch, 2)[trainer.data_rank])
    for found, true in zip(trainer.model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found, true, rtol=1e-12, atol=1e-14)
    exact = make_trainer(model_of(), replace(plan, codec=Codec()))
    for batch in batches:
        exact.step(*cut_evenly(batch, 2)[exact.data_rank])
    pairs = list(zip(trainer.model.parameters(), exact.model.parameters(), strict=True))
    assert all(0 < (found - true).abs().max() < 1e-3 for found, true in pairs)


@ranks(4)
def test_replicas_end_with_the_same_bits() -> None:
    data = replace(NESTEROV, shard="parameters", every=1)
    trainer = make_trainer(model_of().float(), Plan(axes=Axes(replicate=2, data=2), data=data, codec=HALF))
    inputs, targets = cut_evenly(batch_of(8, 0), 4)[trainer.data_rank]
    trainer.step(inputs.float(), targets)
    pieces = [piece.tensor.tolist() for piece in trainer.sync.pieces]
    first, *others = gather_values(pieces, trainer.mesh.between_replicas("control"))
    assert others == [first]


def test_complex_weights_are_refused() -> None:
    class Waves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.phases = nn.Parameter(torch.zeros(3, dtype=torch.complex64))

    with pytest.raises(PlanError) as refusal:
        parallelize(
            Waves(), Plan(data=AVERAGE, codec=HALF), loss="cross-entropy", optimizer=torch.optim.SGD, device="cpu"
        )
    assert list(refusal.value.problems) == [
        '[codec] name = "half" makes messages of real numbers, and "phases" is complex; set [codec] name = "none", or '
        "store real and imaginary parts"
    ]
