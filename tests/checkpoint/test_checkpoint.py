"""Checkpoints: the same plan goes on to the bit, and other tools can read the files.

Other plans are in `test_checkpoint_plans.py`, damage and full disks in `test_checkpoint_damage.py`, kills in
`test_checkpoint_kills.py`.
"""

from __future__ import annotations

import functools
import json
import logging
from pathlib import Path
from unittest import mock

import pytest
import torch
from oracle import ADAMW, SGD, cut_evenly, data_plan, image_batch, make_trainer, small_convnet, small_gpt, token_batch
from ranks import ranks
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from weft.checkpoint import snapshot
from weft.checkpoint.load import read_index
from weft.comm.objects import gather_values
from weft.optim.lamb import LAMB
from weft.parallel.state.buffers import persistent_buffers
from weft.plan.text import format_plan
from weft.training.parallelize import OptimizerFactory
from weft.training.trainer import Trainer

OPTIMIZERS: dict[str, OptimizerFactory] = {
    "adamw": ADAMW,
    "fused": functools.partial(torch.optim.AdamW, lr=1e-3, fused=True),
    "momentum": SGD,
    "plain": functools.partial(torch.optim.SGD, lr=0.1),
    "lamb": functools.partial(LAMB, lr=1e-2),
}


def train(trainer: Trainer, num_steps: int) -> list[float]:
    """Steps on batches that depend on the step alone, so that two trainers at the same step see the same.

    Their sizes differ, because gradients are first divided by the last step's count of targets, which is state too.
    """
    images = any(isinstance(module, nn.Conv2d) for module in trainer.named_model.modules())
    losses = []
    for _ in range(num_steps):
        batch = (image_batch if images else token_batch)(8 - trainer.steps_done % 3, seed=trainer.steps_done)
        losses.append(float(trainer.step(*cut_evenly(batch, trainer.data_size)[trainer.data_rank])))
        trainer.data_position += len(batch[0])
    return losses


