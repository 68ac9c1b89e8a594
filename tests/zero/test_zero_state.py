"""Checkpoints under sharding: whole tensors under the model's own names, whatever wrote them, for whatever reads them.

Functions that are decorated with `@ranks` but not called test_... are parts of a test that needs several world sizes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path

import pytest
import torch
from oracle import ADAMW, Seen, cut_evenly, data_plan, make_trainer, small_gpt, token_batch, train_alone
from ranks import ranks
from safetensors.torch import load_file
from torch import Tensor, nn

from weft.plan.plan import Plan, Precision
from weft.training.trainer import Trainer

NUM_STEPS, NUM_MORE = 3, 2


class Everything(nn.Module):
    """Tied weights, a frozen block, one number, fewer numbers than ranks, and a layer that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.gpt = small_gpt(num_layers=3, bias=True, dropout=0.0)
        self.gpt.blocks[1].requires_grad_(False)
        self.one, self.few = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.ones(3))
        self.unused = nn.Linear(5, 5)
        self.register_buffer("table", torch.arange(17.0))

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.gpt(tokens) * self.one + self.few.sum() * self.table
        return logits


PLANS = {
    "alone": data_plan(1),
    "stage 3 on one rank": data_plan(1, shard="parameters"),
    "data 2": data_plan(2),
    "stage 1": data_plan(2, shard="optimizer", bucket_bytes=3000),
    "stage 2": data_plan(3, shard="gradients", microbatches=2),
    "stage 3": data_plan(4, shard="parameters"),
    "hybrid": data_plan(2, replicate=2, shard="parameters", microbatches=2),
}


def batch(number: int) -> tuple[Tensor, Tensor]:
    return token_batch(8 - number % 3, seed=number)


def train(trainer: Trainer, num_steps: int) -> list[float]:
    """Steps on batches that depend on the number of the step alone."""
    return [
        float(trainer.step(*cut_evenly(batch(trainer.steps_done), trainer.data_size)[trainer.data_rank]))
        for _ in range(num_steps)
    ]


@functools.cache
def expected() -> list[Seen]:
    """What one process without any of weft sees."""

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return ADAMW([parameter for parameter in model.parameters() if parameter.requires_grad])

    return train_alone(Everything().double(), [batch(n) for n in range(NUM_STEPS + NUM_MORE)], optimizer=optimizer)


