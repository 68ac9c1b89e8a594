"""Models and plans that a pipeline cannot run are refused before the first step, on every rank, with a remedy."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from oracle import make_trainer
from pipelines import HIDDEN, Block, Stack, pipeline_plan, vector_batch
from ranks import ranks
from torch import Tensor, nn

from weft.errors import WeftError
from weft.plan.plan import Plan


class Backwards(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in reversed(self.blocks):
            x = block(x)
        return self.head(x)


class ByValue(Stack):
    """Looks at what a block has computed."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x) if float(x.sum()) > 0 else x
        return self.head(x)


class Curious(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.max() > 0 else x


class Writer(Block):
    """Writes into its argument."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.relu_())


class WritesAcross(Stack):
    """The first block's output is used at the end, after the second block has written into it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Writer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.blocks[0](self.stem(x))
        for block in self.blocks[1:]:
            x = block(x)
        return self.head(x + first)


class SharedStatistics(Stack):
    def __init__(self) -> None:
        super().__init__(shared=nn.BatchNorm1d(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = self.shared(block(x))
        return self.head(x)


def with_blocks(blocks: list[nn.Module]) -> Stack:
    model = Stack()
    model.blocks = nn.ModuleList(blocks)
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], Callable[[], Plan], str]] = {
    "more stages than blocks": (
        lambda: Stack(3), lambda: pipeline_plan(4), "pipeline 4 needs 4 blocks, the model has 3; use pipeline = 3"
    ),
    "more chunks than blocks": (
        Stack, lambda: pipeline_plan(4, schedule="interleaved"),
        'pipeline 4 × chunks 2 = 8 stages need 8 blocks, the model has 4; use chunks = 1 with '
        '[pipeline] schedule = "1f1b", or pipeline = 2',
    ),
    "cuts out of range": (Stack, lambda: pipeline_plan(4, cuts=(1, 2, 9)), "the blocks are 0 to 3; use numbers"),
    "too few cuts": (Stack, lambda: pipeline_plan(4, cuts=(1, 2)), "makes 3 stages"),
    "no blocks": (lambda: nn.Linear(HIDDEN, 5), lambda: pipeline_plan(4), "put its layers into an nn.Sequential"),
    "blocks called backwards": (Backwards, lambda: pipeline_plan(4), "a pipeline only goes forward"),
    "what a block made decides": (ByValue, lambda: pipeline_plan(4), "move that code into a block"),
    "a block that looks at values": (
        lambda: with_blocks([Curious() for _ in range(4)]), lambda: pipeline_plan(4), "decide by shapes, not by values"
    ),
    "a block that writes for others": (WritesAcross, lambda: pipeline_plan(4), "let it return a new tensor"),
    "statistics on several stages": (SharedStatistics, lambda: pipeline_plan(4), "statistics of their own"),
    "compiled as a whole": (lambda: torch.compile(Stack()), lambda: pipeline_plan(4), "set [compile] blocks = true"),
    "blocks that are never called": (
        lambda: Stack(spare=nn.ModuleList(Block() for _ in range(6))), lambda: pipeline_plan(4), "calls none of them"
    ),
}  # fmt: skip


@pytest.mark.sampled(2, long=8)
@ranks(4)
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_cut_is_refused_on_every_rank_with_what_to_do(what: str) -> None:
    make, plan, reason = REFUSED[what]
    with pytest.raises(WeftError) as caught:
        make_trainer(make(), plan(), example=vector_batch(2)[0].float())
    assert reason in str(caught.value)


@ranks(2)
def test_a_pipeline_needs_an_example_and_cannot_be_called_by_hand() -> None:
    with pytest.raises(WeftError, match=r"give parallelize\(..., example=inputs\)"):
        make_trainer(Stack(), pipeline_plan(2))
    trainer = make_trainer(Stack(), pipeline_plan(2), example=vector_batch(2)[0].float())
    with pytest.raises(WeftError, match=r"use trainer.step, trainer.evaluate or trainer.generate on every rank"):
        trainer.model(vector_batch(2)[0].float())
