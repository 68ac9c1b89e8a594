"""Values that a model collects across its blocks: carried between stages, or refused on all ranks alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from families import make_family, text_batch, verified
from meshes import kept_mesh
from oracle import SGD, pipeline_plan
from pipelines import Block, Stack, vector_batch
from ranks import ranks
from torch import Tensor, nn

from weft.errors import ModelError
from weft.training.parallelize import parallelize

BESIDE = r'"blocks\.\d" makes a tensor that the model uses afterwards, but does not return it'
PLAN = pipeline_plan(2, microbatches=2, cuts=(2,))


class HiddenStates(nn.Module):
    """A Hugging Face model whose hidden states feed a head of one's own."""

    def __init__(self, family: str, pick: Callable[[tuple[Tensor, ...]], Tensor]) -> None:
        super().__init__()
        self.body = make_family(family, output_hidden_states=True)
        self.pick, self.head = pick, nn.Linear(32, 64)

    def forward(self, tokens: Tensor) -> Any:
        return self.head(self.pick(self.body(tokens).hidden_states))


@ranks(2)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_hidden_states_of_all_stages_are_collected(family: str) -> None:
    verified(HiddenStates(family, lambda states: states[1] + states[-1]), PLAN, [text_batch(4)])


@ranks(2)
def test_the_last_four_layers_of_bert_cross_stages() -> None:
    verified(HiddenStates("bert", lambda states: sum(states[-4:], torch.zeros(()))), PLAN, [text_batch(4)])


class Hooked(Stack):
    """A hook keeps what a block returns, or a layer inside it; the closure holds the model."""

    def __init__(self, *, inside: bool = False) -> None:
        super().__init__()
        self.kept: dict[str, Tensor] = {}
        watched = self.blocks[1].up if inside else self.blocks[1]
        watched.register_forward_hook(lambda module, args, output: self.kept.__setitem__("one", output))

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + self.kept["one"][:, :5]


class HookedInside(Hooked):
    def __init__(self) -> None:
        super().__init__(inside=True)


class Changed(Stack):
    """A hook changes what a block returns."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].register_forward_hook(lambda module, args, output: 3 * output)


class Appending(Block):
    def forward(self, x: Tensor, states: list[Tensor]) -> Tensor:  # type: ignore[override]
        x = super().forward(x)
        states.append(x)
        return x


class AppendedTo(Stack):
    """Blocks append to a list that they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Appending() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        states: list[Tensor] = []
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, states)
        return self.head(x + sum(states))


class Remembering(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.penalty = x.pow(2).mean()
        return x


class Remembered(Stack):
    """Blocks keep a term of the loss as an attribute, which the model reads."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Remembering() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + sum(block.penalty for block in self.blocks)


def stepped(model: nn.Module, loss: Any = "cross-entropy") -> float:
    inputs, targets = vector_batch(4)
    trainer = parallelize(model, PLAN, loss=loss, optimizer=SGD, example=inputs[:2], mesh=kept_mesh(PLAN))
    return float(trainer.step(inputs, targets))


@ranks(2)
@pytest.mark.parametrize("kind", [Hooked, Changed])
def test_what_hooks_keep_or_change_is_the_same_on_every_stage(kind: type[Stack]) -> None:
    inputs, targets = vector_batch(4)
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(1)
        true = float(F.cross_entropy(kind().double()(inputs), targets))
    torch.manual_seed(1)
    assert stepped(kind().double()) == pytest.approx(true, rel=1e-12)


@ranks(2)
@pytest.mark.parametrize("make", [HookedInside, AppendedTo, Remembered])
def test_what_leaves_a_block_beside_its_output_is_refused(make: type[Stack]) -> None:
    with pytest.raises(ModelError, match=BESIDE):
        stepped(make().double())


class KeepingBlock(Block):
    """A block that keeps a loss of its own for later."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.auxiliary = x.square().mean()
        return x


@ranks(2)
def test_what_blocks_keep_is_warned_of_where_a_loss_could_read_it() -> None:
    model = Stack().double()
    for block in model.blocks:
        block.__class__ = KeepingBlock
    inputs, _ = vector_batch(4)
    with pytest.MonkeyPatch.context() as patch:
        told: list[str] = []
        patch.setattr("weft.parallel.apply.log.warning", lambda text, *values: told.append(text % values))
        given: dict[str, Any] = {"optimizer": SGD, "example": inputs[:2], "device": "cpu", "mesh": kept_mesh(PLAN)}
        parallelize(model, PLAN, loss=F.mse_loss, **given).close()
    assert len(told) == (1 if dist.get_rank() == 0 else 0)
    assert all("(blocks.0.auxiliary, blocks.1.auxiliary" in text for text in told)
