"""Mixed precision in one process: what is cast and what is not, the loss scale, skipped steps, what is refused."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from by_hand import DTYPES, UNIT, TorchsScale, adamw, masters, mixed
from meshes import verify
from oracle import (
    MLP,
    SGD,
    batch_of,
    cross_entropy,
    data_plan,
    image_batch,
    make_trainer,
    small_convnet,
    small_gpt,
    token_batch,
)
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node

from weft.errors import PlanError
from weft.plan.plan import Plan
from weft.training.step import precision
from weft.training.step.precision import Caller, LossScale

HALVES = ["bf16", "fp16"]


def one_rank(compute: str, **changes: Any) -> Plan:
    return mixed(data_plan(1, **changes), compute=compute)


# ---- the loss scale ----


@pytest.mark.parametrize("seed", range(3))
def test_the_dynamic_scale_follows_torchs(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "_GROWTH_INTERVAL", 3)
    scale, torchs = LossScale.of(one_rank("fp16")), TorchsScale(growth_interval=3)
    torchs.update(is_finite=True)
    scale.update(is_finite=True)
    chance = random.Random(seed)
    values = set()
    for _ in range(60):
        is_finite = chance.random() < 0.8
        scale.update(is_finite=is_finite)
        torchs.update(is_finite=is_finite)
        assert scale.value == torchs.scaler.get_scale()
        values.add(scale.value)
    assert len(values) > 3, "it went up and down"


def test_the_settings_are_torchs() -> None:
    scaler = torch.amp.GradScaler("cpu")
    assert precision._GROWTH_INTERVAL == scaler.get_growth_interval() == 2000
    assert LossScale.of(one_rank("fp16")).value == scaler.get_scale() == 65536
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor()) == (2, 0.5)


def test_the_dynamic_scale_stays_between_1_and_2_to_the_24(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own scale has no such bounds: at zero every gradient is zero, and above the loss is infinite."""
    monkeypatch.setattr(precision, "_GROWTH_INTERVAL", 1)
    scale = LossScale.of(one_rank("fp16"))
    for _ in range(100):
        scale.update(is_finite=True)
    assert scale.value == 2**24
    for _ in range(100):
        scale.update(is_finite=False)
    assert scale.value == 1


def test_a_state_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "_GROWTH_INTERVAL", 3)
    scale = LossScale.of(one_rank("fp16"))
    for is_finite in (False, True, True):
        scale.update(is_finite=is_finite)
    again = LossScale.of(one_rank("fp16"))
    again.load_state(scale.state())
    again.update(is_finite=True)
    assert (scale.value, again.value) == (32768, 65536), "two good steps were remembered"


@pytest.mark.parametrize(("compute", "loss_scale", "value"), [("fp16", 512, 512), ("bf16", "dynamic", 1)])
def test_a_fixed_scale_stays(compute: str, loss_scale: int | str, value: float) -> None:
    scale = LossScale.of(mixed(Plan(), compute=compute, loss_scale=loss_scale))
    for is_finite in (True, False, True):
        scale.update(is_finite=is_finite)
    scale.load_state({"value": 4.0, "num_good": 1})
    assert scale.value == value


def test_small_gradients_survive_by_the_scale_alone() -> None:
    """A gradient of 1e-9 is nothing in fp16 and 6.6e-5 once it is scaled."""
    weights = {}
    for loss_scale in ("dynamic", 2):
        torch.manual_seed(0)
        model = nn.Linear(4, 1, bias=False)
        plan = mixed(Plan(), compute="fp16", loss_scale=loss_scale)
        trainer = make_trainer(model, plan, loss=lambda output, _: output.sum() * 1e-9, optimizer=SGD)
        trainer.step(torch.ones(1, 4), torch.zeros(1))
        (weights[loss_scale],) = (held.grad for held in (piece.tensor for piece in trainer.sync.pieces))
    assert torch.equal(weights[2], torch.zeros(1, 4))
    torch.testing.assert_close(weights["dynamic"], torch.full((1, 4), 1e-9), rtol=UNIT["fp16"], atol=0.0)


# ---- skipped steps ----


