"""Profiles of models against bytes counted by hand, and against what real steps on real tensors leave alive."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import MLP, batch_of, image_batch, small_convnet, small_gpt, token_batch
from torch import Tensor, nn

from weft.blueprint import Blueprint, find_blueprint
from weft.errors import ModelError
from weft.measure.liveness import LiveBytes
from weft.measure.model import profile_model
from weft.models.gpt import GPT, GPTConfig
from weft.parallel.recompute import recompute_blocks
from weft.plan.partition.flat_buffers import ParameterSpec
from weft.profiles.model import ModelProfile, Segment, Size
from weft.training.loss.loss import cross_entropy_sum

B, T, C, V, L = 3, 8, 16, 17, 2  # samples, and small_gpt's sizes
HEADS, MLP_WIDTH = 2, 24


def gpt_profile(samples: int = B, **changes: Any) -> ModelProfile:
    compute = changes.pop("compute", "model")
    return profile_model(small_gpt(**changes), *token_batch(samples), compute=compute)


def kept_bytes(profile: ModelProfile, policy: str) -> int:
    return sum(segment.kept(policy).at(profile.samples) for segment in profile.segments)


def live_after_forward(model: nn.Module, inputs: Tensor, targets: Tensor) -> int:
    """Bytes that a real forward pass and loss leave alive beside parameters, buffers and batch."""
    others = [*model.parameters(), *model.buffers(), inputs, targets]
    with LiveBytes(others=others, made=lambda operator, tensor: None) as live:
        loss = cross_entropy_sum(model(inputs), targets)
        found = live.live_bytes
        loss.backward()
    return found


def test_what_a_block_saves_by_hand() -> None:
    block = gpt_profile().segments[1]
    rows = B * T
    wide = [
        C,  # the block's input, for the norm
        C,  # normed, for the norm's weight
        C,  # weighted, for the qkv product
        3 * C,  # qkv, for its values
        2 * C,  # queries and keys, rotated
        C,  # attention's output
        C,  # the sum, for the norm
        C,
        C,
        MLP_WIDTH,  # for the activation function
        MLP_WIDTH,  # for the product after it
    ]
    narrow = [1, HEADS, 1]  # 1 / root mean square, log-sum-exp of each head, 1 / root mean square
    assert block.saved.at(B) == 4 * rows * sum(wide + narrow)
    assert block.selective.at(B) == 4 * rows * (C + 3 * C + C + MLP_WIDTH + C)
    assert block.inputs.at(B) == 4 * rows * C
    assert block.saved.fixed_bytes == 0


def test_the_loss_and_its_workspace_by_hand() -> None:
    profile = gpt_profile()
    postlude, logits = profile.segments[-1], 4 * B * T * V
    assert profile.output.at(B) == logits
    norm = 4 * B * T * (3 * C + 1)
    assert postlude.saved.at(B) == norm + logits + 4  # log-softmax; and the sum of the weights of targets
    # Gradients of log-softmax and of logits, while log-softmax is there.
    assert postlude.backward_peak.at(B) >= 2 * logits
    half = gpt_profile(compute="bf16")
    assert half.output.at(B) == logits // 2
    # bf16 logits, their float32 copy and log-softmax are there at once.
    assert half.segments[-1].forward_peak.at(B) >= logits // 2 + 2 * logits
    assert half.segments[1].saved.at(B) < 0.7 * profile.segments[1].saved.at(B)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "model",
    [
        pytest.param(small_gpt(), id="gpt"),
        pytest.param(small_gpt(positions="learned", norm="layer", bias=True, tied=False, dropout=0.1), id="gpt2"),
        pytest.param(small_convnet(), id="convnet"),
        pytest.param(small_convnet(batch_norm=False), id="groups"),
    ],
)
@pytest.mark.parametrize("policy", ["none", "selective", "full"])
def test_a_real_forward_leaves_alive_what_the_profile_says(model: nn.Module, policy: str) -> None:
    model = copy.deepcopy(model)
    inputs, targets = token_batch(B) if isinstance(model, GPT) else image_batch(B)
    inputs = inputs.float() if inputs.is_floating_point() else inputs
    profile = profile_model(model, inputs, targets)
    if policy != "none":
        recompute_blocks(model, find_blueprint(model), policy)
    found, expected = live_after_forward(model, inputs, targets), kept_bytes(profile, policy)
    assert abs(found - expected) <= 0.02 * expected + 64


def test_samples_scale_what_grows_with_them() -> None:
    one, three = gpt_profile(1), gpt_profile(3)
    for small, large in zip(one.segments, three.segments, strict=True):
        for name in ("saved", "selective", "inputs"):
            assert getattr(small, name).at(3) == getattr(large, name).at(3), (small.name, name)
    block = three.segments[1].backward_peak
    assert block.sample_bytes > 0
    assert block.fixed_bytes >= 4 * V * C  # the tied head's gradient waits for the embedding's
    assert three.batch.at(5) == 5 * 2 * T * 8


def test_a_model_without_memory_has_the_same_profile() -> None:
    with torch.device("meta"):
        model = small_gpt()
        batch = torch.empty(B, T, dtype=torch.long)
    assert profile_model(model, batch, batch) == gpt_profile()


def test_a_model_that_no_machine_holds() -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=100_000, context=64, num_layers=2, hidden=65536, heads=64))
        batch = torch.empty(2, 64, dtype=torch.long)
    profile = profile_model(model, batch, batch, compute="bf16")
    assert profile.numel > 1e11
    assert profile.segments[1].inputs.at(2) == 2 * 64 * 65536 * 2


def test_nothing_is_changed() -> None:
    model, before = small_convnet(), torch.random.get_rng_state()
    values = copy.deepcopy(model.state_dict())
    inputs, targets = image_batch(B)
    profile_model(model, inputs.float(), targets)
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(tensor, values[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_parameters_and_their_units() -> None:
    model = small_gpt()
    model.blocks[1].mlp.up.weight.requires_grad_(False)
    profile = profile_model(model, *token_batch(B))
    found = {parameter.name: parameter for parameter in profile.parameters}
    assert list(found) == [name for name, _ in model.named_parameters()]
    assert "head.weight" not in found  # tied
    assert found["embedding.weight"] == ParameterSpec(name="embedding.weight", shape=(V, C))
    assert found["blocks.0.mlp.up.weight"].block == 0
    assert not found["blocks.1.mlp.up.weight"].trainable
    assert profile.blocks == ("blocks.0", "blocks.1")
    assert [segment.name for segment in profile.segments] == ["prelude", "blocks.0", "blocks.1", "postlude"]
    assert profile.numel == sum(parameter.numel() for parameter in model.parameters())
    assert profile.buffer_bytes == sum(buffer.nbytes for buffer in model.buffers())


def test_a_parameter_of_two_blocks_belongs_to_the_root() -> None:
    model = small_gpt()
    model.blocks[1].mlp.up.weight = model.blocks[0].mlp.up.weight
    found = {parameter.name: parameter.block for parameter in profile_model(model, *token_batch(B)).parameters}
    assert found["blocks.0.mlp.up.weight"] is None
    assert found["blocks.0.mlp.down.weight"] == 0


def test_batch_norm_keeps_its_dtype() -> None:
    inputs, targets = image_batch(B)
    profile = profile_model(small_convnet(), inputs, targets, compute="bf16")
    keeps = {parameter.name for parameter in profile.parameters if parameter.keeps_dtype}
    assert keeps == {p.name for p in profile.parameters if "norm" in p.name}
    assert all(parameter.dtype == "float32" for parameter in profile.parameters)


def test_a_table_that_widens_is_cast_again_between_layers() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)
            self.register_buffer("scale", torch.ones(6))

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x) * self.scale)

    inputs, targets = batch_of(B)
    profile = profile_model(Scaled(), inputs, targets, compute="bf16")
    assert profile.output.at(B) == 2 * B * 3


def test_a_model_without_blocks_and_a_loss_of_the_users_own() -> None:
    def loss(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return F.cross_entropy(output, targets, reduction="sum"), (targets >= 0).sum()

    class Keyword(MLP):
        def forward(self, *, x: Tensor, scale: float) -> Tensor:
            return super().forward(x * scale)

    inputs, targets = batch_of(B)
    profile = profile_model(Keyword(), {"x": inputs, "scale": 2.0}, targets, loss=loss)
    assert [segment.name for segment in profile.segments] == ["prelude", "postlude"]
    assert profile.segments[0].saved.at(B) == 8 * B * (4 + 6 + 5)  # x · scale and both tanh
    assert profile.segments[1].saved.at(B) == 8 * B * 3 + 8
    assert profile.output.at(B) == 8 * B * 3


@pytest.mark.parametrize("where", ["model", "loss"])
def test_reading_values_is_refused(where: str) -> None:
    class Reader(MLP):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (x.max().item() if where == "model" else 1.0)

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(output, targets) * (float(targets.max()) if where == "loss" else 1.0)

    with pytest.raises(ModelError, match="reads values of tensors"):
        profile_model(Reader(), *batch_of(B), loss=loss)


def test_a_frozen_model_is_refused() -> None:
    with pytest.raises(ModelError, match="no parameter to train"):
        profile_model(MLP().requires_grad_(False), *batch_of(B))


def test_a_device_that_is_not_here_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("it is here")
    with pytest.raises(ModelError, match='no "cuda" device'):
        profile_model(MLP(), *batch_of(B), device="cuda")


def test_a_declared_blueprint_is_used() -> None:
    class Declared(MLP):
        def weft_blueprint(self) -> Blueprint:
            return Blueprint(prelude=("first",), blocks=("second",), postlude=("last",))

    profile = profile_model(Declared(), *batch_of(B))
    assert profile.blocks == ("second",)
    prelude, block, _ = profile.segments
    # The block's input is what tanh saved before it, and counts once.
    assert (prelude.inputs.at(B), block.inputs.at(B)) == (8 * B * 6, 0)


def test_profiles_are_checked_on_birth() -> None:
    with pytest.raises(ModelError) as caught:
        ModelProfile(
            parameters=(ParameterSpec(name="w", shape=(2,), block=3),),
            blocks=("a",),
            segments=(Segment(name="prelude"),),
        )
    assert len(caught.value.problems) == 2
    assert Size(fixed_bytes=-5, sample_bytes=2).at(1) == 0