def state(trainer: Trainer) -> dict[str, Tensor]:
    """Everything that a checkpoint must bring back, copied."""
    model, optimizer = trainer.named_model, trainer.optimizer
    tensors: dict[str, Tensor] = {f"weight {name}": p for name, p in model.named_parameters()}
    tensors |= {f"buffer {name}": buffer for name, buffer in persistent_buffers(model).items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"state {name} {key}"] = torch.as_tensor(value)
    tensors |= {"rng": torch.get_rng_state(), "step": torch.tensor([trainer.steps_done, trainer.data_position])}
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def assert_equal(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    assert [name for name, tensor in mine.items() if not torch.equal(tensor, theirs[name])] == []


class Warnings(logging.Handler):
    """What weft wrote to its log while this context was open."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())

    def __enter__(self) -> list[str]:
        logging.getLogger("weft").addHandler(self)
        return self.messages

    def __exit__(self, *_: object) -> None:
        logging.getLogger("weft").removeHandler(self)


class Backwards(nn.Module):
    """Layers are registered in the reverse order of their use, so gradients become ready in the order of registration.

    weft's first bucket layout expects the opposite and is changed after one step. A ring of ranks adds each element in
    an order that its place in the bucket decides: from 3 ranks on, another layout means other last bits.
    """

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(24, 17)
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(4))
        self.dropout = nn.Dropout(0.2)
        self.embedding = nn.Embedding(17, 24)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in reversed(self.layers):
            hidden = hidden + self.dropout(layer(hidden).tanh())
        logits: Tensor = self.head(hidden)
        return logits


def check_goes_on_to_the_bit(folder: Path, *, num_ranks: int, optimizer: str, saved_after: int) -> None:
    def make(seed: int) -> Trainer:
        torch.manual_seed(seed)
        model = Backwards() if num_ranks > 2 else small_gpt(dropout=0.2)
        plan = data_plan(num_ranks, bucket_bytes=4096, clip_norm=0.5)
        return make_trainer(model, plan, optimizer=OPTIMIZERS[optimizer])

    unbroken = make(0)
    torch.manual_seed(100 + unbroken.data_rank)
    train(unbroken, saved_after)
    unbroken.save(folder / "saved")
    saved = state(unbroken)
    assert_equal(state(unbroken), saved)
    losses = train(unbroken, 4)
    resumed = make(1)
    with Warnings() as warned:
        resumed.load(folder / "saved")
    assert_equal(state(resumed), saved)
    assert train(resumed, 4) == losses
    assert_equal(state(resumed), state(unbroken))
    assert warned == []


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_one_process_goes_on_to_the_bit(tmp_path: Path, optimizer: str) -> None:
    check_goes_on_to_the_bit(tmp_path, num_ranks=1, optimizer=optimizer, saved_after=2)


@pytest.mark.sampled(3, long=4)
@ranks(2)
@pytest.mark.parametrize("saved_after", [0, 1, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_two_ranks_go_on_to_the_bit(tmp_path: Path, optimizer: str, saved_after: int) -> None:
    check_goes_on_to_the_bit(tmp_path, num_ranks=2, optimizer=optimizer, saved_after=saved_after)


@pytest.mark.sampled(2)
@ranks(4)
@pytest.mark.parametrize("saved_after", [0, 1, 3])
@pytest.mark.parametrize("optimizer", ["fused", "momentum"])
def test_four_ranks_go_on_to_the_bit(tmp_path: Path, optimizer: str, saved_after: int) -> None:
    check_goes_on_to_the_bit(tmp_path, num_ranks=4, optimizer=optimizer, saved_after=saved_after)


class Sometimes(nn.Module):
    """One layer is frozen, one is never used, and one is used only from the fourth step on."""

    def __init__(self) -> None:
        super().__init__()
        self.body = small_gpt()
        self.frozen, self.unused, self.late = nn.Linear(17, 17), nn.Linear(17, 17), nn.Linear(17, 17)
        self.frozen.requires_grad_(False)
        self.calls = 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        logits: Tensor = self.frozen(self.body(tokens))
        return self.late(logits) if self.calls > 3 else logits


def test_a_loss_with_a_count_of_its_own_goes_on_to_the_bit(tmp_path: Path) -> None:
    """One data rank knows the number of targets beforehand, but not the count that such a loss returns."""

    def loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        weight = 1.0 + targets.flatten() % 3
        terms = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return (terms * weight).sum(), weight.sum()

    whole, first, second = (make_trainer(small_gpt(), data_plan(1), loss=loss, optimizer=ADAMW) for _ in range(3))
    for other in (first, second):
        other.named_model.load_state_dict(whole.named_model.state_dict())
    train(first, 2)
    first.save(tmp_path / "two")
    second.load(tmp_path / "two")
    assert train(second, 3) == train(whole, 5)[2:]
    assert_equal(*({**state(trainer), "rng": torch.zeros(0)} for trainer in (second, whole)))  # nothing is drawn


@ranks(2)
def test_parameters_without_optimizer_state_stay_without(tmp_path: Path) -> None:
    unbroken = make_trainer(Sometimes(), data_plan(2), optimizer=ADAMW)
    train(unbroken, 2)
    unbroken.save(tmp_path / "saved")
    losses = train(unbroken, 3)
    resumed = make_trainer(Sometimes(), data_plan(2), optimizer=ADAMW)
    resumed.load(tmp_path / "saved")
    resumed.model.calls = 2  # type: ignore[assignment]
    assert not any(name.startswith(("state unused", "state frozen", "state late")) for name in state(resumed))
    assert train(resumed, 3) == losses
    assert_equal(state(resumed), state(unbroken))
    assert any(name.startswith("state late") for name in state(resumed))


@ranks(2)
def test_hyperparameters_are_the_runs(tmp_path: Path) -> None:
    trainer = make_trainer(small_gpt(), data_plan(2), optimizer=ADAMW)
    train(trainer, 1)
    trainer.save(tmp_path / "saved")
    other = make_trainer(small_gpt(), data_plan(2), optimizer=functools.partial(torch.optim.AdamW, lr=0.5))
    other.load(tmp_path / "saved")
    assert other.optimizer.param_groups[0]["lr"] == 0.5


def same_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint's model files, read as any tool would; none may be in two files."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("model-*.safetensors")):
        found = load_file(path)
        assert not found.keys() & tensors.keys()
        tensors |= found
    return tensors


@ranks(4)
@pytest.mark.parametrize("tied", [True, False])
def test_other_tools_read_the_files(tmp_path: Path, tied: bool) -> None:
    trainer = make_trainer(small_gpt(tied=tied), data_plan(4), optimizer=ADAMW)
    train(trainer, 1)
    with mock.patch.object(snapshot, "MOST_FILE_BYTES", 6000):
        trainer.save(tmp_path / "saved")
    folder = tmp_path / "saved"
    tensors = same_tensors(folder)
    model = trainer.named_model
    assert tensors.keys() == model.state_dict().keys()
    assert all(torch.equal(tensors[name], parameter) for name, parameter in model.named_parameters())
    for path in folder.glob("model-*.safetensors"):
        with safe_open(path, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert index["weight_map"] == {
        name: path.name for path in folder.glob("model-*.safetensors") for name in load_file(path)
    }
    counts = {kind: len(list(folder.glob(f"{kind}-*"))) for kind in ("model", "optimizer")}
    assert counts["model"] > 2 and counts["optimizer"] > 2 * counts["model"] - 2
    assert {path.name for path in folder.iterdir()} == {
        "checkpoint.json",
        "model.safetensors.index.json",
        *(f"{kind}-{n:05d}-of-{count:05d}.safetensors" for kind, count in counts.items() for n in range(1, count + 1)),
        *(f"rank-{rank:05d}.safetensors" for rank in range(4)),
    }
    small_gpt(tied=tied).load_state_dict(tensors)  # strict: a tied weight is there under each of its names


@ranks(4)
def test_fewer_tensors_than_ranks(tmp_path: Path) -> None:
    def make() -> Trainer:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(17, 4), nn.Linear(4, 17, bias=False))
        return make_trainer(model, data_plan(4), optimizer=OPTIMIZERS["plain"])

    trainer = make()
    train(trainer, 1)
    trainer.save(tmp_path / "saved")
    assert sorted(path.name for path in (tmp_path / "saved").glob("[mo]*-of-*")) == ["model-00001-of-00001.safetensors"]
    resumed = make()
    resumed.load(tmp_path / "saved")
    assert train(resumed, 2) == train(trainer, 2)


def batch_norm_trainer(num_ranks: int, buffers: str) -> Trainer:
    torch.manual_seed(5)
    plan = data_plan(num_ranks, buffers=buffers, check_every=0)
    return make_trainer(small_convnet().double(), plan, optimizer=ADAMW)


@pytest.mark.sampled(2)
@ranks(2)
@pytest.mark.parametrize("buffers", ["synchronise", "broadcast", "local"])
def test_batch_norm_statistics(tmp_path: Path, buffers: str) -> None:
    unbroken = batch_norm_trainer(2, buffers)
    train(unbroken, 3)
    unbroken.save(tmp_path / "saved")
    before = state(unbroken)
    own = {name: value.clone() for name, value in persistent_buffers(unbroken.named_model).items()}
    portable = same_tensors(tmp_path / "saved")
    everyone = unbroken.mesh.everyone("control")
    for name, value in own.items():
        lists = gather_values(value.tolist(), everyone)
        both = [torch.tensor(values, dtype=torch.float64) for values in lists]
        torch.testing.assert_close(portable[name].double(), (both[0] + both[1]) / 2, rtol=1e-15, atol=0)
        if name.endswith("running_mean"):
            assert torch.equal(*both) == (buffers != "local")
    losses = train(unbroken, 3)
    resumed = batch_norm_trainer(2, buffers)
    resumed.load(tmp_path / "saved")
    assert_equal(state(resumed), before)
    assert train(resumed, 3) == losses
    assert_equal(state(resumed), state(unbroken))


@ranks(2)
def write_local_statistics(folder: Path) -> None:
    trainer = batch_norm_trainer(2, "local")
    train(trainer, 3)
    trainer.save(folder / "saved")


def test_another_plan_gets_the_mean_of_local_statistics(tmp_path: Path) -> None:
    write_local_statistics(folder=tmp_path)
    trainer = batch_norm_trainer(1, "synchronise")
    with Warnings() as warned:
        trainer.load(tmp_path / "saved")
    assert len(warned) == 1
    portable = same_tensors(tmp_path / "saved")
    for name, value in persistent_buffers(trainer.named_model).items():
        assert torch.equal(value, portable[name])


@ranks(2)
def test_what_was_loaded_does_not_live_in_the_checkpoint(tmp_path: Path) -> None:
    """A tensor that is a window on a deleted file keeps its disk space, and dies with it where the file is cut."""
    trainer = make_trainer(small_gpt(), data_plan(2), optimizer=ADAMW)
    train(trainer, 1)
    trainer.save(tmp_path / "saved")
    resumed = make_trainer(small_gpt(), data_plan(2), optimizer=ADAMW)
    resumed.load(tmp_path / "saved")
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
    assert mapped == []


def test_the_index_says_where_the_run_was(tmp_path: Path) -> None:
    trainer = make_trainer(small_gpt(), data_plan(1), optimizer=ADAMW)
    train(trainer, 2)
    trainer.save(tmp_path / "saved")
    index = read_index(tmp_path / "saved")
    assert (index["step"], index["data_position"], index["optimizer"]) == (2, 8 + 7, "AdamW")
    assert index["plan"] == format_plan(trainer.plan) and index["plan"].startswith("[axes]\ndata = 1\n")
    names = {record["name"] for record in index["files"]}
    assert names == {path.name for path in (tmp_path / "saved").iterdir()} - {"checkpoint.json"}
