"""A short run of the multi-rank promises on CUDA tensors, for a machine with a GPU; `make test` needs none.

    torchrun --nproc-per-node 2 tests/gpu_smoke.py        # on one GPU: gloo; on two or more: NCCL
    torchrun --nproc-per-node 2 tests/gpu_smoke.py ring   # only what has this in its name

Exits with an error at the first promise that does not hold.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import weft
from weft.comm import collectives, p2p
from weft.comm.objects import gather_values
from weft.errors import DivergenceError
from weft.mesh import join_world, leave_world, make_mesh
from weft.models.convnet import ConvNet, ConvNetConfig
from weft.models.gpt import GPT, GPTConfig
from weft.plan.exchanges import FLUSH_FREE
from weft.plan.plan import Axes, Compile, Data, Pipeline, Plan, Precision, Recompute, Sequence, Step, Tensor

SCHEDULES = ("naive", "gpipe", "1f1b", "zero-bubble", "pipedream", "2bw")

CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "zero 1": {"data": Data(shard="optimizer")},
    "zero 2": {"data": Data(shard="gradients")},
    "zero 3": {"data": Data(shard="parameters")},
    "zero 3, gathered for every micro-batch": {"data": Data(shard="parameters", reshard="microbatch")},
    "zero 3, bf16, recomputed": {
        "data": Data(shard="parameters"),
        "precision": Precision(compute="bf16"),
        "recompute": Recompute(policy="selective"),
    },
    "fp16": {"precision": Precision(compute="fp16")},
    "bf16, offloaded": {"data": Data(offload=True), "precision": Precision(compute="bf16", accumulate="bf16")},
    "zero 3, offloaded": {"data": Data(shard="parameters", offload=True)},
    "zero 3, recomputed": {"data": Data(shard="parameters"), "recompute": Recompute(policy="full")},
}


SPLIT: dict[str, dict[str, Any]] = {
    "tensor": {},
    "tensor, split tokens": {"tensor": Tensor(sequence=True)},
    "tensor, bf16, recomputed": {"precision": Precision(compute="bf16"), "recompute": Recompute(policy="selective")},
    "tensor, split tokens, recomputed": {"tensor": Tensor(sequence=True), "recompute": Recompute(policy="full")},
    "tensor, compiled": {"compile": Compile(blocks=True)},
}


SEQUENCES: dict[str, dict[str, Any]] = {
    "ring": {"axes": Axes(ring=2)},
    "ring, contiguous, zero 2": {
        "axes": Axes(ring=2),
        "sequence": Sequence(layout="contiguous"),
        "data": Data(shard="gradients"),
    },
    "ring self-attention": {"axes": Axes(ring=2), "sequence": Sequence(variant="ring-self-attention")},
    "ring, bf16": {"axes": Axes(ring=2), "precision": Precision(compute="bf16")},
    "ring, recomputed": {"axes": Axes(ring=2), "recompute": Recompute(policy="full")},
    "ulysses": {"axes": Axes(ulysses=2)},
    "ulysses, bf16, recomputed": {
        "axes": Axes(ulysses=2),
        "precision": Precision(compute="bf16"),
        "recompute": Recompute(policy="selective"),
    },
    "ring, compiled": {"axes": Axes(ring=2), "compile": Compile(blocks=True)},
}


def check_overflow(plan: Plan) -> None:
    """An fp16 overflow on the last rank skips the step on all of them, and halves the scale."""
    world = join_world()
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=64, context=16, num_layers=2, hidden=32, heads=4))
    plan = dataclasses.replace(plan, data=Data(shard="parameters"), precision=Precision(compute="fp16"))
    trainer = weft.parallelize(
        model, plan, loss="cross-entropy", optimizer=functools.partial(torch.optim.AdamW, lr=1e-3, fused=True)
    )
    tokens = torch.randint(0, 64, (4, 17))
    trainer.step(tokens[:, :-1], tokens[:, 1:])
    before, skipped = trainer.loss_scale, trainer.num_skipped
    poison = float("inf") if world.rank == world.size - 1 else 1.0
    handle = model.norm.register_full_backward_hook(lambda module, given, got: (given[0] * poison,))
    trainer.step(tokens[:, :-1], tokens[:, 1:])
    handle.remove()
    assert trainer.num_skipped == skipped + 1 and trainer.loss_scale == before / 2, (trainer.num_skipped, before)


def check_messages(plan: Plan) -> None:
    """Collectives and messages move the right values between CUDA tensors."""
    world = join_world()
    group = make_mesh(plan, world).group("data", "smoke")
    mine = torch.full((5,), float(group.index + 1), device=world.device)
    collectives.all_reduce(mine, group)
    assert mine.tolist() == [sum(range(1, group.size + 1))] * 5
    if group.size == 1:
        return
    after, before = (group.index + 1) % group.size, (group.index - 1) % group.size
    received = torch.empty(3, device=world.device)
    pending = [
        p2p.receive(received, group, source=before),
        p2p.send(torch.full((3,), float(group.index), device=world.device), group, to=after),
    ]
    for each in pending:
        each.wait()
    assert received.tolist() == [float(before)] * 3


def check_same_answer(plan: Plan, *, with_images: bool = True) -> None:
    """GPT and convnet equal one process in float64, unequal parts included."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 64, (13, 17))
    gpt = GPT(GPTConfig(vocab_size=64, context=16, num_layers=2, hidden=32, heads=4, kv_heads=2))
    images, labels = torch.rand(13, 1, 8, 8), torch.randint(0, 10, (13,))
    convnet = ConvNet(ConvNetConfig(width=8, num_blocks=2))
    sizes = (13, 13, 5)
    for model, batches in (
        (gpt, [(tokens[:n, :-1], tokens[:n, 1:]) for n in sizes]),
        (convnet, [(images[:n], labels[:n]) for n in sizes]),
    )[: 2 if with_images else 1]:
        outcome = weft.verify(
            model, plan, loss="cross-entropy", optimizer=functools.partial(torch.optim.SGD, lr=0.1), batches=batches
        )
        outcome.require()
        if join_world().rank == 0:
            print(f"{type(model).__name__}: worst gradient error {outcome.worst('gradient').error:.1e}")


