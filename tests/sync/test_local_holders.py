"""Copies of one weight on several ranks of a replica stay equal to the bit, whatever groups they are exchanged in."""

from __future__ import annotations

import pytest
from oracle import ADAMW, cut_evenly, make_trainer, small_gpt, token_batch
from ranks import ranks

from weft.plan.plan import Axes, Codec, Comm, Data, Plan, Step

AVERAGE = Data(sync="local", every=2, check_every=1)
DILOCO = Data(sync="local", every=2, outer="nesterov", outer_lr=0.7, outer_momentum=0.9, check_every=1)


@ranks(6)
@pytest.mark.parametrize(
    ("data", "codec"),
    [(AVERAGE, "none"), pytest.param(DILOCO, "half", marks=pytest.mark.long)],
    ids=["average", "diloco in 16 bits"],
)
def test_a_weight_that_two_stages_hold_is_the_same_on_both(data: Data, codec: str) -> None:
    # The sums of three replicas depend on the place in the message, which differs between these stages.
    plan = Plan(
        axes=Axes(data=3, pipeline=2), data=data, codec=Codec(name=codec), step=Step(microbatches=2),
        comm=Comm(transport="c10d"),
    )  # fmt: skip
    batches = [token_batch(12, seed=seed) for seed in range(4)]
    model = small_gpt(num_layers=3, vocab_size=500)
    trainer = make_trainer(model, plan, optimizer=ADAMW, example=batches[0][0][:2])
    for batch in batches:
        trainer.step(*cut_evenly(batch, trainer.data_size)[trainer.data_rank])  # checks after every exchange
