"""ZeRO-3's comings and goings: whatever a model does with its blocks, ranks stay in step and the answer is exact.

The matrix (`tests/laws`) has ordinary models. Here are the others: blocks that are skipped, repeated, used in another
order, recomputed by the user, or that take and give trees of tensors.
"""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from meshes import verify
from oracle import ADAMW, Batch, data_plan, make_trainer, token_batch
from ranks import ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from weft.errors import ModelError
from weft.plan.plan import Compile, Plan

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.first(x).tanh())


class Net(nn.Module):
    """Tokens to logits through a few blocks, in a given order."""

    block: type[nn.Module] = Block
    num_blocks = 3
    order: tuple[int, ...] = (0, 1, 2)

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, WIDTH)
        self.blocks = nn.ModuleList(self.block() for _ in range(self.num_blocks))
        self.head = nn.Linear(WIDTH, 17)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.run(self.embedding(tokens), tokens))
        return logits

    def run(self, x: Tensor, tokens: Tensor) -> Tensor:
        for index in self.order:
            x = self.blocks[index](x)
        return x


def stage3(**changes: Any) -> Plan:
    return data_plan(2, shard="parameters", **changes)


def check(model: nn.Module, plan: Plan, batches: list[Batch]) -> None:
    """One process's losses, gradients and weights, in float64."""
    verify(model, plan, loss="cross-entropy", optimizer=ADAMW, batches=batches, device="cpu").require()


def batches(*sizes: int) -> list[Batch]:
    return [token_batch(size, seed=seed) for seed, size in enumerate(sizes)]


# ---- which blocks run, how often, and in which order ----


class Repeated(Net):
    order = (0, 0, 1, 2, 2)


class Reversed(Net):
    order = (2, 1, 0)


class Rounds(Net):
    order = (0, 1, 2, 0, 1, 2)


class FrozenRepeated(Repeated):
    """Only the second call of the first block has an input that needs a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding.requires_grad_(False)


class Long(Net):
    """More blocks than reductions may be under way."""

    num_blocks = 7
    order = (0, 1, 2, 3, 4, 5, 6)


class SkippedByTheData(Net):
    """Some blocks are for samples that begin with a small token; without any of those they do not run."""

    num_blocks = 6
    skipped: tuple[int, ...] = ()
    is_recomputed = False

    def run(self, x: Tensor, tokens: Tensor) -> Tensor:
        if not self.is_recomputed:
            return self.run_some(range(6), x, tokens)
        for some in (range(3), range(3, 6)):
            x = checkpoint(self.run_some, some, x, tokens, use_reentrant=False)
        return x

    def run_some(self, indices: range, x: Tensor, tokens: Tensor) -> Tensor:
        wanted = (tokens[:, 0] < 8)[:, None, None]
        for index in indices:
            if index not in self.skipped:
                x = self.blocks[index](x)
            elif wanted.any():
                x = torch.where(wanted, self.blocks[index](x), x)
        return x


ORDERS = {made.__name__: made for made in (Repeated, FrozenRepeated, Reversed, Rounds, Long)}


@pytest.mark.sampled(2)
@ranks(2)
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("name", ORDERS)
def test_blocks_in_any_order(name: str, microbatches: int) -> None:
    """In the steps of 1 sample, a rank has nothing to compute and must still make the gathers of the other."""
    check(ORDERS[name](), stage3(microbatches=microbatches, reshard="microbatch"), batches(8, 1, 8, 1))


@pytest.mark.sampled(2)
@ranks(2)
@pytest.mark.parametrize("is_recomputed", [False, True])
@pytest.mark.parametrize("skipped", [(1,), (0, 5), (3, 4, 5), (0, 1, 2, 3, 4, 5)], ids=str)
def test_blocks_that_only_one_rank_runs(skipped: tuple[int, ...], is_recomputed: bool) -> None:
    steps = batches(8, 4)
    for tokens, _ in steps:
        tokens[:, 0] = torch.tensor([1] * (len(tokens) // 2) + [9] * (len(tokens) // 2))  # the second rank skips
    model = SkippedByTheData()
    model.skipped, model.is_recomputed = skipped, is_recomputed
    check(model, stage3(microbatches=2, reshard="microbatch"), steps)
    check(model, stage3(microbatches=2, reshard="step"), steps[:1])


# ---- what blocks take and give ----


class TupleBlock(Block):
    def forward(self, x: Tensor, extra: Tensor | None = None, *, scale: Tensor) -> Any:
        return (super().forward(x) * scale, "a note"), {"scale": scale.mul(0.9), "none": None}


class Trees(Net):
    """Tuples and dicts come out; a tensor that needs a gradient goes in by keyword, and is used by all blocks."""

    block = TupleBlock

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def run(self, x: Tensor, tokens: Tensor) -> Tensor:
        scale: Tensor = self.scale
        for block in self.blocks:
            (x, note), extra = block(x, scale=scale)
            scale = extra["scale"]
        return x


class AuxBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.aux = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, ignored: Tensor) -> Any:
        return super().forward(x), self.aux(x)


class UnusedTensors(Net):
    """A block's second output goes into the next block, which ignores it: its layer has no gradient at all."""

    block = AuxBlock

    def run(self, x: Tensor, tokens: Tensor) -> Tensor:
        aux = x
        for block in self.blocks:
            x, aux = block(x, aux)
        return x


class InPlaceBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        x += self.second.bias
        return super().forward(x)


class InPlace(Net):
    """Blocks that write into what they are given."""

    block = InPlaceBlock

    def run(self, x: Tensor, tokens: Tensor) -> Tensor:
        return super().run(x * 2, tokens)


@pytest.mark.sampled(2)
@dataclasses.dataclass
class Record:
    """What torch does not look into."""

    x: Tensor
    shape: torch.Size


class RecordBlock(Block):
    def forward(self, x: Tensor) -> Any:
        x = super().forward(x) * self.second.bias[:1]  # a view of a parameter: if that were freed, this would crash
        return Record(x, x.shape)


class Records(Net):
    block = RecordBlock

    def run(self, x: Tensor, tokens: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).x
        return x


SHAPES = {made.__name__: made for made in (Trees, UnusedTensors, InPlace, Records)}


@ranks(2)
@pytest.mark.parametrize("name", SHAPES)
def test_what_blocks_take_and_give(name: str) -> None:
    check(SHAPES[name](), stage3(microbatches=2, reshard="microbatch"), batches(8, 1, 5))
    check(SHAPES[name](), stage3(microbatches=2, reshard="step"), batches(5))


class OpaqueBlock(Block):
    def forward(self, x: Tensor) -> Any:
        return SimpleNamespace(x=super().forward(x))


class OpaqueNet(Records):
    block = OpaqueBlock


@ranks(2)
def test_outputs_that_hide_their_tensors_are_refused() -> None:
    trainer = make_trainer(OpaqueNet(), stage3())
    with pytest.raises(ModelError, match=r"OpaqueBlock.* returns a SimpleNamespace"):
        trainer.step(*token_batch(2))


# ---- recomputation of the user's own, and compilation ----


class Checkpointed(Net):
    reentrant = False
    span = 1

    def run(self, x: Tensor, tokens: Tensor) -> Tensor:
        for start in range(0, len(self.blocks), self.span):
            x = checkpoint(self.run_span, start, x, use_reentrant=self.reentrant)
        return x

    def run_span(self, start: int, x: Tensor) -> Tensor:
        for block in self.blocks[start : start + self.span]:
            x = block(x)
        return x


@pytest.mark.sampled(2)
@ranks(2)
@pytest.mark.parametrize("span", [1, 2])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_of_the_users_own(reentrant: bool, span: int) -> None:
    model = Checkpointed()
    model.reentrant, model.span = reentrant, span
    check(model, stage3(microbatches=2, reshard="microbatch"), batches(8, 1, 5))
    check(model, stage3(microbatches=2, reshard="step"), batches(5, 1, 3))


@pytest.mark.long
@ranks(2)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_blocks() -> None:
    torch._dynamo.reset()
    plan = dataclasses.replace(stage3(microbatches=2, reshard="microbatch"), compile=Compile(blocks=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
        check(Net(), plan, batches(8, 1, 5))
