"""Models that are awkward to cut: what they do between their blocks gives one process's answer on every cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from meshes import verify
from oracle import ADAMW, Batch, small_gpt
from pipelines import HIDDEN, Block, Stack, pipeline_plan, vector_batch
from ranks import ranks
from torch import Tensor, nn

from weft.blueprint import Blueprint
from weft.plan.plan import Plan


class UNet(Stack):
    """Every block of the first half feeds one of the second, over several stages; the stem feeds the head."""

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.stem(x)
        kept = []
        for block in self.blocks[:2]:
            kept.append(x := block(x))
        for block in self.blocks[2:]:
            x = block(x + 0.5 * kept.pop())
        return self.head(torch.cat([x, first]).chunk(2)[0] + first)


class OwnParameters(Stack):
    """Parameters of the model itself: one used before a block, one on all stages, one in the output, one never."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(HIDDEN)), nn.Parameter(torch.zeros(HIDDEN))
        self.bias, self.unused = nn.Parameter(torch.zeros(5)), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x) * self.scale
        for block in self.blocks:
            x = block(x + self.shift)
        return self.head(x) + self.bias


class TiedByHand(nn.Module):
    """The head is the embedding's weight, used as it is; positions are a slice of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, HIDDEN)
        self.positions = nn.Parameter(torch.randn(16, HIDDEN) / 10)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(x, self.embedding.weight)


class CalledTwice(Stack):
    """One norm after every block, on every stage; one adapter at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.adapter = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        x = self.adapter(self.stem(x))
        for block in self.blocks:
            x = self.shared(block(x))
        return self.head(self.adapter(x))


class TwoWays(Block):
    """Returns a dict with a tensor, a number and a tuple, and takes a mask by name."""

    def forward(self, state: dict[str, Any], *, mask: Tensor | None = None) -> dict[str, Any]:  # type: ignore[override]
        x, (total, steps) = super().forward(state["x"]), state["rest"]
        x = x if mask is None else x.masked_fill(mask, 0.0)
        return {"x": x, "rest": (total + x, steps + 1), "name": "state", "none": None}


class Trees(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(HIDDEN, HIDDEN)
        self.blocks = nn.ModuleList(TwoWays() for _ in range(4))
        self.heads = nn.ModuleDict({"one": nn.Linear(HIDDEN, 5), "two": nn.Linear(HIDDEN, 5)})

    def forward(self, x: Tensor) -> dict[str, Any]:
        mask = x > 1.5
        state: dict[str, Any] = {"x": self.stem(x), "rest": (torch.zeros_like(x), 0)}
        for block in self.blocks:
            state = block(state, mask=mask)
        total, steps = state["rest"]
        return {"one": self.heads["one"](state["x"]), "two": (self.heads["two"](total / steps),)}


def two_losses(output: dict[str, Any], targets: Tensor) -> Tensor:
    return F.cross_entropy(output["one"], targets) + F.cross_entropy(output["two"][0], targets)


class ByName(Stack):
    """Inputs in a dict, some of them for every stage, and integer values that travel."""

    def forward(self, *, x: Tensor, keep: Tensor, positions: Tensor) -> Tensor:  # type: ignore[override]
        x = self.stem(x) * positions[:, None].cos()
        assert int(keep.sum(1).max()) <= HIDDEN, "which cannot be asked of a part without samples"
        order = x.argsort(1)
        for block in self.blocks:
            x = block(x * keep)
        return self.head(x.gather(1, order))


def named_batch(num_samples: int, *, seed: int = 0) -> Batch:
    x, targets = vector_batch(num_samples, seed=seed)
    return {"x": x, "keep": x.abs() < 2, "positions": torch.arange(num_samples) / 10}, targets


class InPlace(Stack):
    """Writes into what units returned: before the next block, after others have used it, and through views."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        first = x
        for number, block in enumerate(self.blocks):
            x = F.relu(x, inplace=True) if number == 2 else x
            x = block(x)
            x += 1.0
            x[:, 0] *= 2.0
        canvas = torch.zeros(x.shape[0], 2, HIDDEN, dtype=x.dtype)
        canvas[:, 0].copy_(first)
        canvas.select(1, 1).add_(x)
        return self.head(canvas.sum(1))


class WrittenLate(Stack):
    """A skip is written into on the stage that made it, after it was used, and is needed on later stages."""

    def forward(self, x: Tensor) -> Tensor:
        skip = self.blocks[0](self.stem(x))
        x = self.blocks[1](skip * 1.0)
        skip.mul_(3.0)
        x = self.blocks[2](x)
        skip.add_(x)
        return self.head(self.blocks[3](x) + skip)


class Unlike(nn.Module):
    """A Sequential of layers of many kinds, some without parameters, one that works in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(HIDDEN, 16), nn.ReLU(inplace=True), nn.BatchNorm1d(16), nn.Unflatten(1, (4, 4)),
            nn.Conv1d(4, 6, 3), nn.GELU(), nn.Flatten(), nn.Linear(12, 5),
        )  # fmt: skip

    def weft_blueprint(self) -> Blueprint:
        return Blueprint(blocks=tuple(f"layers.{number}" for number in range(len(self.layers))))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Unused(Stack):
    """Blocks with unused parameters, a block that is never called, an unused module."""

    def __init__(self) -> None:
        super().__init__(num_blocks=5, extra=nn.Linear(3, 3))
        for block in self.blocks:
            block.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in (*self.blocks[:2], *self.blocks[3:]):
            x = block(x)
        return self.head(x)


