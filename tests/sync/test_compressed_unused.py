"""A compressed parameter that no rank uses in a step, and codecs without counterparts: what is sent must be applied."""

from __future__ import annotations

import functools

import pytest
import torch
from meshes import verify
from oracle import batch_of, cut_evenly, make_trainer
from ranks import gathered, ranks
from torch import Tensor, nn

from weft.plan.plan import Axes, Codec, Data, Plan
from weft.sync.make import ONE_REPLICA

pytestmark = pytest.mark.long

PLANS = {"data": Plan(axes=Axes(data=2)), "zero-1": Plan(axes=Axes(replicate=2), data=Data(shard="optimizer"))}
CODECS = {
    "topk": Codec(name="topk", density=0.1, dense_below=1),
    "onebit": Codec(name="onebit", dense_below=1),
    "powersgd": Codec(name="powersgd", rank=1, dense_below=1),
    "sign": Codec(name="sign", dense_below=1),
}


class Sometimes(nn.Module):
    """A layer that is used for some batches, and one that never is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.never = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)
        self.double()

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(inputs))
        return self.head(self.second(hidden) if bool((inputs[:, 0] > 0).all()) else hidden)


def batch(*, uses: bool) -> tuple[Tensor, Tensor]:
    inputs, targets = batch_of(8)
    inputs[:, 0] = 1.0 if uses else -1.0
    return inputs, targets


@ranks(2)
@pytest.mark.parametrize("shape", PLANS)
@pytest.mark.parametrize("name", CODECS)
def test_what_is_sent_of_a_parameter_that_no_rank_uses_is_applied(name: str, shape: str) -> None:
    plan = Plan(axes=PLANS[shape].axes, data=PLANS[shape].data, codec=CODECS[name])
    torch.manual_seed(0)
    optimizer = functools.partial(torch.optim.SGD, lr=0.5, weight_decay=0.1)
    with make_trainer(Sometimes(), plan, optimizer=optimizer) as trainer:
        exchange = trainer.sync.compressed
        assert exchange is not None
        weights = {piece.name: piece.tensor for piece in trainer.sync.pieces}
        weight, never = weights["second.weight"], weights["never.weight"].detach().clone()

        def waiting() -> Tensor:
            """Over all replicas, in the unit of updates."""
            kept = exchange.tensors()["residual/second.weight"] * float(exchange.keep)
            return torch.tensor(gathered(kept.tolist()), dtype=torch.float64).sum(0)

        def step(*, uses: bool = False) -> None:
            trainer.step(*cut_evenly(batch(uses=uses), 2)[trainer.data_rank])

        step(uses=True)
        for _ in range(2):
            before = weight.detach().clone().flatten()
            if name == "sign":  # nothing is kept, and zeros have no vote
                step()
                assert torch.equal(weight.detach().flatten(), before)
                continue
            old = waiting()
            step()
            sent = (before * (1 - 0.5 * 0.1) - weight.detach().flatten()) / 0.5
            torch.testing.assert_close(sent, old - waiting(), rtol=1e-9, atol=1e-12)
            assert sent.any()
        assert torch.equal(weights["never.weight"], never)


@ranks(2)
@pytest.mark.parametrize("name", ["topk", "sign"])
def test_the_oracle_applies_it_too(name: str) -> None:
    plan = Plan(axes=Axes(data=2), codec=CODECS[name])
    optimizer = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1)
    batches = [batch(uses=uses) for uses in (True, False, False, True, False)]
    torch.manual_seed(0)
    verify(Sometimes(), plan, loss="cross-entropy", optimizer=optimizer, batches=batches, device="cpu").require()


@pytest.mark.parametrize("name", ["topk", "sign"])
def test_a_codec_without_counterparts_says_that_it_has_no_effect(name: str, caplog: pytest.LogCaptureFixture) -> None:
    plan = Plan(codec=CODECS[name])
    with caplog.at_level("WARNING", logger="weft"), make_trainer(Sometimes(), plan) as trainer:
        trainer.step(*batch_of(8))
    assert [record.message for record in caplog.records] == [ONE_REPLICA.format(name=name)]
