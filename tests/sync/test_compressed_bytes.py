"""The bytes that a step with a codec sends equal what `plan/exchange/` predicts, by axis, to the byte."""

from __future__ import annotations

from dataclasses import replace

import pytest
from oracle import SGD, Batch, cut_evenly, make_trainer, small_gpt, token_batch
from ranks import ranks

from weft.plan.exchange.compression import Compression, bytes_of_steps, dense_bytes, exchanging_axes
from weft.plan.exchange.gradient_exchange import CodecGroups, CodedValues, coded_bytes
from weft.plan.exchange.coded_tensor import coded_tensors
from weft.plan.plan import CODECS, Axes, Codec, Comm, Data, Plan, Precision
from weft.training.exchanged_bytes import predicted_compression, sent_bytes_of_step
from weft.training.trainer import Trainer

SETTINGS: dict[str, dict[str, object]] = {
    "topk": {"density": 0.05, "bits": 8},
    "dgc": {"density": 0.05},
    "powersgd": {"rank": 2},
    "qsgd": {"levels": 16},
}
WARM_UP = 2


def codec_of(name: str, **changes: object) -> Codec:
    plain = {} if name == "half" else {"dense_below": 300, "warmup_steps": WARM_UP}
    return Codec(name=name, **{**plain, **SETTINGS.get(name, {}), **changes})


def check_bytes(plan: Plan, *, num_steps: int = WARM_UP + 2, batch: Batch | None = None) -> Trainer:
    """Every step sends what is predicted, those of the warm-up too."""
    tokens = token_batch(8) if batch is None else batch
    trainer = make_trainer(small_gpt(), plan, example=tokens[0][:1])
    axes = exchanging_axes(plan)
    total = 0
    for step in range(num_steps):
        before = {axis: one.sent_bytes for axis, one in trainer.mesh.traffic.items()}
        trainer.step(*cut_evenly(tokens, trainer.data_size)[trainer.data_rank])
        sent = {axis: trainer.mesh.traffic[axis].sent_bytes - before.get(axis, 0) for axis in axes if axis in before}
        if step > 1 or plan.replica_axis is not None:  # by then the order of buckets is agreed
            predicted = sent_bytes_of_step(trainer.parts, step=step)
            assert sent == {axis: predicted.get(axis, 0) for axis in sent}, f"step {step}"
        total += sum(sent.values())
    if plan.axes.num_ranks == 2:
        assert abs(predicted_compression(trainer.parts, num_steps=num_steps).sent_bytes - total) < 100
    return trainer


@ranks(2)
@pytest.mark.parametrize("name", [name for name in CODECS if name != "half"])  # which is for local steps
def test_a_step_sends_what_is_predicted(name: str) -> None:
    check_bytes(Plan(axes=Axes(data=2), data=Data(check_every=0), codec=codec_of(name), comm=Comm(bucket_bytes=6000)))
