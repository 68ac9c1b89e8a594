"""Two halves make a whole: gradients to the bit, hooks once, products once, nothing left over."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import small_convnet, small_gpt
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from weft.blueprint import find_blueprint
from weft.parallel.pipeline import split_backward
from weft.parallel.pipeline.split_backward import SplitBackward
from weft.parallel.recompute import recompute_blocks

DOUBLE = torch.float64


@dataclass
class Pass:
    """One microbatch's forward pass through one stage."""

    roots: list[Tensor | GradientEdge]
    gradients: list[Tensor | None]
    inputs: list[Tensor]
    parameters: list[Tensor]

    def first_half(self) -> SplitBackward:
        edges = [root if isinstance(root, GradientEdge) else get_gradient_edge(root) for root in self.roots]
        given = [torch.ones((), dtype=DOUBLE) if gradient is None else gradient for gradient in self.gradients]
        return SplitBackward.input_grads(edges, given, self.inputs, self.parameters)


def value(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


def leaf(*shape: int, seed: int = 0) -> Tensor:
    return value(*shape, seed=seed).requires_grad_()


def through(stage: nn.Module, x: Tensor) -> Pass:
    output = stage.to(DOUBLE)(x)
    y = output[0] if isinstance(output, tuple) else output
    return Pass([y], [value(*y.shape, seed=9)], [x], list(stage.parameters()))


class TwoOutputs(torch.autograd.Function):
    """A Python function with a weight, two outputs, and a scale, which is no tensor; at 0 no gradient flows."""

    @staticmethod
    def forward(ctx: Any, scale: float, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        ctx.scale = scale
        return scale * x * weight, x + weight

    @staticmethod
    def backward(ctx: Any, product: Tensor, total: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        if not ctx.scale:
            return None, None, None
        return None, ctx.scale * product * weight + total, (ctx.scale * product * x + total).sum(0)


def blocks_of_gpt(**changes: Any) -> Pass:
    gpt = small_gpt(**changes).to(DOUBLE)
    rotary = None if gpt.rotary is None else gpt.rotary(None, 8)
    x = leaf(2, 8, 16)
    y = gpt.blocks[1](gpt.blocks[0](x, rotary), rotary)
    return Pass([y], [value(2, 8, 16)], [x], list(gpt.blocks.parameters()))


def last_stage_of_gpt() -> Pass:
    gpt = small_gpt(positions="learned", norm="layer", bias=True, tied=False).to(DOUBLE)
    x = leaf(2, 8, 16)
    loss = F.cross_entropy(gpt.head(gpt.norm(gpt.blocks[1](x))).flatten(0, 1), torch.arange(16))
    return Pass([loss], [None], [x], list(gpt.parameters()))


def first_stage_of_gpt() -> Pass:
    gpt = small_gpt().to(DOUBLE)
    y = gpt(torch.arange(16).view(2, 8))
    return Pass([y], [value(*y.shape)], [], list(gpt.parameters()))


def several_outputs(*used: int) -> Pass:
    x, weight = leaf(5, 3), leaf(3, seed=1)
    outputs = TwoOutputs.apply(2.0, x * 3, weight)
    return Pass([outputs[k] for k in used], [value(5, 3) for _ in used], [x], [weight])


def split_and_joined() -> Pass:
    x, both, bias = leaf(4, 6), leaf(6, 4, seed=1), leaf(2, 4, seed=2)
    left, right = x.split(3, dim=1)
    upper, lower = both.split(3)
    one, other = bias.unbind()
    y = torch.cat((left @ upper + one, right.tanh() @ lower + other), dim=1)
    return Pass([torch.stack(y.unbind(1)[:2]), y], [value(2, 4), value(4, 8)], [x], [both, bias])


def roots_beside_the_path() -> Pass:
    x, p, q = leaf(3), leaf(3, seed=1), leaf(3, seed=2)
    roots: list[Tensor | GradientEdge] = [x * p, (p * q).exp(), q, x.detach().requires_grad_() * 2]
    return Pass(roots, [value(3)] * 4, [x], [p, q])


def relayed_input() -> Pass:
    x, far, p = leaf(3), leaf(3, seed=1), leaf(3, seed=2)
    roots: list[Tensor | GradientEdge] = [far, x * x + far * p, get_gradient_edge(x), get_gradient_edge((x * p).sum())]
    gradients = [value(3), value(3, seed=1), value(3, seed=2), None]
    return Pass(roots, gradients, [x, far], [p])


def operands_of_all_kinds() -> Pass:
    x, p, wide, frozen = leaf(4, 3), leaf(3, seed=1), leaf(4, 3, seed=2), value(3, seed=3)
    y = (x + p) * p * frozen + wide + torch.addcmul(p, x, wide)
    return Pass([y], [value(4, 3)], [x, leaf(2)], [p, wide, leaf(2), frozen])


def tied_layers() -> Pass:
    layer, other = nn.Linear(4, 4), nn.Linear(4, 4)
    return through(nn.Sequential(layer, nn.Tanh(), layer, nn.GELU(), other, layer), leaf(5, 4))


def derived_weights() -> Pass:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    return through(nn.Sequential(layer, nn.Tanh(), layer, nn.PReLU()), leaf(5, 4))


def written_in_place() -> Pass:
    x, p, q = leaf(4, 3), leaf(4, seed=1), leaf(3, seed=2)
    y = x * 2
    y[:, 0] += p
    y[1:].mul_(q)
    return Pass([y], [value(4, 3)], [x], [p, q])


def no_gradient_comes() -> Pass:
    x, p, q = leaf(4), leaf(4, seed=1), leaf(4, seed=2)
    roots = [TwoOutputs.apply(0.0, x * p, q)[0], TwoOutputs.apply(1.0, x.expand(2, 4) * q, q)[1]]
    return Pass(roots, [value(4), value(2, 4)], [x], [p, q])


STAGES: dict[str, Callable[[], Pass]] = {
    "gpt": blocks_of_gpt,
    "gpt, biased": lambda: blocks_of_gpt(norm="layer", bias=True, positions="learned"),
    "gpt, grouped heads": lambda: blocks_of_gpt(heads=4, kv_heads=2),
    "last stage": last_stage_of_gpt,
    "first stage": first_stage_of_gpt,
    "convnet": lambda: through(nn.Sequential(*small_convnet().blocks), leaf(3, 4, 6, 6)),
    "both outputs": lambda: several_outputs(0, 1),
    "first output": lambda: several_outputs(0),
    "second output, twice": lambda: several_outputs(1, 1),
    "norm": lambda: through(nn.LayerNorm(3), leaf(5, 3)),
    "lstm": lambda: through(nn.LSTM(3, 4, 2, bidirectional=True), leaf(2, 5, 3)),
    "gru": lambda: through(nn.GRU(3, 4, 2, bidirectional=True), leaf(2, 5, 3)),
    "split": split_and_joined,
    "beside": roots_beside_the_path,
    "relayed": relayed_input,
    "operands": operands_of_all_kinds,
    "tied": tied_layers,
    "derived": derived_weights,
    "in place": written_in_place,
    "undefined": no_gradient_comes,
}


def gradients_of(tensors: list[Tensor]) -> dict[int, list[float]]:
    return {k: tensor.grad.flatten().tolist() for k, tensor in enumerate(tensors) if tensor.grad is not None}


def assert_same_as_whole(make: Callable[[], Pass]) -> None:
    whole, split = make(), make()
    runs: Counter[int] = Counter()
    for k, parameter in enumerate(split.parameters):
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _, k=k: runs.update([k]))
    torch.autograd.backward(whole.roots, whole.gradients)
    second_half = split.first_half()
    assert gradients_of(split.inputs) == gradients_of(whole.inputs)
    assert not runs and not gradients_of(split.parameters)
    second_half.weight_grads()
    assert gradients_of(split.inputs) == gradients_of(whole.inputs)
    assert gradients_of(split.parameters) == gradients_of(whole.parameters)
    # Where an undefined gradient comes to a parameter, torch runs the hook all the same; this does not.
    assert runs == dict.fromkeys(gradients_of(whole.parameters), 1)


@pytest.mark.parametrize("at_bytes", [0, 2**20], ids=["each group", "merged"])
@pytest.mark.parametrize("name", STAGES)
def test_two_halves_are_the_whole(name: str, at_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> Pass:
        torch.manual_seed(0)
        return STAGES[name]()

    monkeypatch.setattr(split_backward, "ACCUMULATE_AT_BYTES", at_bytes)
    assert_same_as_whole(make)


@pytest.mark.parametrize("policy", ["full", "selective"])
@pytest.mark.parametrize("kind", ["gpt", "convnet"])
def test_recomputed_blocks(kind: str, policy: str) -> None:
    runs: Counter[str] = Counter()

    def make() -> Pass:
        torch.manual_seed(0)
        model = small_gpt(dropout=0.3) if kind == "gpt" else small_convnet()
        recompute_blocks(model, find_blueprint(model), policy)
        first = model.blocks[1].attention_norm if kind == "gpt" else model.blocks[1].conv1
        first.register_forward_pre_hook(lambda *_: runs.update(["block"]))
        return through(nn.Sequential(*model.blocks), leaf(2, 8, 16) if kind == "gpt" else leaf(3, 4, 6, 6))

    assert_same_as_whole(make)
    assert runs["block"] == 2 + 3, "the whole pass recomputes a block once, two halves twice"


def test_microbatches_add_up_in_any_order() -> None:
    stage = nn.Sequential(*small_convnet(batch_norm=False).blocks)
    sums = []
    for order in ([0, 1, 2], [2, 0, 1]):
        stage.zero_grad()
        second_halves = [through(stage, leaf(3, 4, 6, 6, seed=seed)).first_half() for seed in range(3)]
        for k in order:
            second_halves[k].weight_grads()
        sums.append(torch.cat([parameter.grad.flatten() for parameter in stage.parameters()]))
    torch.testing.assert_close(sums[0], sums[1], rtol=1e-12, atol=1e-12)


def test_tensor_hooks_and_leaves_of_others() -> None:
    x, p, others = leaf(4, 3), leaf(3, seed=1), leaf(3, seed=2)
    seen: list[Tensor] = []
    p.register_hook(lambda gradient: seen.append(gradient.clone()) or 2 * gradient)
    y = (x * (p + others)).exp() * p
    split = SplitBackward.input_grads([get_gradient_edge(y)], [torch.ones_like(y)], [x], [p])
    assert not seen
    split.weight_grads()
    assert len(seen) == 1 and torch.equal(p.grad, 2 * seen[0]) and others.grad is None
    with pytest.raises(AssertionError, match="once"):
        split.weight_grads()


class Products(TorchDispatchMode):
    """Counts matrix products, of convolutions' gradients those asked for, and other operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.runs["product" if name in ("mm", "bmm", "convolution_backward") else name] += (
            sum(args[-1]) if name == "convolution_backward" else 1
        )
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["gpt, biased", "last stage", "convnet", "tied"])
def test_nothing_is_computed_twice(name: str) -> None:
    whole, split = STAGES[name](), STAGES[name]()
    with Products() as once:
        torch.autograd.backward(whole.roots, whole.gradients)
    with Products() as first:
        second_half = split.first_half()
    with Products() as second:
        second_half.weight_grads()
    assert first.runs["product"] + second.runs["product"] == once.runs["product"]
    assert 0 < second.runs["product"] < once.runs["product"]
    assert not second.runs.keys() & {"gelu_backward", "tanh_backward", "threshold_backward"}


class Held(list[Tensor]):
    """A tensor saved by a graph."""


@pytest.mark.parametrize("name", ["gpt", "first stage", "convnet", "tied", "both outputs", "beside"])
def test_nothing_of_the_graph_is_left(name: str) -> None:
    held: list[weakref.ref[Held]] = []

    def pack(tensor: Tensor) -> Held:
        holder = Held([tensor.detach()])
        held.append(weakref.ref(holder))
        return holder

    with saved_tensors_hooks(pack, lambda holder: holder[0]):
        made = STAGES[name]()
    gc.disable()
    second_half = made.first_half()
    made.roots.clear()
    second_half.weight_grads()
    left = [holder for holder in held if holder() is not None]
    gc.enable()
    assert held and not left
