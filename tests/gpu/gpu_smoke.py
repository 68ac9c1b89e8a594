"""A short run of the multi-rank promises on CUDA tensors, for a machine with a GPU; `make test` needs none.

    torchrun --nproc-per-node 4 tests/gpu/gpu_smoke.py                      # as many GPUs as ranks
    WEFT_SHARE_GPUS=1 torchrun --nproc-per-node 4 tests/gpu/gpu_smoke.py    # NCCL ranks that share one GPU
    torchrun --nproc-per-node 4 tests/gpu/gpu_smoke.py ring local   # only what has one of these in its name
    torchrun --nproc-per-node 4 tests/gpu/gpu_smoke.py --eager    # under a process group that the user made so

On 2 ranks every axis is run, on 4 pairs of axes, too, on 6 and 8 a few plans of more (`gpu_cases.py`). Of each plan:
float64 against one process (`weft.verify`), unequal parts included; the plan in its own number format against a plain
loop; a checkpoint, which goes on to the bit. Then checkpoints of one plan under another, and single methods
(`gpu_methods.py`). What has "compiled" in its name is run by this word only. One line each; what failed is told again
at the end. A rank that fails alone leaves others waiting for it, so then the run ends. Without a GPU it runs on the
CPU.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import functools
import itertools
import math
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpu_cases import COMPILED, DRIFTS, ELSEWHERE, LARGE, all_plans, averaged_plans, late_plans, local_plans
from gpu_compression import compression_checks
from gpu_methods import LAYERWISE, check_average, check_layerwise, check_local, check_not_finite, check_windows, digest

import weft
from weft.comm import collectives, p2p
from weft.comm.objects import gather_values
from weft.comm.world.binding import prepare_sharing
from weft.errors import DivergenceError
from weft.layout import part_of
from weft.mesh import make_mesh
from weft.models.convnet import ConvNet, ConvNetConfig
from weft.models.gpt import GPT, GPTConfig
from weft.plan.late_merges import steps_to_verify
from weft.plan.pipeline.communication import FLUSH_FREE
from weft.plan.plan import Axes, Data, Plan, Precision
from weft.sync.delayed import DelayedSync
from weft.world import World, join_world, leave_world

NUM_BLOCKS = max(4, int(os.environ.get("WORLD_SIZE", "1")))
"""At least one per stage, also where a rank has two."""
SIZES = GPTConfig(vocab_size=64, context=16, num_layers=NUM_BLOCKS, hidden=32, heads=4, kv_heads=2, tied=False)
AFTER_ONE_FAILED_S = 60
STACKS_AFTER_S = float(os.environ.get("STACKS_AFTER_S", "120"))
NUM_DRIFT_STEPS = 120
SIXTEEN_BITS = 0.03
"""How far a loss may be from float32's, of itself."""
EAGER = "--eager"
adamw = functools.partial(torch.optim.AdamW, lr=1e-3, fused=True)


def make_gpt(**changes: object) -> GPT:
    torch.manual_seed(0)
    return GPT(dataclasses.replace(SIZES, **changes))


def make_tokens(num_samples: int) -> torch.Tensor:
    return torch.randint(0, SIZES.vocab_size, (num_samples, 17), generator=torch.Generator().manual_seed(1))


def make_trainer(model: torch.nn.Module, plan: Plan) -> weft.Trainer:
    return weft.parallelize(model, plan, loss="cross-entropy", optimizer=adamw, example=make_tokens(2)[:, :-1])


def part_step(trainer: weft.Trainer, tokens: torch.Tensor) -> float:
    mine = tokens[slice(*part_of(len(tokens), trainer.data_rank, trainer.data_size))]
    return float(trainer.step(mine[:, :-1], mine[:, 1:]))


def is_late(plan: Plan) -> bool:
    """Gradients are of older weights than they update."""
    return plan.axes.pipeline > 1 and plan.pipeline.schedule in FLUSH_FREE


def check_messages(world: World) -> str:
    """Collectives and messages move the right values between tensors of this device."""
    mesh = make_mesh(Plan(axes=Axes(data=world.size)), world, groups=[("data", "smoke")])
    group = mesh.group("data", "smoke")
    mine = torch.full((5,), float(group.index + 1), device=world.device)
    collectives.all_reduce(mine, group)
    assert mine.tolist() == [sum(range(1, group.size + 1))] * 5, mine
    if group.size > 1:
        after, before = (group.index + 1) % group.size, (group.index - 1) % group.size
        received, sent = torch.empty(3, device=world.device), torch.full((3,), float(group.index), device=world.device)
        p2p.exchange([(sent, after)], [(received, before)], group).wait()
        assert received.tolist() == [float(before)] * 3, received
        collectives.all_reduce(mine, group)  # nobody leaves before its message was opened
    mesh.close()
    return "sums and neighbours right"


