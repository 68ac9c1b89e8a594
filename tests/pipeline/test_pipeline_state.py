"""Around the steps of a pipeline: evaluation, generation, checkpoints, checks, first values, and what is refused."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from oracle import ADAMW, cross_entropy, cut_evenly, image_batch, make_trainer, small_convnet, small_gpt, token_batch
from pipelines import FLUSHING, Block, Stack, pipeline_plan, vector_batch
from ranks import gathered, ranks
from safetensors.torch import load_file
from torch import Tensor, nn

from weft.errors import DivergenceError, ModelError
from weft.models.gpt import GPT, GPTConfig
from weft.plan.plan import Plan
from weft.training.trainer import Trainer

gpt: Callable[..., GPT] = functools.partial(small_gpt, num_layers=4)


def train(trainer: Trainer, num_steps: int) -> list[float]:
    """Steps on batches that depend on the step alone."""
    losses = []
    for _ in range(num_steps):
        batch = token_batch(9 - trainer.steps_done % 3, seed=trainer.steps_done)
        losses.append(float(trainer.step(*cut_evenly(batch, trainer.data_size)[trainer.data_rank])))
    return losses


def gpt_trainer(plan: Plan, **changes: Any) -> Trainer:
    torch.manual_seed(3)
    example = token_batch(2)[0]
    return make_trainer(gpt(dropout=0.1).double(), plan, **{"optimizer": ADAMW, "example": example, **changes})


class Skips(Stack):
    """The stem feeds the head, through all stages between."""

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x * first)


@torch.no_grad()
def mean_alone(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> float:
    was_training = model.training
    terms = [cross_entropy(model.eval()(inputs), targets) for inputs, targets in batches]
    model.train(was_training)
    return float(sum(total for total, _ in terms) / sum(count for _, count in terms))


@pytest.mark.sampled(long=3)
@pytest.mark.long
@ranks(4)
@pytest.mark.parametrize(
    ("schedule", "shard"),
    [
        pytest.param("interleaved", "parameters", marks=pytest.mark.long),
        ("interleaved", "nothing"),
        pytest.param("1f1b", "parameters", marks=pytest.mark.long),
        *(pytest.param(one, "nothing", marks=pytest.mark.long) for one in FLUSHING if one != "interleaved"),
    ],
)
def test_evaluation_and_generation_between_steps_are_those_of_one_process(schedule: str, shard: str) -> None:
    """Uneven batches, fewer of them on one data rank; training goes on as if nothing had been asked."""
    plan = pipeline_plan(2, data=2, schedule=schedule, microbatches=4, shard=shard)
    alone = gpt(dropout=0.1).double()
    trainer = make_trainer(copy.deepcopy(alone), plan, optimizer=ADAMW, example=token_batch(2)[0])
    left_alone = make_trainer(copy.deepcopy(alone), plan, optimizer=ADAMW, example=token_batch(2)[0])
    parts = [[token_batch(size, seed=size) for size in sizes] for sizes in ((5, 1, 6), (3,))]
    assert trainer.evaluate(parts[trainer.data_rank]) == pytest.approx(
        mean_alone(alone, parts[0] + parts[1]), rel=1e-12
    )
    assert trainer.model.training
    expected = make_greedy(alone, [1, 2, 3], num_tokens=6)
    assert trainer.generate([1, 2, 3], num_tokens=6, context=8, temperature=0.0) == expected
    sampled = trainer.generate([1], num_tokens=9, context=8, temperature=1.0, seed=5)
    assert gathered(sampled) == [sampled] * 4
    for number in range(2):
        torch.manual_seed(4)  # where dropout comes from is drawn by the first step
        before = train(trainer, 1)
        trainer.evaluate(parts[trainer.data_rank][: 1 + number])
        torch.manual_seed(4)
        assert train(left_alone, 1) == pytest.approx(before, rel=1e-12)


@torch.no_grad()
def make_greedy(model: nn.Module, tokens: list[int], *, num_tokens: int) -> list[int]:
    model.eval()
    made = list(tokens)
    for _ in range(num_tokens):
        made.append(int(model(torch.tensor([made[-8:]]))[0, -1].argmax()))
    model.train()
    return made


@pytest.mark.sampled(1)
@ranks(4)
@pytest.mark.parametrize("transport", ["c10d", "shared"])
def test_what_passes_a_stage_by_is_not_written_over(transport: str) -> None:
    """Many microbatches are under way at once, and each stage hands a skip on to the next."""
    model = Skips().double()
    trainer = make_trainer(
        copy.deepcopy(model), pipeline_plan(4, microbatches=24, transport=transport), example=vector_batch(2)[0]
    )
    for size in (48, 24):
        batch = vector_batch(size, seed=size)
        assert trainer.evaluate([batch, batch]) == pytest.approx(mean_alone(model, [batch]), rel=1e-12)


ZERO_1, ZERO_3 = {"shard": "optimizer"}, {"shard": "parameters"}
SAVED = {
    "1f1b": pipeline_plan(2, data=2, clip_norm=0.5),
    "interleaved, zero 1": pipeline_plan(2, data=2, schedule="interleaved", **ZERO_1),
    "zero-bubble, zero 3": pipeline_plan(2, data=2, schedule="zero-bubble", **ZERO_3),
}
LOADED = {
    1: [pipeline_plan(1, microbatches=2)],
    2: [pipeline_plan(1, microbatches=2, data=2, **ZERO_3), pipeline_plan(2)],
    4: [pipeline_plan(4, microbatches=2)],
}
"""Plans by the number of ranks they need."""


@ranks(4)
def save_and_go_on(plan: Plan, folder: Path) -> None:
    """Save, go on, and go on again from what was saved: the same to the bit."""
    trainer = gpt_trainer(plan)
    train(trainer, 2)
    trainer.save(folder / "saved")
    losses = train(trainer, 2)
    again = gpt_trainer(plan)
    train(again, 1)
    again.load(folder / "saved")
    assert again.steps_done == 2
    assert train(again, 2) == losses
    again.evaluate([cut_evenly(token_batch(6), trainer.data_size)[trainer.data_rank]])


def load_and_go_on(plan: Plan, folder: Path, *, saves: bool = False) -> None:
    """Under another plan, to rounding. Without dropout in evaluation nothing depends on how a batch is cut."""
    trainer = gpt_trainer(plan)
    trainer.load(folder / "saved")
    assert trainer.steps_done == 2
    if saves:
        trainer.save(folder / "there")
        trainer = gpt_trainer(plan)
        trainer.load(folder / "there")
    state = trainer.evaluate(cut_evenly(token_batch(6), trainer.data_size)[trainer.data_rank : trainer.data_rank + 1])
    if trainer.mesh.world.rank == 0:
        with (folder / "seen").open("a") as file:
            file.write(f"{state!r}\n")


LOAD_ON_RANKS = {1: load_and_go_on, 2: ranks(2)(load_and_go_on), 4: ranks(4)(load_and_go_on)}


@pytest.mark.long
@pytest.mark.parametrize("saved", SAVED)
def test_a_checkpoint_of_a_pipeline_goes_on_under_any_plan(saved: str, tmp_path: Path) -> None:
    save_and_go_on(plan=SAVED[saved], folder=tmp_path)
    for world, plans in LOADED.items():
        for plan in plans:
            LOAD_ON_RANKS[world](plan=plan, folder=tmp_path, saves=world == 4)
    seen = [float(line) for line in (tmp_path / "seen").read_text().split()]
    assert len(seen) == 4
    assert seen == pytest.approx([seen[0]] * 4, rel=1e-12)
    LOAD_ON_RANKS[4](plan=SAVED[saved], folder=tmp_path, saves=True)
    assert float((tmp_path / "seen").read_text().split()[-1]) == pytest.approx(seen[0], rel=1e-12)


@ranks(4)
@pytest.mark.parametrize("stage", [0, 1])
def test_a_changed_weight_of_any_stage_is_named_on_every_rank(stage: int) -> None:
    trainer = gpt_trainer(pipeline_plan(2, data=2, check_every=0))
    train(trainer, 1)
    trainer.check_divergence()
    name = f"blocks.{3 * stage}.mlp.down.weight"
    if trainer.mesh.index("pipeline") == stage and trainer.data_rank == 1:
        with torch.no_grad():
            trainer.model.get_parameter(name)[0, 0] += 1e-9
    with pytest.raises(DivergenceError, match=name):
        trainer.check_divergence()


def state_bytes(trainer: Trainer) -> int:
    """Parameters and the optimizer's state, each memory once."""
    tensors = list(trainer.model.parameters())
    tensors += [value for state in trainer.optimizer.state.values() for value in state.values()]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.dim()}.values())


