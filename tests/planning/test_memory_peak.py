"""Predicted memory against real ranks: every tensor that a trainer keeps, and what the system says a process took."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import gc
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from oracle import small_convnet
from process_memory import PeakPss, read_pss_bytes
from ranks import ranks
from served_training import server_plan
from torch import nn

from weft.comm.shared_memory.arena import Arena
from weft.comm.shared_memory.barrier import Barrier
from weft.measure.model import profile_model
from weft.models.gpt import GPT, GPTConfig
from weft.plan.late_merges import steps_to_verify
from weft.plan.plan import Axes, Codec, Comm, Data, Plan, Precision, Step
from weft.planning.memory import Memory, predict_memory
from weft.training.parallelize import parallelize
from weft.training.trainer import Trainer

SHARDS = ("nothing", "optimizer", "gradients", "parameters")
HALF = Precision(compute="bf16", accumulate="bf16", reduce="bf16")

LARGE = GPTConfig(vocab_size=32000, context=256, num_layers=13, hidden=1024, heads=16)
"""196 million parameters."""
MIDDLING = GPTConfig(vocab_size=12000, context=128, num_layers=8, hidden=512, heads=8)
"""31 million."""
SIZES = [pytest.param(MIDDLING, id="31 million"), pytest.param(LARGE, id="196 million", marks=pytest.mark.full)]


def live_bytes() -> float:
    """Bytes of all storages that some tensor in this process uses; of memory that ranks have in common, its share."""
    while gc.collect():  # what a finalizer lets go of is found by the next pass
        pass
    things = gc.get_objects()
    arenas = [thing for thing in things if type(thing) is Arena]
    windows = [arena._rows[0] for arena in arenas]  # on all of a segment, whose tensors are counted by themselves
    windows += [thing._slot_memory for thing in things if type(thing) is Barrier]
    skipped = {window.untyped_storage()._cdata for window in windows}
    # Of plain tensors: what a compiler keeps of an earlier test is fake, and has no memory.
    tensors = [thing for thing in things if type(thing) in (torch.Tensor, nn.Parameter)]
    tensors.sort(key=torch.numel)  # the largest one stands for its storage: an empty one has no address to find it by
    found = {tensor.untyped_storage()._cdata: tensor for tensor in tensors}
    total = 0.0
    for key, tensor in found.items():
        sharing = [len(arena._rows) for arena in arenas if arena.is_common and arena.offset_of(tensor) is not None]
        total += 0 if key in skipped else tensor.untyped_storage().nbytes() / (sharing or [1])[0]
    return total


def text_batch(config: GPTConfig, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    text = torch.randint(config.vocab_size, (samples, config.context + 1))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


Make = Callable[..., torch.optim.Optimizer]
ADAMW: Make = functools.partial(torch.optim.AdamW, lr=1e-4)


def train(
    model: nn.Module, plan: Plan, inputs: torch.Tensor, targets: torch.Tensor, optimizer: Make = ADAMW
) -> Trainer:
    """Two steps: the second one finds all that the first has made. More where exchanges are under way over several: all
    fragments of the model have been sent and merged then, and memory of merged ones is in use again."""
    trainer = parallelize(model, plan, loss="cross-entropy", optimizer=optimizer, device="cpu")
    for _ in range(max(steps_to_verify(plan), 2)):
        float(trainer.step(inputs, targets))
    return trainer


def predict(model: nn.Module, plan: Plan, inputs: torch.Tensor, targets: torch.Tensor, moments: float = 8.0) -> Memory:
    """For the microbatches into which the plan cuts this batch."""
    samples = len(inputs) // plan.step.microbatches
    profile = profile_model(model, inputs[:samples], targets[:samples], compute=plan.precision.compute)
    return predict_memory(plan, profile, optimizer_bytes_per_parameter=moments)


def check_account(
    make: Callable[[], nn.Module],
    plan: Plan,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    *,
    optimizer: Make = ADAMW,
    moments: float = 8.0,
) -> None:
    """What is there after a step and was not before is the state, and buffers kept for the next exchanges."""
    before = live_bytes()
    model = make()
    predicted = predict(model, plan, inputs, targets, moments)
    # Closed at the end, so that no thread of its groups still holds memory when the next account begins.
    with train(model, plan, inputs, targets, optimizer) as trainer:
        if trainer.sync.flats:
            trainer.sync.begin()  # lets go of gradients that were cast for the update
        found = live_bytes() - before
    kept = predicted.state + predicted.gradient_buffers + predicted.exchange_buffers
    assert found == pytest.approx(kept, rel=0.02), predicted.table()


SMALL = GPTConfig(vocab_size=64, context=16, num_layers=4, hidden=64, heads=2, mlp_hidden=200)


@ranks(2)
def test_a_worker_of_servers_keeps_no_state_of_the_optimizer() -> None:
    plan = server_plan(2, shards=2, bucket_bytes=100_000, microbatches=2)  # gradients are there all the time
    inputs, targets = text_batch(SMALL, 4)
    predicted, alone = (predict(GPT(SMALL), one, inputs, targets) for one in (plan, Plan()))
    assert predicted.optimizer == 0 < alone.optimizer and predicted.parameters == alone.parameters
    assert predicted.exchange_buffers == predicted.outer == 0
    check_account(lambda: GPT(SMALL), plan, inputs, targets)


LONG = pytest.mark.long
KEPT = [
    *[
        pytest.param(shard, Precision(), id=f"{shard}-fp32", marks=[] if shard in ("nothing", "parameters") else LONG)
        for shard in SHARDS
    ],
    *[
        pytest.param(shard, precision, id=f"{shard}-{name}", marks=[] if shard == "parameters" else LONG)
        for shard in SHARDS
        for name, precision in (("bf16", Precision(compute="bf16")), ("bf16-only", HALF))
    ],
]
WAITING = [pytest.param(shard, marks=[] if shard in ("nothing", "parameters") else LONG) for shard in SHARDS]


@pytest.mark.long
@pytest.mark.sampled(1, long=3)
@ranks(2)
@pytest.mark.parametrize(("shard", "precision"), KEPT)
def test_every_tensor_a_trainer_keeps(shard: str, precision: Precision) -> None:
    plan = Plan(axes=Axes(data=2), data=Data(shard=shard), precision=precision, comm=Comm(bucket_bytes=60_000))
    check_account(lambda: GPT(SMALL), plan, *text_batch(SMALL, 2))


@pytest.mark.long
@pytest.mark.sampled(1)
@ranks(2)
@pytest.mark.parametrize(
    ("shard", "reshard"),
    [("gradients", "step"), pytest.param("parameters", "step", marks=LONG), ("parameters", "microbatch")],
)
def test_every_tensor_that_is_kept_over_microbatches(shard: str, reshard: str) -> None:
    def make() -> nn.Module:
        model = GPT(dataclasses.replace(SMALL, tied=False))
        model.blocks[1].requires_grad_(False)
        return model

    plan = Plan(
        axes=Axes(data=2),
        data=Data(shard=shard, reshard=reshard),
        step=Step(microbatches=3),
        comm=Comm(bucket_bytes=60_000),
    )
    check_account(make, plan, *text_batch(SMALL, 3))


@ranks(4)
@pytest.mark.long
@pytest.mark.parametrize("shard", SHARDS[1:])
def test_every_tensor_of_hybrid_sharding(shard: str) -> None:
    plan = Plan(axes=Axes(data=2, replicate=2), data=Data(shard=shard), precision=Precision(compute="bf16"))
    check_account(lambda: GPT(SMALL), plan, *text_batch(SMALL, 2))


DILOCO = Data(sync="local", every=2, outer="nesterov", outer_lr=0.7, outer_momentum=0.9)
EXCHANGING = {
    "average": Plan(axes=Axes(data=2), data=Data(sync="local", every=2)),
    "nesterov": Plan(axes=Axes(data=2), data=DILOCO),
    "half": Plan(axes=Axes(data=2), data=DILOCO, codec=Codec(name="half")),
    "delayed": Plan(axes=Axes(data=2), data=Data(sync="delayed", delay=2)),
    "delayed by one": Plan(axes=Axes(data=2), data=Data(sync="delayed", delay=1)),
    "streaming": Plan(axes=Axes(data=2), data=dataclasses.replace(DILOCO, every=4, fragments=2, delay=2, mix=0.5)),
    "streaming, onebit": Plan(
        axes=Axes(data=2),
        data=dataclasses.replace(DILOCO, every=4, fragments=2, delay=2),
        codec=Codec(name="onebit"),
    ),
    "streaming after steps together, topk": Plan(
        axes=Axes(data=2),
        data=dataclasses.replace(DILOCO, every=2, delay=1, switch_step=1),
        codec=Codec(name="topk"),
    ),
    "delayed, topk": Plan(axes=Axes(data=2), data=Data(sync="delayed", delay=2), codec=Codec(name="topk")),
    "delayed, powersgd": Plan(axes=Axes(data=2), data=Data(sync="delayed", delay=2), codec=Codec(name="powersgd")),
}


@ranks(2)
@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name == "half" else LONG) for name in EXCHANGING])
def test_every_tensor_of_replicas_that_differ(name: str) -> None:
    plan = dataclasses.replace(EXCHANGING[name], comm=Comm(bucket_bytes=60_000))
    check_account(lambda: GPT(SMALL), plan, *text_batch(SMALL, 2))


@pytest.mark.long
@ranks(4)
def test_every_tensor_of_sharded_replicas_that_differ() -> None:
    data = dataclasses.replace(DILOCO, shard="parameters")
    plan = Plan(axes=Axes(data=2, replicate=2), data=data, comm=Comm(bucket_bytes=60_000))
    check_account(lambda: GPT(SMALL), plan, *text_batch(SMALL, 2))


CODECS = {
    "topk": Codec(name="topk", density=0.05),
    "dgc": Codec(name="dgc", density=0.05),
    "onebit": Codec(name="onebit"),
    "powersgd": Codec(name="powersgd", rank=2),
    "qsgd": Codec(name="qsgd", levels=16),
}


def coded_account(name: str, plan: Plan) -> None:
    """SGD without momentum, as DGC wants it, so that what codecs keep is a larger part of all."""
    plan = dataclasses.replace(plan, codec=CODECS[name], comm=Comm(bucket_bytes=60_000))
    sgd = functools.partial(torch.optim.SGD, lr=1e-3)
    check_account(lambda: GPT(SMALL), plan, *text_batch(SMALL, 2), optimizer=sgd, moments=0.0)


@pytest.mark.long
@pytest.mark.sampled(1, long=3)
@ranks(2)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ("dgc", "powersgd") else LONG) for name in CODECS]
)
def test_every_tensor_that_codecs_keep(name: str) -> None:
    coded_account(name, Plan(axes=Axes(data=2)))


@ranks(2)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "topk" else LONG) for name in CODECS if name != "dgc"]
)
def test_every_tensor_that_codecs_of_local_steps_keep(name: str) -> None:
    coded_account(name, Plan(axes=Axes(data=2), data=Data(sync="local", every=2)))


@pytest.mark.sampled(long=4)
@LONG
@ranks(4)
@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("shard", SHARDS[1:])
def test_every_tensor_that_codecs_over_replicas_keep(shard: str, name: str) -> None:
    coded_account(name, Plan(axes=Axes(data=2, replicate=2), data=Data(shard=shard)))


@pytest.mark.sampled(long=3)
@pytest.mark.long
@ranks(2)
@pytest.mark.parametrize("shard", WAITING)
def test_every_tensor_of_a_model_whose_layers_wait_for_other_ranks(shard: str) -> None:
    """With synchronised BatchNorm no reduction is waited for before the backward pass is over."""
    plan = Plan(axes=Axes(data=2), data=Data(shard=shard), comm=Comm(bucket_bytes=30_000))
    images, classes = torch.randn(4, 1, 6, 6), torch.randint(5, (4,))
    check_account(lambda: small_convnet(width=16, num_blocks=4), plan, images, classes)


def trim_malloc() -> None:
    """Let glibc give freed memory back at once: what is predicted is what is alive, not what a C library keeps."""
    m_mmap_threshold = -3
    assert ctypes.CDLL(None).mallopt(m_mmap_threshold, 1 << 16) == 1


def check_peak(plan: Plan, config: GPTConfig, *, optimizer: Make = ADAMW, moments: float = 8.0) -> None:
    trim_malloc()
    train(GPT(SMALL), plan, *text_batch(SMALL, 1), optimizer)  # libraries and transport are there from now on
    batch = text_batch(config, 1)
    with torch.device("meta"):
        predicted = predict(GPT(config), plan, *batch, moments)
    gc.collect()
    before = read_pss_bytes()
    dist.barrier()
    with PeakPss() as watched:
        train(GPT(config), plan, *batch, optimizer)
        dist.barrier()
    assert predicted.total == pytest.approx(watched.peak_bytes - before, rel=0.1), predicted.table()


@pytest.mark.long
@ranks(2, fresh=True, timeout_s=300)
@pytest.mark.parametrize("config", SIZES)
@pytest.mark.parametrize("shard", [SHARDS[0], SHARDS[-1]])
def test_the_peak_of_two_processes(shard: str, config: GPTConfig) -> None:
    check_peak(Plan(axes=Axes(data=2), data=Data(shard=shard)), config)


@pytest.mark.sampled(long=4)
@pytest.mark.long
@ranks(2, fresh=True, timeout_s=300)
@pytest.mark.parametrize("name", EXCHANGING)
def test_the_peak_of_two_replicas(name: str) -> None:
    check_peak(EXCHANGING[name], MIDDLING)


@pytest.mark.sampled(long=3)
@pytest.mark.long
@ranks(2, fresh=True, timeout_s=300)
@pytest.mark.parametrize("name", CODECS)
def test_the_peak_of_two_processes_with_a_codec(name: str) -> None:
    """With SGD, whose update takes nothing."""
    plan = Plan(axes=Axes(data=2), codec=CODECS[name])
    check_peak(plan, MIDDLING, optimizer=functools.partial(torch.optim.SGD, lr=1e-3), moments=0.0)


@pytest.mark.long
@ranks(4, fresh=True, timeout_s=600)
@pytest.mark.parametrize("config", SIZES)
def test_the_peak_of_four_processes(config: GPTConfig) -> None:
    check_peak(Plan(axes=Axes(data=4), data=Data(shard=SHARDS[-1])), config)
