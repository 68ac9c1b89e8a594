"""The built-in models against plain oracles: attention written out, rotation by complex numbers, counts by formula."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from weft.errors import ModelError
from weft.models.convnet import ConvNet, ConvNetConfig
from weft.models.gpt import GPT, Attention, Block, GPTConfig, RotaryTable, gpt2_124m, rotate

TINY = {"vocab_size": 17, "context": 12, "num_layers": 2, "hidden": 16, "heads": 4}


def tiny(**changes) -> GPTConfig:
    return GPTConfig(**(TINY | changes))


def tokens_of(config: GPTConfig, num_samples: int = 2, num_tokens: int = 9) -> Tensor:
    return torch.randint(config.vocab_size, (num_samples, num_tokens))


VARIANTS = [
    pytest.param({}, id="default"),
    pytest.param({"positions": "learned", "norm": "layer", "bias": True}, id="gpt2"),
    pytest.param({"kv_heads": 2, "tied": False, "mlp_hidden": 20}, id="grouped"),
    pytest.param({"kv_heads": 1, "positions": "learned", "norm": "layer"}, id="one-key-head"),
]


@pytest.mark.parametrize("changes", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_samples", [0, 1, 3])
def test_logits_and_gradients_have_the_right_shape_and_dtype(changes, dtype: torch.dtype, num_samples: int) -> None:
    config = tiny(**changes)
    model = GPT(config).to(dtype)
    logits_BTV = model(tokens_of(config, num_samples))
    assert logits_BTV.shape == (num_samples, 9, 17)
    assert logits_BTV.dtype == dtype
    logits_BTV.float().square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


@pytest.mark.parametrize("changes", VARIANTS)
def test_a_token_does_not_change_the_logits_before_it(changes) -> None:
    config = tiny(**changes)
    model = GPT(config).double().eval()
    tokens_BT = tokens_of(config)
    changed_BT = tokens_BT.clone()
    changed_BT[:, 5] = (changed_BT[:, 5] + 1) % config.vocab_size
    difference = (model(tokens_BT) - model(changed_BT)).abs().amax(dim=(0, 2))
    assert difference[:5].max() == 0
    assert difference[5:].min() > 1e-6


@pytest.mark.parametrize("changes", VARIANTS)
def test_the_order_of_tokens_matters(changes) -> None:
    config = tiny(num_layers=1, **changes)
    model = GPT(config).double()
    tokens_BT = tokens_of(config)
    swapped_BT = tokens_BT[:, [1, 0, *range(2, 9)]]
    assert (model(tokens_BT)[:, -1] - model(swapped_BT)[:, -1]).abs().max() > 1e-9


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_positions_may_be_given(positions: str) -> None:
    config = tiny(positions=positions)
    model = GPT(config).double()
    tokens_BT = tokens_of(config)
    expected = model(tokens_BT)
    assert torch.equal(model(tokens_BT, torch.arange(9)), expected)
    shifted = model(tokens_BT, torch.arange(3, 12))
    if positions == "rotary":
        torch.testing.assert_close(shifted, expected)
    else:
        assert (shifted - expected).abs().max() > 1e-6


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_equals_one_written_out(kv_heads: int) -> None:
    config = tiny(kv_heads=kv_heads, bias=True)
    attention = Attention(config).double()
    nn.init.normal_(attention.qkv.bias)
    x_BTC = torch.randn(2, 9, 16, dtype=torch.float64)

    q, k, v = attention.qkv(x_BTC).split((16, 4 * kv_heads, 4 * kv_heads), dim=-1)
    q_BHTD, k_BGTD, v_BGTD = (part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in (q, k, v))
    k_BHTD, v_BHTD = (part.repeat_interleave(4 // kv_heads, dim=1) for part in (k_BGTD, v_BGTD))
    scores_BHTT = q_BHTD @ k_BHTD.transpose(2, 3) / math.sqrt(4)
    scores_BHTT = scores_BHTT.masked_fill(torch.ones(9, 9, dtype=torch.bool).triu(1), -math.inf)
    expected = attention.out((scores_BHTT.softmax(-1) @ v_BHTD).transpose(1, 2).flatten(2))

    torch.testing.assert_close(attention(x_BTC), expected)


def test_rotation_equals_a_product_of_complex_numbers() -> None:
    table_2TE = RotaryTable(tiny(hidden=32)).double()(None, 9)
    x_BTHD = torch.randn(2, 9, 4, 8, dtype=torch.float64)
    pairs = torch.complex(x_BTHD[..., :4], x_BTHD[..., 4:])
    angles = torch.tensor([[position * 10_000.0 ** (-2 * i / 8) for i in range(4)] for position in range(9)])
    turned = pairs * torch.polar(torch.ones(9, 4, dtype=torch.float64), angles.double())[:, None]
    torch.testing.assert_close(rotate(x_BTHD, table_2TE), torch.cat((turned.real, turned.imag), -1), rtol=0, atol=1e-6)


def test_the_rotary_table_is_never_rounded_nor_saved() -> None:
    model = GPT(tiny())
    expected = model.rotary.table_2TE.clone()
    assert not any("rotary" in name for name in model.state_dict())
    assert torch.equal(model.bfloat16().rotary.table_2TE, expected)
    assert model.double().rotary.table_2TE.dtype == torch.float64
    assert torch.equal(model.float().rotary.table_2TE, expected)


@pytest.mark.parametrize("changes", VARIANTS)
def test_a_model_built_on_meta_is_whole_once_it_has_memory(changes) -> None:
    config = tiny(**changes)
    with torch.device("meta"):
        model = GPT(config)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    model.to_empty(device="cpu")
    torch.manual_seed(1)
    model.reset_parameters()
    torch.manual_seed(2)
    expected = GPT(config)
    torch.manual_seed(1)
    expected.reset_parameters()
    assert len(list(model.parameters())) == len(list(expected.parameters()))
    tokens_BT = tokens_of(config)
    assert torch.equal(model(tokens_BT), expected(tokens_BT))


def test_a_tied_head_is_one_parameter() -> None:
    tied, free = GPT(tiny()), GPT(tiny(tied=False))
    assert tied.head.weight is tied.embedding.weight
    assert copy.deepcopy(tied).double().head.weight.shape == (17, 16)
    assert sum(p.numel() for p in free.parameters()) - sum(p.numel() for p in tied.parameters()) == 17 * 16
    assert free.head.weight is not free.embedding.weight


def test_residual_projections_start_smaller() -> None:
    model = GPT(GPTConfig(num_layers=8))
    block = model.blocks[3]
    assert block.attention.qkv.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.embedding.weight.std().item() == pytest.approx(0.02, rel=0.05)
    for weight in (block.attention.out.weight, block.mlp.down.weight):
        assert weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)


def test_gpt2_has_its_124_million_parameters() -> None:
    config = gpt2_124m()
    with torch.device("meta"):
        model = GPT(config)
    hidden = config.hidden
    block = (3 + 1 + 4 + 4) * hidden**2 + (3 + 1 + 4 + 1) * hidden + 2 * 2 * hidden
    expected = (config.vocab_size + config.context) * hidden + config.num_layers * block + 2 * hidden
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == expected == 124_475_904


def test_gradients_of_a_block_are_right() -> None:
    config = tiny(hidden=4, heads=2, kv_heads=1, mlp_hidden=6)
    block, table_2TE = Block(config).double(), RotaryTable(config).double()(None, 3)
    x_BTC = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    parameters = {name: parameter.detach().requires_grad_() for name, parameter in block.named_parameters()}

    def run(x_BTC: Tensor, *values: Tensor) -> Tensor:
        state = dict(zip(parameters, values, strict=True))
        return torch.func.functional_call(block, state, (x_BTC, table_2TE))

    assert torch.autograd.gradcheck(run, (x_BTC, *parameters.values()))


# torch.compile looks at .grad of its inputs and hides the warning in a way that does not hide it from an error filter.
@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_block_is_one_graph() -> None:
    config = tiny(kv_heads=2)
    model = GPT(config)
    x_BTC, rotary_2TE = model.embed(tokens_of(config))
    compiled = torch.compile(model.blocks[0], fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x_BTC, rotary_2TE), model.blocks[0](x_BTC, rotary_2TE))


def test_dropout_acts_in_training_only() -> None:
    config = tiny(dropout=0.5)
    model, tokens_BT = GPT(config), tokens_of(config)
    assert not torch.equal(model(tokens_BT), model(tokens_BT))
    model.eval()
    assert torch.equal(model(tokens_BT), model(tokens_BT))


def test_a_sequence_longer_than_the_context_is_refused() -> None:
    with pytest.raises(ModelError, match=r"13 tokens .* context of 12"):
        GPT(tiny())(torch.zeros(1, 13, dtype=torch.int64))
    assert GPT(tiny())(torch.zeros(1, 12, dtype=torch.int64)).shape == (1, 12, 17)


def test_a_bad_gpt_is_refused_with_every_reason() -> None:
    with pytest.raises(ModelError) as caught:
        GPTConfig(hidden=12, heads=5, kv_heads=3, positions="rotery", norm="batch", dropout=1.0)
    assert caught.value.problems == (
        "heads 5 do not divide hidden 12; these do: 1, 2, 3, 4, 6, 12",
        "kv_heads 3 do not divide heads 5; these do: 1, 5",
        "positions is 'rotery'; did you mean \"rotary\"?",
        "norm is 'batch'; known: rms, layer",
        "dropout is 1.0; it must be at least 0 and less than 1",
    )


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"heads": 0}, "heads is 0; it must be a whole number, 1 or more"),
        ({"context": 2.5}, "context is 2.5"),
        ({"num_layers": True}, "num_layers is True"),
        ({"kv_heads": -1}, "kv_heads is -1; it must be a whole number, 0 or more"),
        ({"hidden": 12, "heads": 4}, r"12 / 4 = 3 is odd and cannot be rotated"),
        ({"dropout": "much"}, "dropout is 'much'"),
    ],
)
def test_a_bad_size_is_named(changes, match: str) -> None:
    with pytest.raises(ModelError, match=match):
        GPTConfig(**changes)


@pytest.mark.parametrize("batch_norm", [True, False])
@pytest.mark.parametrize("pixels", [8, 28, 32])
@pytest.mark.parametrize("num_blocks", [1, 3, 4])
def test_a_convnet_takes_small_images(batch_norm: bool, pixels: int, num_blocks: int) -> None:
    model = ConvNet(ConvNetConfig(channels_in=3, classes=7, width=6, num_blocks=num_blocks, batch_norm=batch_norm))
    logits_NK = model(torch.randn(2, 3, pixels, pixels))
    assert logits_NK.shape == (2, 7)
    logits_NK.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert any(isinstance(module, nn.BatchNorm2d) for module in model.modules()) is batch_norm


def test_a_convnet_takes_no_images() -> None:
    images_NCHW = torch.zeros(0, 1, 8, 8)
    assert ConvNet(ConvNetConfig()).eval()(images_NCHW).shape == (0, 10)
    assert ConvNet(ConvNetConfig(batch_norm=False))(images_NCHW).shape == (0, 10)


def test_without_batch_norm_an_image_has_its_own_answer() -> None:
    model = ConvNet(ConvNetConfig(batch_norm=False)).double()
    images_NCHW = torch.randn(4, 1, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(model(images_NCHW)[:1], model(images_NCHW[:1]))


def test_a_bad_convnet_is_refused_with_every_reason() -> None:
    with pytest.raises(ModelError) as caught:
        ConvNetConfig(classes=0, width=-1)
    assert [problem.split(";")[0] for problem in caught.value.problems] == ["classes is 0", "width is -1"]