def check_same_answer(plan: Plan, *, with_images: bool) -> str:
    """A GPT, and a convnet, equal one process in float64, unequal parts included; late weights, one that has them."""
    sizes = (13, 13, 5, *[13] * (steps_to_verify(plan) - 3))
    tokens = make_tokens(13)
    images, labels = torch.rand(13, 1, 8, 8, generator=torch.Generator().manual_seed(0)), tokens[:, 0] % 10
    given = [(make_gpt(tied=not is_late(plan)), [(tokens[:n, :-1], tokens[:n, 1:]) for n in sizes])]
    if with_images:
        torch.manual_seed(0)
        given += [(ConvNet(ConvNetConfig(width=8, num_blocks=4)), [(images[:n], labels[:n]) for n in sizes])]
    worst = 0.0
    for model, batches in given:
        outcome = weft.verify(
            model, plan, loss="cross-entropy", optimizer=functools.partial(torch.optim.SGD, lr=0.1), batches=batches
        ).require()
        worst = max(worst, outcome.worst("gradient").error)
    return f"gradients {worst:.0e}"


def check_learning(plan: Plan) -> str:
    """As it stands, precision and all, the plan has the losses of a plain loop on one process."""
    with make_trainer(make_gpt(), plan) as trainer:
        return learn(plan, trainer, make_tokens(8))


def learn(plan: Plan, trainer: weft.Trainer, tokens: torch.Tensor) -> str:
    device = trainer.mesh.world.device
    alone, given = make_gpt().to(device), tokens.to(device)
    optimizer, worst = adamw(alone.parameters()), 0.0
    for _ in range(3):
        wanted = F.cross_entropy(alone(given[:, :-1]).flatten(0, 1), given[:, 1:].flatten())
        wanted.backward()
        torch.nn.utils.clip_grad_norm_(alone.parameters(), plan.step.clip_norm or math.inf)
        optimizer.step()
        optimizer.zero_grad()
        worst = max(worst, abs(part_step(trainer, tokens) / wanted.item() - 1))
    allowed = 1e-4 if plan.precision == Precision() else SIXTEEN_BITS
    assert worst <= allowed, f"a loss is off by {worst:.1e} of itself, {allowed:.0e} is allowed"
    return f"losses {worst:.0e}"


def check_state(plan: Plan, folder: Path) -> str:
    """A checkpoint goes on to the bit, dropout and all; a corrupted weight is named."""
    model = make_gpt(dropout=0.1)
    with make_trainer(model, plan) as trainer:
        return resume(plan, model, trainer, make_tokens(4), folder)


def resume(plan: Plan, model: GPT, trainer: weft.Trainer, tokens: torch.Tensor, folder: Path) -> str:
    for _ in range(3):
        trainer.step(tokens[:, :-1], tokens[:, 1:])
    trainer.save(folder / "step-3")
    first, again = [], []
    for losses in (first, again):
        losses += [float(trainer.step(tokens[:, :-1], tokens[:, 1:])) for _ in range(3)]
        if losses is first:
            trainer.load(folder / "step-3")
    assert first == again, f"losses {first} before, {again} after loading"
    trainer.flush()
    trainer.check_divergence()
    if plan.axes.data < trainer.mesh.world.size or plan.axes.data == 1 or plan.data.shard == "parameters":
        return "resumes"
    if plan.replica_axis is not None and not (trainer.sync.agrees and not trainer.sync.flats):
        return "resumes"  # replicas differ, or are compared by their master weights
    if trainer.mesh.world.rank == 1:
        with torch.no_grad():
            next(model.parameters()).view(-1)[0] += 1
    try:
        trainer.check_divergence()
    except DivergenceError as error:
        assert "embedding.weight" in str(error), error
        return "resumes, corruption named"
    raise AssertionError("a corrupted weight was not noticed")


def check_elsewhere(saved: Plan, loaded: Plan, folder: Path) -> str:
    """What one plan saved, another goes on with: the losses that the first would have had."""
    tokens, first = make_tokens(8), make_trainer(make_gpt().double(), saved)
    for _ in range(2):
        part_step(first, tokens)
    first.save(folder / "step-2")
    second = make_trainer(make_gpt().double(), loaded)
    second.load(folder / "step-2")
    wanted, got = ([part_step(one, tokens) for _ in range(2)] for one in (first, second))
    worst = max(abs(a / b - 1) for a, b in zip(got, wanted, strict=True))
    assert worst <= 1e-10, f"losses {got}, where saved {wanted}"
    first.close()
    second.close()
    return f"losses {worst:.0e}"