def check_state(plan: Plan) -> None:
    """A checkpoint goes on to the bit; a corrupted weight is named."""
    world = join_world()
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=64, context=16, num_layers=2, hidden=32, heads=4, dropout=0.1, tied=False))
    tokens = torch.randint(0, 64, (4, 17))
    trainer = weft.parallelize(
        model,
        plan,
        loss="cross-entropy",
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-3, fused=True),
        example=tokens[:2, :-1],
    )
    control = trainer.mesh.everyone("smoke")
    folder = Path(gather_values(tempfile.mkdtemp(), control, world.device)[0])
    for _ in range(3):
        trainer.step(tokens[:, :-1], tokens[:, 1:])
    trainer.save(folder / "step-3")
    first = [float(trainer.step(tokens[:, :-1], tokens[:, 1:])) for _ in range(3)]
    trainer.load(folder / "step-3")
    again = [float(trainer.step(tokens[:, :-1], tokens[:, 1:])) for _ in range(3)]
    assert first == again, (first, again)
    trainer.flush()
    trainer.check_divergence()
    if trainer.data_size == 1 or plan.data.shard == "parameters":
        return
    if world.rank == 1:
        with torch.no_grad():
            next(model.parameters()).view(-1)[0] += 1
    try:
        trainer.check_divergence()
    except DivergenceError as error:
        assert "embedding.weight" in str(error), error
    else:
        raise AssertionError("a corrupted weight was not noticed")


def chosen(named: Mapping[str, Any]) -> list[tuple[str, Any]]:
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    return [(name, value) for name, value in named.items() if wanted in name]


def main() -> None:
    world = join_world()
    assert world.device.type == "cuda", "this needs a GPU"
    plan = Plan(axes=Axes(data=world.size), step=Step(microbatches=2, clip_norm=1.0))
    check_messages(plan)
    for name, changes in chosen(CHANGES):
        if world.rank == 0:
            print(name)
        changed = dataclasses.replace(plan, **changes)
        check_same_answer(changed)
        check_state(changed)
    for schedule, _ in chosen(dict.fromkeys(SCHEDULES)) if world.size == 2 else ():
        if world.rank == 0:
            print(schedule)
        changed = dataclasses.replace(plan, axes=Axes(pipeline=2), pipeline=Pipeline(schedule=schedule))
        if schedule not in FLUSH_FREE:
            check_same_answer(changed)
        check_state(changed if schedule != "pipedream" else dataclasses.replace(changed, step=Step(microbatches=2)))
    for name, changes in chosen(SPLIT) if world.size == 2 else ():
        if world.rank == 0:
            print(name)
        changed = dataclasses.replace(plan, axes=Axes(tensor=2), **changes)
        if not changed.tensor.sequence and not changed.compile.blocks:
            check_same_answer(changed)
        check_state(changed)
    for name, changes in chosen(SEQUENCES) if world.size == 2 else ():
        if world.rank == 0:
            print(name)
        changed = dataclasses.replace(plan, **changes)
        is_plain = changed.sequence == Sequence() and changed.recompute.policy != "selective"
        if not changed.compile.blocks:
            check_same_answer(changed, with_images=is_plain and changed.axes.ring > 1)
        check_state(changed)
    check_overflow(plan)
    if world.rank == 0:
        print(f"all promises hold on {world.size} ranks, {torch.cuda.get_device_name()}")
    leave_world()


if __name__ == "__main__":
    main()