class Detached(Stack):
    """A value that travels without a gradient though its maker is trained, and one that is used for its sign only."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        first = x
        for block in self.blocks:
            x = block(x) + block(x.detach()).sign() / 7
        return self.head(x + first.detach())


def frozen(*names: str) -> Stack:
    model = Stack()
    for name in names:
        model.get_submodule(name).requires_grad_(False)
    return model


def token_vectors(num_samples: int, *, seed: int = 0) -> Batch:
    text = torch.randint(17, (num_samples, 9), generator=torch.Generator().manual_seed(seed))
    return text[:, :-1].clone(), text[:, 1:].clone()


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Batch], Any]] = {
    "skips over several stages": (UNet, vector_batch, "cross-entropy"),
    "the model's own parameters": (OwnParameters, vector_batch, "cross-entropy"),
    "tied by hand": (TiedByHand, token_vectors, "cross-entropy"),
    "units called twice": (CalledTwice, vector_batch, "cross-entropy"),
    "trees": (Trees, vector_batch, two_losses),
    "inputs by name": (ByName, named_batch, "cross-entropy"),
    "in place": (InPlace, vector_batch, "cross-entropy"),
    "written late": (WrittenLate, vector_batch, "cross-entropy"),
    "unlike layers": (Unlike, vector_batch, "cross-entropy"),
    "unused parameters": (Unused, vector_batch, "cross-entropy"),
    "detached": (Detached, vector_batch, "cross-entropy"),
    "frozen first stage": (lambda: frozen("stem", "blocks.0"), vector_batch, "cross-entropy"),
    "nothing to train in the middle": (lambda: frozen("blocks.1", "blocks.2"), vector_batch, "cross-entropy"),
    "nothing to train at the end": (lambda: frozen("blocks.3", "head"), vector_batch, "cross-entropy"),
    "tied gpt with dropout": (lambda: small_gpt(num_layers=4, dropout=0.2), token_vectors, "cross-entropy"),
}


HAS_BATCH_NORM = {"unlike layers"}  # which wants two samples in a microbatch, be it of two data ranks


def check(name: str, plan: Plan) -> None:
    make, batch, loss = MODELS[name]
    sizes = (12, 10, 16) if name in HAS_BATCH_NORM else (7, 3, 8)
    batches = [batch(size, seed=seed) for seed, size in enumerate(sizes)]
    outcome = verify(make(), plan, loss=loss, optimizer=ADAMW, batches=batches, device="cpu").require()
    weights = {difference.name for difference in outcome.differences if difference.what == "weight"}
    assert weights == {parameter_name for parameter_name, _ in make().named_parameters()}, "nothing was left out"


PLANS_OF_4 = {
    "1f1b": pipeline_plan(4, microbatches=3, clip_norm=0.1),
    "zero-bubble": pipeline_plan(4, schedule="zero-bubble", microbatches=5, clip_norm=0.1),
    "interleaved": pipeline_plan(2, schedule="interleaved", microbatches=4, data=2, clip_norm=0.1),
    "zero 3": pipeline_plan(2, schedule="zero-bubble", data=2, shard="parameters", clip_norm=0.1),
}


def runs() -> list[Any]:
    """Every model under one plan, in turn; under the others in the long run."""
    found = []
    for number, name in enumerate(MODELS):
        for place, plan in enumerate(PLANS_OF_4):
            is_short = place == number % len(PLANS_OF_4)
            found.append(pytest.param(name, plan, marks=() if is_short else pytest.mark.long))
    return found


@pytest.mark.sampled(2, long=15)
@ranks(4)
@pytest.mark.parametrize(("name", "plan"), runs())
def test_an_awkward_model_gives_the_answer_of_one_process(name: str, plan: str) -> None:
    check(name, PLANS_OF_4[plan])