@pytest.mark.parametrize(("compute", "clip_norm"), [("bf16", 0.0), ("fp16", 0.0), ("fp16", 1.0), ("model", 1.0)])
def test_a_step_that_is_not_finite_changes_nothing(
    compute: str, clip_norm: float, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(MLP().float(), one_rank(compute, clip_norm=clip_norm), optimizer=adamw)
    inputs, targets = batch_of(4)
    trainer.step(inputs.float(), targets)
    before = masters(trainer)
    trainer.step(inputs.float() * float("nan"), targets)
    after = masters(trainer)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert trainer.num_skipped == 1 and trainer.steps_done == 2
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("step 2 is skipped: the loss is not finite")
    trainer.step(inputs.float(), targets)
    assert trainer.num_skipped == 1 and not torch.equal(masters(trainer)["first.weight"], before["first.weight"])


def test_nothing_is_looked_at_where_nothing_asks_for_it() -> None:
    trainer = make_trainer(MLP(), Plan())
    trainer.step(*batch_of(4))
    assert trainer.grad_norm is None


# ---- what is cast ----


class Spy(nn.Module):
    """Notes what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: Tensor, *, ids: Tensor, mask: Tensor, extra: list[Tensor]) -> dict[str, Any]:
        self.seen = {"x": x.dtype, "ids": ids.dtype, "mask": mask.dtype, "extra": extra[0].dtype}
        return {"out": self.layer(x), "more": (self.layer(extra[0]), ids), "name": "spy"}


@pytest.mark.parametrize("compute", HALVES)
def test_floats_go_in_as_16_bits_and_come_out_as_float32(compute: str) -> None:
    spy, half, seen = Spy(), DTYPES[compute], {}

    def loss(output: Any, targets: Tensor) -> Tensor:
        seen.update(out=output["out"].dtype, more=output["more"][0].dtype, ids=output["more"][1].dtype)
        assert output["name"] == "spy" and targets.dtype == torch.float64
        return (output["out"].sum() + output["more"][0].sum()) * targets.mean()

    trainer = make_trainer(spy, one_rank(compute), loss=loss)
    inputs = {
        "x": torch.randn(2, 4),
        "ids": torch.tensor([1, 2]),
        "mask": torch.tensor([True, False]),
        "extra": [torch.randn(2, 4, dtype=torch.float64)],
    }
    trainer.step(inputs, torch.ones(2, dtype=torch.float64))
    assert spy.seen == {"x": half, "ids": torch.int64, "mask": torch.bool, "extra": half}
    assert seen == {"out": torch.float32, "more": torch.float32, "ids": torch.int64}
    assert inputs["x"].dtype == torch.float32, "the batch itself is left alone"


def test_the_models_own_precision_casts_nothing() -> None:
    spy = Spy().double()
    seen = []
    trainer = make_trainer(spy, Plan(), loss=lambda output, _: seen.append(output["out"].dtype) or output["out"].sum())
    wide = torch.randn(2, 4, dtype=torch.float64)
    trainer.step({"x": wide, "ids": torch.arange(2), "mask": wide > 0, "extra": [wide]}, torch.ones(2))
    assert spy.seen["x"] == spy.seen["extra"] == seen[0] == torch.float64


class Pair(NamedTuple):
    scores: Tensor
    ids: Tensor


@dataclasses.dataclass
class Record:
    scores: Tensor
    ids: Tensor


class Named(OrderedDict[str, Any]):
    """As Hugging Face's outputs are: a dict whose entries are attributes too, and that torch's trees know."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(name)


register_pytree_node(
    Named, lambda d: (list(d.values()), list(d)), lambda values, keys: Named(zip(keys, values, strict=True))
)


@pytest.mark.parametrize("kind", [Pair, Record, Named])
def test_outputs_keep_their_kind(kind: Any) -> None:
    """A loss is never taken in 16 bits, whatever the model hands it."""
    model = nn.Linear(4, 3).bfloat16()
    caller = Caller(lambda x: kind(scores=model(x), ids=torch.arange(2)), one_rank("bf16"), widens=True)
    output = caller(torch.randn(2, 4))
    assert isinstance(output, kind)
    assert output.scores.dtype == torch.float32 and output.ids.dtype == torch.int64
    output.scores.sum().backward()
    assert model.weight.grad is not None and model.weight.grad.dtype == torch.bfloat16


class Tabled(nn.Module):
    """A table of positions that is a buffer, not a parameter: it stays in float32 and takes part in the arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(17, 8), nn.Linear(8, 17)
        self.register_buffer("positions", torch.linspace(-1, 1, 64).view(8, 8))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens) + self.positions)


@pytest.mark.parametrize("compute", HALVES)
def test_a_float32_buffer_in_the_arithmetic(compute: str) -> None:
    model, batch = Tabled(), token_batch(4)
    plain = float(make_trainer(copy.deepcopy(model), Plan()).step(*batch))
    trainer = make_trainer(model, one_rank(compute))
    assert float(trainer.step(*batch)) == pytest.approx(plain, rel=4 * UNIT[compute])
    assert model.positions.dtype == torch.float32, "a table is not rounded"


class Encoder(nn.Module):
    """torch's own layers behind such a table, with a mask of floats; attention's weights are not those of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.tabled = Tabled()
        self.layer = nn.TransformerEncoderLayer(17, 1, 16, dropout=0.0, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        logits = self.tabled(tokens) + self.tabled.positions[:, :1]
        return self.layer(logits, src_mask=mask)


@pytest.mark.parametrize("compute", HALVES)
def test_torchs_own_transformer_with_a_table(compute: str) -> None:
    model, batch = Encoder(), token_batch(4)
    plain = float(make_trainer(copy.deepcopy(model), Plan()).step(*batch))
    assert float(make_trainer(model, one_rank(compute)).step(*batch)) == pytest.approx(plain, rel=8 * UNIT[compute])


@pytest.mark.parametrize("compute", HALVES)
def test_parameters_are_16_bits_and_masters_are_not(compute: str) -> None:
    model = small_gpt()
    model.blocks[0].requires_grad_(False)
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    trainer = make_trainer(model, one_rank(compute))
    assert {parameter.dtype for parameter in model.parameters()} == {DTYPES[compute]}
    assert model.head.weight is model.embedding.weight, "still tied"
    assert model.rotary.table_2TE.dtype == torch.float32, "a table is not rounded"
    for name, master in masters(trainer).items():
        is_frozen = name.startswith("blocks.0.")
        assert master.dtype == (DTYPES[compute] if is_frozen else torch.float32)
        assert torch.equal(master, start[name].to(master.dtype))
        assert torch.equal(model.get_parameter(name), start[name].to(DTYPES[compute]))
    trainer.step(*token_batch(4))
    assert {piece.tensor.grad.dtype for piece in trainer.sync.pieces} == {torch.float32}


def test_a_float64_model_has_float64_masters() -> None:
    trainer = make_trainer(MLP(), one_rank("bf16"))
    trainer.step(*batch_of(4))
    assert {(p.tensor.dtype, p.tensor.grad.dtype) for p in trainer.sync.pieces} == {(torch.float64, torch.float64)}
    assert trainer.model.first.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("compute", HALVES)
def test_batch_norm_stays_as_it_is(compute: str) -> None:
    model = small_convnet()
    model.blocks[0].norm1 = nn.SyncBatchNorm(4)
    model.blocks[1].norm1.requires_grad_(False)
    trainer = make_trainer(model, one_rank(compute), optimizer=adamw)
    images, classes = image_batch(8)
    losses = [float(trainer.step(images, classes)) for _ in range(8)]
    for name, parameter in model.named_parameters():
        is_norm = "norm" in name
        assert parameter.dtype == (torch.float32 if is_norm else DTYPES[compute]), name
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32, torch.int64}
    assert int(model.stem_norm.num_batches_tracked) == 8 and float(model.stem_norm.running_mean.abs().sum()) > 0
    assert losses[-1] < 0.9 * losses[0]


# ---- beside training ----


@pytest.mark.parametrize("compute", HALVES)
def test_evaluation_and_text(compute: str) -> None:
    model, (tokens, targets) = small_gpt(), token_batch(6)
    alone = copy.deepcopy(model).to(DTYPES[compute]).eval()
    trainer = make_trainer(model, mixed(data_plan(1, microbatches=2), compute=compute))
    with torch.no_grad():
        total, count = cross_entropy(alone(tokens).float(), targets)
    assert trainer.evaluate([(tokens, targets)]) == pytest.approx(float(total / count), rel=1e-5)
    text = trainer.generate([1, 2], num_tokens=4, context=8, temperature=0)
    assert text[2] == int(alone(torch.tensor([[1, 2]]))[0, -1].argmax()) and len(text) == 6


@pytest.mark.parametrize("compute", HALVES)
def test_verify_leaves_the_precision_out(compute: str) -> None:
    plan = mixed(data_plan(1, microbatches=2), compute=compute, accumulate=compute)
    outcome = verify(small_gpt(), plan, loss="cross-entropy", optimizer=SGD, batches=[token_batch(4)], device="cpu")
    assert outcome.require().tolerance == 1e-10


# ---- what is refused ----


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"compute": "fp16", "loss_scale": 1}, "loss_scale = 1 lifts no gradient above that"),
        ({"compute": "fp16", "loss_scale": 0}, "loss_scale = 0 lifts no gradient above that"),
        ({"compute": "bf16", "loss_scale": 256}, r'loss_scale = 256 has no effect with \[precision\] compute = "bf16"'),
        ({"compute": "bf16", "accumulate": "fp16"}, "overflows at 65504"),
        ({"compute": "fp16", "accumulate": "bf16"}, "keeps 8 of the 11 significant bits"),
        ({"compute": "bf16", "reduce": "fp16"}, "only fp16 gradients are scaled to stay below"),
        ({"compute": "model", "accumulate": "bf16"}, "is for gradients of that very format"),
    ],
)
def test_what_would_lose_gradients_is_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(PlanError, match=told):
        make_trainer(MLP(), mixed(Plan(), **fields))
