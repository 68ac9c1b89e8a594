"""A trainer that is dropped lets go of its model and of all memory, though autograd keeps the hooks it registered."""

from __future__ import annotations

import gc
import weakref

import pytest
from oracle import cut_evenly, data_plan, make_trainer, small_gpt, token_batch
from ranks import ranks


@pytest.mark.sampled(2)
@ranks(2)
@pytest.mark.parametrize("shard", ["nothing", "optimizer", "gradients", "parameters"])
def test_nothing_is_kept_alive(shard: str) -> None:
    trainer = make_trainer(small_gpt(), data_plan(2, shard=shard))
    watched = [weakref.ref(thing) for thing in (trainer.model, trainer.sync, *trainer.model.parameters())]
    for _ in range(2):
        trainer.step(*cut_evenly(token_batch(4), 2)[trainer.data_rank])
    del trainer
    gc.collect()
    assert [reference() for reference in watched] == [None] * len(watched)
