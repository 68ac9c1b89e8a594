"""ZeRO-3's units outside of blocks: large embeddings and heads, whatever else uses their weights."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch._dynamo  # before ranks are forked
import torch.nn.functional as F
from meshes import verify
from oracle import ADAMW, Batch, data_plan, make_trainer, pipeline_plan, tensor_plan, token_batch, train_alone
from ranks import ranks
from strict_plans import weft_over_strict
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from weft.blueprint import find_blueprint
from weft.measure.model import profile_model
from weft.parallel.zero.grouping import describe_parameters, layers_outside_blocks
from weft.plan.partition.flat_buffers import flat_buffers, sharded_bytes
from weft.plan.plan import Plan
from weft.planning.memory import predict_memory
from weft.training.trainer import Trainer
from weft.verification.verify import verify as verify_alone

WIDTH = 8


class Net(nn.Module):
    """Tokens to logits, with an embedding and a head that are larger than a block."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(17, WIDTH), nn.Embedding(8, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 17)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.logits(self.norm(x), tokens)

    def logits(self, x: Tensor, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(x)
        return logits


class TiedByProduct(Net):
    def logits(self, x: Tensor, tokens: Tensor) -> Tensor:
        return x @ self.embedding.weight.T + self.head.bias


class HeadAsFunction(Net):
    def logits(self, x: Tensor, tokens: Tensor) -> Tensor:
        return F.linear(x, self.head.weight, self.head.bias)


class EmbeddingAsFunction(Net):
    def forward(self, tokens: Tensor) -> Tensor:
        x = F.embedding(tokens, self.embedding.weight)
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.logits(self.norm(x), tokens)


class EmbeddingCalledAgain(Net):
    def logits(self, x: Tensor, tokens: Tensor) -> Tensor:
        return super().logits(x + self.embedding(tokens.flip(1)), tokens)


class HeadCalledAndUsed(Net):
    """Also before its turn, and in another place of the graph than behind its own input."""

    def forward(self, tokens: Tensor) -> Tensor:
        weight = self.head.weight.mean(0)
        x = self.embedding(tokens) * weight
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.logits(self.norm(x), tokens) + self.head.weight.square().sum(1)


class HeadCalledTwice(Net):
    def logits(self, x: Tensor, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(x) + self.head(x.tanh()).tanh()
        return logits


class RecomputedHead(Net):
    def logits(self, x: Tensor, tokens: Tensor) -> Tensor:
        logits: Tensor = checkpoint(self.head, x, use_reentrant=False)
        return logits


class SizesAndFormats(Net):
    """What needs no values must not need a gather either; sizes do, because a placeholder has none."""

    def logits(self, x: Tensor, tokens: Tensor) -> Tensor:
        assert self.embedding.weight.dtype == x.dtype and self.embedding.weight.device == x.device
        logits: Tensor = self.head(x)
        return logits + logits.new_ones(self.embedding.weight.shape[0])


class UnusedLayers(Net):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, 17)

    def forward(self, tokens: Tensor) -> Tensor:
        if (tokens[:, 0] >= 0).all():
            self.positions.requires_grad_(False)
        return super().forward(tokens)


MODELS = {
    made.__name__: made
    for made in (
        Net,
        TiedByProduct,
        HeadAsFunction,
        EmbeddingAsFunction,
        EmbeddingCalledAgain,
        HeadCalledAndUsed,
        HeadCalledTwice,
        RecomputedHead,
        SizesAndFormats,
        UnusedLayers,
    )
}


def stage3(**changes: Any) -> Plan:
    return data_plan(2, shard="parameters", **changes)


def batches(*sizes: int) -> list[Batch]:
    return [token_batch(size, seed=seed) for seed, size in enumerate(sizes)]


SOCKETS = "c10d"
"""The transport on which a rank frees what it gathered, instead of sharing it."""


@pytest.mark.sampled(2, long=6)
@ranks(2)
@pytest.mark.parametrize("reshard", ["microbatch", pytest.param("step", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", MODELS)
def test_weights_used_in_any_way(name: str, reshard: str) -> None:
    """In the steps of 1 sample, a rank has nothing to compute and must still make the gathers of the other."""
    model = MODELS[name]()
    assert set(layers_outside_blocks(model, find_blueprint(model).blocks)) == {-1, 3}
    plan = stage3(microbatches=2, reshard=reshard, transport=SOCKETS)
    # A rank that has computed nothing so far takes weights to be used in their turn.
    sizes = (8, 1, 8, 1) if name == "HeadCalledAndUsed" else (1, 8, 1, 8)
    verify(model, plan, loss="cross-entropy", optimizer=ADAMW, batches=batches(*sizes), device="cpu").require()


@ranks(2)
@pytest.mark.parametrize("name", ["Net", "TiedByProduct"])
def test_over_a_transport_that_shows_nothing_before_a_wait(name: str) -> None:
    with weft_over_strict():
        plan, given = stage3(microbatches=2, reshard="microbatch"), batches(8, 1, 8)
        verify_alone(MODELS[name](), plan, loss="cross-entropy", optimizer=ADAMW, batches=given, device="cpu").require()


def product_with_head(model: Net) -> Any:
    """A loss that takes the head's weight, and the embedding's, from outside of the model."""

    def loss(output: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        penalty = model.head.weight.square().sum() + model.embedding.weight.square().sum()
        total = F.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum")
        return total + targets.numel() * penalty, targets.numel()

    return loss


@ranks(2)
def test_a_loss_that_uses_weights() -> None:
    model = Net().double()
    alone = copy.deepcopy(model)
    trainer = make_trainer(model, stage3(transport=SOCKETS), optimizer=ADAMW, loss=product_with_head(model))
    optimizer = ADAMW(alone.parameters())
    for inputs, targets in batches(4, 4, 4):
        total, count = product_with_head(alone)(alone(inputs), targets)
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        part = slice(trainer.data_rank, None, 2)
        assert float(trainer.step(inputs[part], targets[part])) == pytest.approx(
            float(total.detach() / count), rel=1e-12
        )


@pytest.mark.long
@ranks(2)
@pytest.mark.parametrize("name", ["Net", pytest.param("TiedByProduct", marks=pytest.mark.long)])
def test_a_model_compiled_as_a_whole(name: str) -> None:
    """Hooks break the graph, and parts of it may see intercepted parameters."""
    torch._dynamo.reset()
    model = MODELS[name]().double()
    seen = train_alone(copy.deepcopy(model), batches(8, 8, 8, 8), optimizer=lambda one: ADAMW(one.parameters()))
    trainer = make_trainer(torch.compile(model, backend="eager"), stage3(transport=SOCKETS), optimizer=ADAMW)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # dynamo looks at gradients of tensors between graphs
        for batch, expected in zip(batches(8, 8, 8, 8), seen, strict=True):
            part = slice(trainer.data_rank, None, 2)
            loss = float(trainer.step(*(tensor[part] for tensor in batch)))
            assert loss == pytest.approx(expected.loss, rel=1e-12)


# ---- what is whole, and when ----


class Watch:
    """The flat buffers that are whole at every call of a module and when its backward pass begins, and their bytes."""

    def __init__(self, trainer: Trainer) -> None:
        self._flats = trainer.sync.flats
        self.at: dict[str, list[str]] = {}
        self.num_bytes: dict[str, int] = {}
        for name, module in trainer.model.named_modules():
            module.register_forward_pre_hook(lambda *_, name=name: self._look(name))
            module.register_forward_hook(lambda module, args, output, name=name: self._look_in_backward(name, output))

    def whole(self) -> list[str]:
        return [flat.names[0] for flat in self._flats if flat.is_whole]

    def _look(self, name: str) -> None:
        self.at[name] = self.whole()
        self.num_bytes[name] = sum(flat.whole.nbytes for flat in self._flats if flat.is_whole)

    def _look_in_backward(self, name: str, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda _: self._look(f"backward of {name}"))


EMBEDDING, ROOT, HEAD = "embedding.weight", "norm.weight", "head.weight"


@ranks(2)
def test_an_embedding_and_a_head_are_not_whole_together() -> None:
    model = Net()
    predicted = predict_memory(stage3(), profile_model(model, *token_batch(2)), one_host=False)
    trainer = make_trainer(model, stage3(transport=SOCKETS))
    watch = Watch(trainer)
    trainer.step(*token_batch(2))
    assert watch.at["head"] == [ROOT, EMBEDDING, HEAD], "the first microbatch shows what uses the embedding"
    trainer.step(*token_batch(2))
    assert (predicted.moment, predicted.gathered) == ("backward of postlude", watch.num_bytes["backward of head"])
    assert watch.at["embedding"] == watch.at["positions"] == [ROOT, EMBEDDING, "blocks.0.weight"]
    assert watch.at["blocks.0"] == [ROOT, "blocks.0.weight", "blocks.1.weight"]
    assert watch.at["blocks.2"] == [ROOT, "blocks.2.weight", HEAD]
    assert watch.at["head"] == watch.at["norm"] == [ROOT, HEAD]
    assert watch.at["backward of blocks.2"] == [ROOT, "blocks.1.weight", "blocks.2.weight"]
    assert watch.at["backward of blocks.0"] == [ROOT, "blocks.0.weight"]
    assert watch.whole() == []
    with torch.no_grad():
        trainer.model(token_batch(2)[0])
    assert watch.whole() == [] and watch.at["head"] == [ROOT, HEAD]


@ranks(2)
@pytest.mark.parametrize("name", ["Net", "TiedByProduct", "HeadAsFunction"])
def test_each_is_gathered_once(name: str) -> None:
    """Also where something else uses it; what travels is what was predicted."""
    model, plan = MODELS[name](), stage3(transport=SOCKETS, microbatches=2, reshard="microbatch")
    predicted = sharded_bytes(flat_buffers(describe_parameters(model, find_blueprint(model).blocks), plan), plan)
    trainer = make_trainer(model, plan)
    trainer.step(*token_batch(4))
    traffic = trainer.mesh.state_group("parameters").traffic
    before = traffic.sent_bytes
    trainer.step(*token_batch(4))
    assert traffic.sent_bytes - before == predicted["data"]


# ---- which layers ----


def units(model: nn.Module, plan: Plan) -> dict[int | None, list[str]]:
    found: dict[int | None, list[str]] = {}
    for one in flat_buffers(describe_parameters(model, find_blueprint(model).blocks), plan):
        found.setdefault(one.block, []).extend(one.names)
    return found


def test_large_embeddings_and_heads_are_units_in_a_model_of_one_piece() -> None:
    model = Net()
    outside = {None: ["norm.weight", "norm.bias"], -1: ["embedding.weight", "positions.weight"]}
    found = units(model, stage3())
    assert {number: found[number] for number in (None, -1, 3)} == outside | {3: ["head.weight", "head.bias"]}
    assert list(found) == [None, -1, 0, 1, 2, 3]
    for plan in (pipeline_plan(2, shard="parameters"), tensor_plan(2, shard="parameters")):
        assert list(units(model, plan)) == [None, 0, 1, 2]


def test_what_belongs_to_the_root() -> None:
    tied, renormed, small = Net(), Net(), Net()
    tied.head.weight = tied.embedding.weight
    renormed.embedding = nn.Embedding(17, WIDTH, max_norm=1.0)
    small.blocks = nn.ModuleList(nn.Linear(WIDTH, 100 * WIDTH) for _ in range(3))
    blocks = [f"blocks.{number}" for number in range(3)]
    assert layers_outside_blocks(tied, blocks) == {-1: ("positions",)}
    assert layers_outside_blocks(renormed, blocks) == {-1: ("positions",), 3: ("head",)}
    assert layers_outside_blocks(small, blocks) == layers_outside_blocks(Net(), []) == {}
