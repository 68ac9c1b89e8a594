"""The methods that `slow_networks.py` compares, as one table, and what trains with them: model, optimizer and data."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from compression_gpt import HELD_OUT, MILD_NESTEROV
from slow_networks_torch import CLIP_NORM, POWERSGD_RANK, TorchTrainer

import weft
from weft.models.gpt import GPT, GPTConfig
from weft.optim.schedule import warmup_constant
from weft.plan.plan import Axes, Codec, Data, Plan, Step
from weft.training.data.datasets import TensorSamples, TokenWindows, split_held_out, standard_library_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The model and its training, the same for all methods."""

    num_layers: int = 4
    hidden: int = 512  # wide: a step of few tokens on one thread is then mostly large products
    heads: int = 8
    context: int = 64
    windows: int = 2
    """Of each replica in each step."""
    num_replicas: int = 4
    steps: int = 1500
    warm_up_steps: int = 50
    lr: float = 1e-3
    evaluate_every: int = 25
    evaluation_windows: int = 512
    text_bytes: int | None = None

    @property
    def config(self) -> GPTConfig:
        return GPTConfig(context=self.context, num_layers=self.num_layers, hidden=self.hidden, heads=self.heads)

    @property
    def global_batch(self) -> int:
        return self.windows * self.num_replicas