def check_overflow(world: World) -> str:
    """An fp16 overflow on the last rank skips the step on all of them, and halves the scale."""
    model, tokens = make_gpt(), make_tokens(4)
    axes, precision = Axes(data=world.size), Precision(compute="fp16")
    trainer = make_trainer(model, Plan(axes=axes, data=Data(shard="parameters"), precision=precision))
    trainer.step(tokens[:, :-1], tokens[:, 1:])
    before, skipped = trainer.loss_scale, trainer.num_skipped
    poison = float("inf") if world.rank == world.size - 1 else 1.0
    handle = model.norm.register_full_backward_hook(lambda module, given, got: (given[0] * poison,))
    trainer.step(tokens[:, :-1], tokens[:, 1:])
    handle.remove()
    trainer.close()
    assert trainer.num_skipped == skipped + 1 and trainer.loss_scale == before / 2, (trainer.num_skipped, before)
    return "skipped on all ranks"


def check_drift(plan: Plan) -> str:
    """Tied weights on two stages stay equal to the bit: a ring adds in an order that depends on place and size."""
    tokens = make_tokens(12)
    with make_trainer(make_gpt(tied=True), plan) as trainer:
        losses = [part_step(trainer, tokens) for _ in range(NUM_DRIFT_STEPS)]
        trainer.check_divergence()
    assert losses[-1] < 0.7 * losses[0], losses[:: NUM_DRIFT_STEPS // 6]
    return f"equal after {NUM_DRIFT_STEPS} steps, loss {losses[0]:.2f} -> {losses[-1]:.2f}"


def check_plan(name: str, plan: Plan, folder: Path) -> str:
    if DRIFTS in name:
        return check_drift(plan)
    found = []
    if not plan.compile.blocks:
        is_plain = name in ("data", "zero 3", "pipeline, 1f1b", "tensor", "ring", "pipeline x tensor")
        found.append(check_same_answer(plan, with_images=is_plain and not plan.tensor.sequence))
    if not is_late(plan):
        found.append(check_learning(plan))
    return ", ".join([*found, check_state(plan, folder)])


def all_checks(world: World, folder: Path) -> dict[str, Callable[[], str]]:
    plans = all_plans(world.size)
    checks: dict[str, Callable[[], str]] = {"messages": functools.partial(check_messages, world)}
    for number, (name, plan) in enumerate(plans.items()):
        checks[name] = functools.partial(check_plan, name, plan, folder / f"plan-{number}")
    for number, (saved, loaded) in enumerate(ELSEWHERE):
        if saved in plans and loaded in plans:
            given = (plans[saved], plans[loaded], folder / f"pair-{number}")
            checks[f"saved under {saved}, loaded under {loaded}"] = functools.partial(check_elsewhere, *given)
    checks["overflow in fp16"] = functools.partial(check_overflow, world)
    if world.size not in LARGE:
        checks |= method_checks(world, folder)
    wanted = [word for word in sys.argv[1:] if word != EAGER]
    return {
        name: one
        for name, one in checks.items()
        if (not wanted or any(word in name for word in wanted)) and (COMPILED not in name or COMPILED in wanted)
    }


def check_local_plan(plan: Plan, folder: Path) -> str:
    """Local steps by their rule, on an MLP by hand and on a GPT by `weft.verify`; and a checkpoint."""
    return ", ".join([check_local(plan), check_same_answer(plan, with_images=False), check_state(plan, folder)])


def check_late_plan(plan: Plan, folder: Path) -> str:
    """Exchanges that are merged later, by `weft.verify`; and a checkpoint with some under way."""
    return ", ".join([check_same_answer(plan, with_images=False), check_state(plan, folder)])


def check_measured_delay() -> str:
    """All ranks have the same delay, whatever they measured, and the same weights in the end."""
    plan = Plan(axes=Axes(data=dist.get_world_size()), data=Data(sync="delayed", delay="auto"))
    tokens = make_tokens(12)
    with make_trainer(make_gpt(), plan) as trainer:
        losses = [part_step(trainer, tokens) for _ in range(60)]
        assert isinstance(trainer.sync, DelayedSync) and trainer.sync.auto is not None
        found = gather_values([trainer.sync.delay, *trainer.sync.auto.changes], trainer.mesh.everyone("control"))
        trainer.sync.conclude()
        digests = gather_values(digest(trainer), trainer.mesh.between_replicas("control"))
    assert found.count(found[0]) == len(found) and len(set(digests)) == 1, (found, digests)
    assert losses[-1] < 0.9 * losses[0], losses[::10]
    assert found[0][0] <= 8, f"nothing is far on one host, and computing is no waiting: {found[0]}"
    return f"a delay of {found[0][0]} after {len(found[0]) - 1} changes"


def method_checks(world: World, folder: Path) -> dict[str, Callable[[], str]]:
    checks: dict[str, Callable[[], str]] = {
        "not finite": functools.partial(check_not_finite, world),
        "windows in 16 bits": functools.partial(check_windows, world),
    }
    checks |= {name: functools.partial(check_average, plan) for name, plan in averaged_plans(world.size).items()}
    for shard, (name, optimizer) in itertools.product(("optimizer", "parameters"), LAYERWISE.items()):
        plan = Plan(axes=Axes(data=world.size), data=Data(shard=shard))
        checks[f"{name}, {shard} sharded"] = functools.partial(check_layerwise, plan, optimizer)
    local = local_plans(world.size)
    for number, (name, plan) in enumerate(local.items()):
        checks[name] = functools.partial(check_local_plan, plan, folder / f"local-{number}")
    for number, (name, plan) in enumerate(late_plans(world.size).items()):
        checks[name] = functools.partial(check_late_plan, plan, folder / f"late-{number}")
    checks["late, a measured delay"] = check_measured_delay
    poisoned = functools.partial(check_local, local["local, nesterov"], is_poisoned=True)
    checks |= compression_checks(world.size, folder)
    return checks | {"poisoned replica under local steps": poisoned}


class Outcomes:
    """What became of each check on every rank, through a file, because groups may be broken after a failure."""

    def __init__(self, world: World, folder: Path) -> None:
        self._world = world
        self._store = dist.FileStore(str(folder / "outcomes"), world.size)
        self._store.set_timeout(timedelta(seconds=AFTER_ONE_FAILED_S))

    def agree(self, name: str, failure: str) -> list[str]:
        """The failures of all ranks, empty where there were none. Raises where a rank does not come to say it."""
        self._store.set(f"{name}/{self._world.rank}", failure)
        keys = [f"{name}/{rank}" for rank in range(self._world.size)]
        self._store.wait(keys)
        return [self._store.get(key).decode() for key in keys]


def run_checks(world: World, folder: Path) -> list[str]:
    """Every check, one line each; the names of those that failed."""
    outcomes, failed = Outcomes(world, folder), []
    for name, check in all_checks(world, folder).items():
        started, said, failure = time.perf_counter(), "", ""
        faulthandler.dump_traceback_later(STACKS_AFTER_S)  # of a check that hangs
        try:
            said = check()
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
            print(f"rank {world.rank}, {name}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        finally:
            faulthandler.cancel_dump_traceback_later()
        try:
            failures = outcomes.agree(name, failure)
        except RuntimeError:
            told = failure or "done, but others are not"
            print(f"{name}: FAILED, rank {world.rank}: {told}. The run ends; failed: {[*failed, name]}", flush=True)
            os._exit(1)  # others are inside an exchange that nobody will join, and groups would wait for them
        told = next((f"FAILED, rank {rank}: {one}" for rank, one in enumerate(failures) if one), f"ok: {said}")
        if any(failures):
            failed.append(name)
        if world.rank == 0:
            print(f"{name}: {told.splitlines()[0]} ({time.perf_counter() - started:.1f} s)", flush=True)
    return failed


def main() -> None:
    # Some virtual machines advertise AMX and refuse it; oneDNN reads this at its first product.
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
    if EAGER in sys.argv:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        prepare_sharing(int(os.environ["RANK"]), os.environ)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    world = join_world()
    started = time.perf_counter()
    control = make_mesh(Plan(axes=Axes(data=world.size)), world, groups=[("world", "control")]).everyone("control")
    with tempfile.TemporaryDirectory() as mine:
        folder = Path(gather_values(mine, control)[0])
        failed = run_checks(world, folder)
        gather_values(None, control)  # the folder goes with its maker
    if world.rank == 0:
        where = torch.cuda.get_device_name() if world.device.type == "cuda" else "the CPU"
        verdict = f"FAILED: {'; '.join(failed)}" if failed else "all promises hold"
        taken_s = time.perf_counter() - started
        ranks = f"{world.size} ranks over {world.backend}"
        print(f"{verdict}, on {ranks}, {where}, torch {torch.__version__}, {taken_s:.0f} s")
    leave_world()
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
