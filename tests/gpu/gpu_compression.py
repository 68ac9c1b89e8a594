"""Checks of `gpu_smoke.py` for codecs: a GPU decides by itself whether a step counts, and kernels write the messages.

Every codec under all-reduce, some between sharded replicas and under local steps: it learns in float32, a step with a
gradient that is not finite leaves weights and codec state as they were, and a checkpoint goes on to the bit.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import torch
from gpu_methods import all_equal, copies, pieces_of

import weft
from weft.layout import part_of
from weft.models.gpt import GPT, GPTConfig
from weft.plan.plan import Axes, Codec, Data, Plan, Precision

SIZES = GPTConfig(vocab_size=64, context=16, num_layers=2, hidden=64, heads=2, tied=False)
CODECS: dict[str, Codec] = {
    "topk": Codec(name="topk", density=0.05),
    "topk in 2 bits": Codec(name="topk", density=0.05, bits=2),
    "dgc": Codec(name="dgc", density=0.05, warmup_steps=3),
    "onebit": Codec(name="onebit"),
    "sign": Codec(name="sign"),
    "qsgd": Codec(name="qsgd", levels=16),
    "terngrad": Codec(name="terngrad"),
    "powersgd": Codec(name="powersgd", rank=2),
}


def compression_plans(num_ranks: int) -> dict[str, Plan]:
    axes = Axes(data=num_ranks)
    plans = {f"codec {name}": Plan(axes=axes, codec=codec) for name, codec in CODECS.items()}
    for name in ("topk", "powersgd"):
        plans[f"codec {name}, bf16"] = Plan(axes=axes, codec=CODECS[name], precision=Precision(compute="bf16"))
    local = Data(sync="local", every=2, outer="nesterov", outer_lr=0.7, outer_momentum=0.9)
    for name in ("topk in 2 bits", "onebit", "powersgd"):
        plans[f"codec {name}, local"] = Plan(axes=axes, codec=CODECS[name], data=local)
    if num_ranks >= 4 and num_ranks % 2 == 0:
        hybrid = Axes(replicate=num_ranks // 2, data=2)
        for name, shard in (("onebit", "optimizer"), ("powersgd", "gradients"), ("topk", "parameters")):
            plans[f"codec {name}, {shard} sharded"] = Plan(axes=hybrid, codec=CODECS[name], data=Data(shard=shard))
        plans["codec topk, ring"] = Plan(axes=Axes(data=num_ranks // 2, ring=2), codec=CODECS["topk"])
    return plans


def check_compression(plan: Plan, folder: Path) -> str:
    torch.manual_seed(0)
    # Votes have the size 1 whatever the gradients have.
    rate = 1e-3 if plan.codec.name == "sign" else 0.1
    optimizer = functools.partial(torch.optim.SGD, lr=rate, momentum=0.9, fused=torch.cuda.is_available())
    tokens = torch.randint(0, SIZES.vocab_size, (16, 17), generator=torch.Generator().manual_seed(1))
    model, example = GPT(SIZES), tokens[:2, :-1]
    with weft.parallelize(model, plan, loss="cross-entropy", optimizer=optimizer, example=example) as trainer:
        losses = [step(trainer, tokens) for _ in range(8)]
        assert losses[-1] < losses[0] and all(map(math.isfinite, losses)), losses
        if plan.replica_axis is None:
            check_skipped(trainer, model, tokens)
        trainer.save(folder / "saved")
        first, again = [], []
        for found in (first, again):
            found += [step(trainer, tokens) for _ in range(3)]
            if found is first:
                trainer.load(folder / "saved")
        assert first == again, f"losses {first} before, {again} after loading"
        trainer.flush()
        trainer.check_divergence()
    return f"loss {losses[0]:.2f} -> {losses[-1]:.2f}, {trainer.num_skipped} skipped, resumes"


def check_skipped(trainer: weft.Trainer, model: torch.nn.Module, tokens: torch.Tensor) -> None:
    """One rank's gradient is not finite, its loss is: nothing is left of the step on any rank."""
    exchange = trainer.sync.compressed
    assert exchange is not None, "nothing is compressed"
    kept, weights, skipped = copies(exchange.tensors()), copies(pieces_of(trainer)), trainer.num_skipped
    factor = math.inf if trainer.mesh.world.rank == 1 else 1.0
    target = dict(model.named_parameters())["embedding.weight"]
    hook = target.register_hook(functools.partial(multiplied, factor=factor))
    step(trainer, tokens)
    hook.remove()
    assert trainer.num_skipped == skipped + 1, f"{trainer.num_skipped - skipped} steps were skipped"
    assert all_equal(kept, copies(exchange.tensors())), "a skipped step changed what a codec keeps"
    assert all_equal(weights, pieces_of(trainer)), "a skipped step changed weights"


def multiplied(gradient: torch.Tensor, *, factor: float) -> torch.Tensor:
    return gradient * factor


def step(trainer: weft.Trainer, tokens: torch.Tensor) -> float:
    mine = tokens[slice(*part_of(len(tokens), trainer.data_rank, trainer.data_size))]
    return float(trainer.step(mine[:, :-1], mine[:, 1:]))


def compression_checks(num_ranks: int, folder: Path) -> dict[str, Any]:
    plans = compression_plans(num_ranks)
    return {
        name: functools.partial(check_compression, plan, folder / f"codec-{number}")
        for number, (name, plan) in enumerate(plans.items())
    }