TINY: dict[str, Any] = {
    "num_layers": 4,  # a fragment has one at least
    "hidden": 64,
    "heads": 4,
    "context": 32,
    "steps": 60,
    "warm_up_steps": 5,
    "lr": 3e-3,
    "evaluate_every": 5,
    "evaluation_windows": 64,
    "text_bytes": 200_000,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """How replicas train together. Without `hook`, a plan of weft."""

    title: str
    hook: str | None = None
    """Of DistributedDataParallel; "": none of them."""
    data: dict[str, Any] = field(default_factory=dict)
    codec: dict[str, Any] = field(default_factory=dict)
    optimizer: str = "adamw"
    lr_scale: float = 1.0
    converges_as: str = ""
    """The method whose losses are this one's, which is then not trained itself."""

    @property
    def every(self) -> int:
        return self.data.get("every", 1)

    @property
    def delay(self) -> int:
        return self.data.get("delay", 0)

    @property
    def is_torch(self) -> bool:
        return self.hook is not None

    @property
    def differs(self) -> bool:
        """Replicas differ between exchanges."""
        return bool(self.data)

    def plan(self, num_ranks: int) -> Plan:
        return Plan(
            axes=Axes(data=num_ranks),
            step=Step(clip_norm=0.0 if self.codec.get("clip") else CLIP_NORM),
            data=Data(**self.data),
            codec=Codec(**self.codec),
        )


def _local(every: int, **more: Any) -> dict[str, Any]:
    return {"sync": "local", "every": every, **more}


def _delayed(every: int, delay: int) -> dict[str, Any]:
    return {"sync": "delayed", "every": every, "delay": delay}


ONEBIT = {"name": "onebit"}
_STREAMING = _local(20, **MILD_NESTEROV, fragments=4, delay=4)
METHODS: dict[str, Method] = {
    "ddp": Method(title="DDP", hook="", converges_as="dense"),
    "ddp-fp16": Method(title="DDP, fp16 hook", hook="fp16"),
    "ddp-powersgd4": Method(title="DDP, PowerSGD hook, rank 4", hook="powersgd"),
    "dense": Method(title="weft, dense"),
    "powersgd4": Method(title="powersgd, rank 4", codec={"name": "powersgd", "rank": POWERSGD_RANK}),
    "onebit": Method(title="onebit", codec=ONEBIT),
    "topk1": Method(title="topk 1 %, 2 bits", codec={"name": "topk", "density": 0.01, "bits": 2}),
    "dgc0.1": Method(
        title="dgc 0.1 %, SGD",
        codec={"name": "dgc", "density": 0.001, "clip": CLIP_NORM},
        optimizer="sgd",
        lr_scale=100,
    ),
    "local10": Method(title="local 10", data=_local(10)),
    "local10-half": Method(title="local 10, half", data=_local(10), codec={"name": "half"}),
    "local10-onebit": Method(title="local 10, onebit", data=_local(10), codec=ONEBIT),
    "diloco20": Method(title="DiLoCo 20", data=_local(20, **MILD_NESTEROV)),
    "diloco20-onebit": Method(title="DiLoCo 20, onebit", data=_local(20, **MILD_NESTEROV), codec=ONEBIT),
    "streaming20": Method(title="streaming DiLoCo 20", data=_STREAMING),
    "streaming20-mix": Method(title="streaming DiLoCo 20, mix 0.5", data={**_STREAMING, "mix": 0.5}),
    "streaming20-onebit": Method(title="streaming DiLoCo 20, onebit", data=_STREAMING, codec=ONEBIT),
    "delayed1-4": Method(title="delayed 4", data=_delayed(1, 4)),
    "delayed1-10": Method(title="delayed 10", data=_delayed(1, 10)),
    "delayed10-10": Method(title="delayed 10, every 10", data=_delayed(10, 10)),
    "delayed10-10-onebit": Method(title="delayed 10, every 10, onebit", data=_delayed(10, 10), codec=ONEBIT),
    "delayed5-5-onebit": Method(title="delayed 5, every 5, onebit", data=_delayed(5, 5), codec=ONEBIT),
    "delayed1-4-onebit": Method(title="delayed 4, onebit", data=_delayed(1, 4), codec=ONEBIT),
    "delayed2-4-onebit": Method(title="delayed 4, every 2, onebit", data=_delayed(2, 4), codec=ONEBIT),
    "delayed1-4-topk3": Method(
        title="delayed 4, topk 3 %, 2 bits",
        data=_delayed(1, 4),
        codec={"name": "topk", "density": 0.03, "bits": 2, "memory": 0.95},
    ),
}
ALONE = Method(title="no exchange", hook="alone")
BASE = "ddp"
"""What the others are compared with."""


def make_optimizer(method: Method, size: Size) -> Any:
    """A function from parameters to the optimizer."""
    lr = size.lr * method.lr_scale
    if method.optimizer == "sgd":
        return functools.partial(torch.optim.SGD, lr=lr, momentum=0.9)
    return functools.partial(torch.optim.AdamW, lr=lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def make_trainer(method: Method, size: Size, seed: int, device: str, *, in_process: bool = False) -> Any:
    """weft's trainer or torch's; `in_process`: one process is all replicas."""
    torch.manual_seed(seed)
    torch.set_float32_matmul_precision("high")
    model = GPT(size.config)
    schedule = warmup_constant(size.warm_up_steps, max(size.steps, size.warm_up_steps + 1))
    optimizer = make_optimizer(method, size)
    if method.is_torch:
        return TorchTrainer(model.to(device), method.hook, optimizer, schedule, device)
    # Dense replicas compute what one rank with their batches does.
    is_one = in_process and not method.differs and not method.codec
    return weft.parallelize(
        model,
        method.plan(1 if is_one else size.num_replicas),
        loss="cross-entropy",
        optimizer=optimizer,
        schedule=schedule,
        device=device,
        skip_at_most=None,
        replicas_in_process=in_process and not is_one,
    )


def make_batches(size: Size, trainer: Any, seed: int) -> tuple[Iterator[Any], weft.batches]:
    """Endless training batches, and those of the held-out windows, which are spread over the held-out text."""
    training, held_out = split_held_out(_text()[: size.text_bytes], HELD_OUT, size.context)
    windows = TokenWindows(held_out, size.context)
    chosen = np.linspace(0, len(windows) - 1, min(size.evaluation_windows, len(windows))).astype(np.int64)
    evaluation = weft.batches(TensorSamples(*windows.take(chosen)), trainer, global_batch=min(256, len(chosen)))
    batches = weft.batches(
        TokenWindows(training, size.context),
        trainer,
        global_batch=size.global_batch,
        shuffle_seed=seed,
        epochs=None,
        drop_last=True,
    )
    return iter(batches), evaluation


_text = functools.cache(standard_library_text)