def tensors_in(folder: Path, kind: str) -> dict[str, Tensor]:
    """All tensors of one kind in a checkpoint, as any tool would read them; none may be in two files."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob(f"{kind}-*.safetensors")):
        found = load_file(path)
        assert not found.keys() & tensors.keys()
        tensors |= found
    return tensors


def make(name: str) -> Trainer:
    return make_trainer(Everything().double(), PLANS[name], optimizer=ADAMW)


def write(folder: Path, num_ranks: int) -> None:
    for name, plan in PLANS.items():
        if plan.axes.num_ranks == num_ranks:
            trainer = make(name)
            train(trainer, NUM_STEPS)
            trainer.save(folder / name)


def read(folder: Path, num_ranks: int) -> None:
    """One trainer goes back to every checkpoint in turn, and on from there."""
    losses = [seen.loss for seen in expected()[NUM_STEPS:]]
    for name, plan in PLANS.items():
        if plan.axes.num_ranks != num_ranks:
            continue
        trainer = make(name)
        for saved in PLANS:
            trainer.load(folder / saved)
            trainer.save(folder / f"{saved} again")
            for kind in ("model", "optimizer"):
                there, here = tensors_in(folder / saved, kind), tensors_in(folder / f"{saved} again", kind)
                assert here.keys() == there.keys()
                assert [entry for entry in there if not torch.equal(here[entry], there[entry])] == [], (saved, name)
            assert train(trainer, NUM_MORE) == pytest.approx(losses, rel=1e-12, abs=0), (saved, name)


@ranks(2)
def write_on_two(folder: Path, num_ranks: int) -> None:
    write(folder, num_ranks)


@ranks(3)
def write_on_three(folder: Path, num_ranks: int) -> None:
    write(folder, num_ranks)


@ranks(4)
def write_on_four(folder: Path, num_ranks: int) -> None:
    write(folder, num_ranks)


@ranks(2)
def read_on_two(folder: Path, num_ranks: int) -> None:
    read(folder, num_ranks)


@ranks(3)
def read_on_three(folder: Path, num_ranks: int) -> None:
    read(folder, num_ranks)


@ranks(4)
def read_on_four(folder: Path, num_ranks: int) -> None:
    read(folder, num_ranks)


WRITE = {1: write, 2: write_on_two, 3: write_on_three, 4: write_on_four}
READ = {1: read, 2: read_on_two, 3: read_on_three, 4: read_on_four}


def check_files(folder: Path) -> None:
    model = Everything()
    seen = expected()[NUM_STEPS - 1]
    weights, states = tensors_in(folder, "model"), tensors_in(folder, "optimizer")
    assert weights.keys() == model.state_dict().keys(), "the tied weight is there under both names"
    for name, parameter in model.named_parameters():
        assert weights[name].shape == parameter.shape
        torch.testing.assert_close(weights[name], seen.weights[name], rtol=1e-11, atol=1e-13)
    used = {name for name, gradient in seen.gradients.items() if gradient is not None}
    assert {"one", "few"} <= used and not any(name.startswith(("unused", "gpt.blocks.1.")) for name in used)
    assert states.keys() == {f"{name}/{key}" for name in used for key in ("step", "exp_avg", "exp_avg_sq")}
    for entry, state in states.items():
        name, key = entry.rsplit("/", 1)
        assert state.shape == (() if key == "step" else weights[name].shape)


@pytest.mark.long
def test_any_plan_loads_what_any_other_saved(tmp_path: Path) -> None:
    for num_ranks, write_there in WRITE.items():
        write_there(folder=tmp_path, num_ranks=num_ranks)
    for name in PLANS:
        check_files(tmp_path / name)
    for num_ranks, read_there in READ.items():
        read_there(folder=tmp_path, num_ranks=num_ranks)


# ---- the same plan, to the bit ----


def kept(trainer: Trainer) -> dict[str, Tensor]:
    """All that this rank must get back."""
    tensors: dict[str, Tensor] = {"rng": torch.get_rng_state()}
    for piece in trainer.sync.pieces:
        tensors[f"master {piece.name}"] = piece.tensor
        for key, value in trainer.optimizer.state[piece.tensor].items():
            tensors[f"state {piece.name} {key}"] = value
    for number, flat in enumerate(trainer.sync.flats):
        tensors[f"part {number}"] = flat.mine
    scale = trainer.update.loss_scale
    tensors["update"] = torch.tensor([trainer.num_skipped, scale.value, scale._num_good])
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def assert_equal(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    assert [name for name, tensor in mine.items() if not torch.equal(tensor, theirs[name])] == []


def check_to_the_bit(folder: Path, plan: Plan) -> Trainer:
    def start(seed: int) -> Trainer:
        torch.manual_seed(seed)
        return make_trainer(small_gpt(dropout=0.2), plan, optimizer=ADAMW)

    unbroken = start(0)
    torch.manual_seed(100 + unbroken.data_rank)
    train(unbroken, 2)
    unbroken.save(folder / "saved")
    saved = kept(unbroken)
    losses = train(unbroken, 2)
    resumed = start(1)
    resumed.load(folder / "saved")
    assert_equal(kept(resumed), saved)
    assert train(resumed, 2) == losses
    assert_equal(kept(resumed), kept(unbroken))
    return resumed


FORMATS = {
    "own": Precision(),
    "bf16": Precision(compute="bf16", reduce="bf16", accumulate="bf16"),
    "fp16": Precision(compute="fp16"),
}


@pytest.mark.sampled(2, long=3)
@ranks(2)
@pytest.mark.parametrize("precision", FORMATS)
@pytest.mark.parametrize("shard", ["nothing", "optimizer", "gradients", "parameters"])
def test_the_same_plan_goes_on_to_the_bit(tmp_path: Path, shard: str, precision: str) -> None:
    plan = data_plan(2, shard=shard, microbatches=2, clip_norm=0.5)
    resumed = check_to_the_bit(tmp_path, dataclasses.replace(plan, precision=FORMATS[precision]))
    if precision == "bf16":
        masters = torch.cat([piece.tensor.detach().flatten() for piece in resumed.sync.pieces])
        assert masters.dtype == torch.float32 and not torch.equal(masters, masters.bfloat16().float())


@ranks(4)
def test_the_same_hybrid_plan_goes_on_to_the_bit(tmp_path: Path) -> None:
    check_to_the_bit(tmp_path, data_plan(2, replicate=2, shard="parameters", microbatches=2, clip_norm=0.5))


def spoilt(logits: Tensor, targets: Tensor) -> Tensor:
    return logits.sum() * math.inf


@ranks(2)
@pytest.mark.parametrize("shard", ["optimizer", "parameters"])
def test_the_loss_scale_and_the_count_of_skipped_steps_come_back(tmp_path: Path, shard: str) -> None:
    plan = dataclasses.replace(data_plan(2, shard=shard), precision=FORMATS["fp16"])
    trainer = make_trainer(small_gpt(), plan, optimizer=ADAMW, loss=spoilt)
    train(trainer, 3)
    assert (trainer.num_skipped, trainer.update.loss_scale.value) == (3, 2.0**13)
    trainer.save(tmp_path / "saved")
    resumed = make_trainer(small_gpt(), plan, optimizer=ADAMW)
    resumed.load(tmp_path / "saved")
    assert (resumed.num_skipped, resumed.update.loss_scale.value, resumed.steps_done) == (3, 2.0**13, 3)