class Even(nn.Module):
    """Equal blocks and nothing else."""

    def __init__(self, hidden: int = 32) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(hidden) for _ in range(8)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


@ranks(4)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_a_rank_holds_its_part_of_the_state_and_no_more(schedule: str) -> None:
    model = Even()
    whole = 3 * sum(parameter.nbytes for parameter in model.parameters())
    trainer = make_trainer(model, pipeline_plan(4, schedule=schedule), optimizer=ADAMW, example=torch.randn(2, 32))
    trainer.step(torch.randn(8, 32), torch.randint(5, (8,)))
    assert state_bytes(trainer) == pytest.approx(whole / 4, rel=0.02)


@pytest.mark.sampled(1)
@ranks(4)
@pytest.mark.parametrize("shard", ["nothing", "parameters"])
def test_a_model_on_the_meta_device_gets_its_values_stage_by_stage(shard: str) -> None:
    torch.manual_seed(dist.get_rank())  # ranks need not agree on anything
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=67, context=8, num_layers=4, hidden=64, heads=2))
    plan = pipeline_plan(2, data=2, shard=shard)
    trainer = make_trainer(model, plan, optimizer=ADAMW, example=token_batch(2)[0])
    trainer.check_divergence()
    losses = [float(trainer.step(*cut_evenly(token_batch(8), 2)[trainer.data_rank])) for _ in range(5)]
    assert 4.0 < losses[0] < 4.4, "log 67 = 4.2: what an untrained model is to say"
    assert losses[-1] < losses[0]
    assert not any(parameter.is_meta for parameter in trainer.model.parameters())
    with torch.device("meta"):
        convnet = small_convnet(num_blocks=4)
    images, classes = image_batch(8)
    trainer = make_trainer(convnet, plan, example=images.float())
    assert float(trainer.step(*cut_evenly((images.float(), classes), 2)[trainer.data_rank])) < 5


@ranks(2)
@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_the_state_dict_of_a_part_is_refused(schedule: str, tmp_path: Path) -> None:
    """A checkpoint has the whole, under all names of tied weights, for a plain `load_state_dict`."""
    trainer = gpt_trainer(pipeline_plan(2, microbatches=2, schedule=schedule))
    with pytest.raises(ModelError, match=r"parameters of its own stages only.*call trainer.save\(directory\)"):
        trainer.model.state_dict()
    trainer.save(tmp_path / "saved")
    stored = {name: one for path in tmp_path.glob("saved/model-*") for name, one in load_file(path).items()}
    alone = gpt(dropout=0.1).double()
    alone.load_state_dict(stored)
    assert torch.equal(alone.head.weight, stored["embedding.weight"])
