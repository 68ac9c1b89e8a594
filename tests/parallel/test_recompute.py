"""Recomputation changes what is kept and nothing else: gradients to the bit, random state, statistics, bytes."""

from __future__ import annotations

import copy
import dataclasses
import functools
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import MLP, Batch, image_batch, small_convnet, small_gpt, token_batch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weft.blueprint import Blueprint, find_blueprint
from weft.comm.group import Group
from weft.errors import ModelError
from weft.models.gpt import GPT, gpt2_124m
from weft.parallel import recompute
from weft.parallel.compile import compile_blocks
from weft.parallel.recompute import recompute_blocks
from weft.parallel.state.batchnorm import synchronise_batch_norms

POLICIES = ["none", "selective", "full"]

# torch.compile looks at .grad of its inputs and hides the warning in a way that does not hide it from an error filter.
GRAD_WARNING = "ignore:The .grad attribute of a Tensor that is not a leaf"


def recomputed(model: nn.Module, policy: str) -> nn.Module:
    """A copy of the model under a policy."""
    model = copy.deepcopy(model)
    if policy != "none":
        recompute_blocks(model, find_blueprint(model), policy)
    return model


def train(model: nn.Module, batches: list[Batch]) -> list[Tensor]:
    """Losses, gradients, weights, buffers and random states of a few steps from seed 1."""
    torch.manual_seed(1)
    dtype = next(model.parameters()).dtype
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    seen = []
    for inputs, targets in batches:
        optimizer.zero_grad(set_to_none=True)
        logits = model(inputs.to(dtype) if inputs.is_floating_point() else inputs)
        loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))
        loss.backward()
        seen += [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None), torch.get_rng_state()]
        optimizer.step()
    return [*seen, *(tensor.detach() for tensor in [*model.parameters(), *model.buffers()])]


def assert_bitwise(mine: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(mine) == len(theirs)
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


class Alive(TorchDispatchMode):
    """What operators made and something still holds, whoever that is: autograd, a checkpoint or its cache."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[StorageWeakRef, tuple[int, tuple[int, ...]]] = {}

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.made[StorageWeakRef(storage)] = storage.nbytes(), tuple(tensor.shape)
        return result

    def kept(self, *, besides: list[Tensor]) -> list[tuple[int, tuple[int, ...]]]:
        """(bytes, last shape) of every storage but those of some tensors."""
        known = {StorageWeakRef(tensor.untyped_storage()) for tensor in besides}
        return [made for ref, made in self.made.items() if not ref.expired() and ref not in known]


def kept_by_blocks(model: nn.Module, x: Tensor) -> list[tuple[int, tuple[int, ...]]]:
    """What lives between the forward and the backward pass of a model's blocks, the input left out."""
    hidden = x
    with Alive() as alive:
        for block in model.blocks:
            hidden = block(hidden)
    kept = alive.kept(besides=[x, *model.parameters()])
    hidden.sum().backward()
    return kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("policy", ["selective", "full"])
def test_steps_with_dropout_are_the_same_to_the_bit(policy: str, dtype: torch.dtype) -> None:
    model = small_gpt(hidden=16, heads=4, kv_heads=2, dropout=0.2, num_layers=3).to(dtype)
    batches = [token_batch(4, seed=seed) for seed in range(3)]
    assert_bitwise(train(recomputed(model, policy), batches), train(recomputed(model, "none"), batches))


@pytest.mark.parametrize("policy", ["selective", "full"])
def test_running_statistics_move_once(policy: str) -> None:
    model = small_convnet()
    model.blocks[0].norm1 = nn.BatchNorm2d(4, momentum=None)
    model.blocks[0].norm2 = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
    batches = [image_batch(4, seed=seed) for seed in range(3)]
    mine, plain = recomputed(model, policy), recomputed(model, "none")
    assert_bitwise(train(mine, batches), train(plain, batches))
    assert int(mine.blocks[0].norm1.num_batches_tracked) == 3
    assert float(mine.blocks[0].norm2.running_mean.abs().sum()) > 0


def test_full_keeps_the_inputs_of_blocks_and_nothing_else() -> None:
    model = recomputed(small_gpt(dropout=0.2, num_layers=3), "full")
    hidden, rotary = model.embed(token_batch(4)[0])
    inputs, packed = [rotary], []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        for block in model.blocks:
            inputs.append(hidden)
            hidden = block(hidden, rotary)
    addresses = {tensor.data_ptr() for tensor in packed if tensor.numel()}
    assert addresses == {tensor.data_ptr() for tensor in inputs} and len(addresses) == 4


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("dropout", "mebibytes"), [(0.0, [576.75, 360.0, 36.0]), (0.1, [648.75, 360.0, 36.0])])
def test_kept_bytes_of_gpt2_124m(dropout: float, mebibytes: list[float]) -> None:
    """The table of docs/methods/recompute.md: 1,024 tokens, float32."""
    config, tokens, layers, item_bytes = dataclasses.replace(gpt2_124m(), dropout=dropout), 1024, 12, 4
    found = {}
    for policy in POLICIES:
        with FakeTensorMode():
            model = GPT(config)
            if policy != "none":
                recompute_blocks(model, find_blueprint(model), policy)
            x = torch.zeros(1, tokens, config.hidden, requires_grad=True)
            found[policy] = sum(num_bytes for num_bytes, _ in kept_by_blocks(model, x))
    wide = tokens * config.hidden * item_bytes
    small = tokens * (4 + config.heads) * item_bytes  # means and deviations of two norms, log-sum-exp of each head
    num_wide = 18 if dropout else 16
    assert found == {"none": layers * (num_wide * wide + small), "selective": layers * 10 * wide, "full": layers * wide}
    assert [num_bytes / 2**20 for num_bytes in found.values()] == mebibytes


class WrittenOut(nn.Module):
    """A block that writes attention out, takes its mask by keyword and returns two things."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.qkv, self.out, self.dropout = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Dropout(0.3)

    def forward(self, x: Tensor, *, scale: Tensor | None = None, causal: bool = True) -> tuple[Tensor, dict[str, Any]]:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = q @ k.transpose(1, 2)
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), float("-inf"))
        mixed = self.dropout(scores.softmax(-1)) @ v
        output = x + self.out(mixed)
        return (output if scale is None else output * scale), {"mixed": mixed, "name": "written out"}


class Wired(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(WrittenOut() for _ in range(2))
        self.blocks[0].requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor([1.0, 2.0, 3.0, 4.0]))

    def forward(self, x: Tensor) -> Tensor:
        mixed = []
        for block in self.blocks:
            x, extra = block(x=x, scale=self.scale, causal=True)
            assert extra["name"] == "written out"
            mixed.append(extra["mixed"])
        return x + sum(mixed)


@pytest.mark.parametrize("policy", ["selective", "full"])
def test_keywords_tuples_and_frozen_blocks(policy: str) -> None:
    batches = [(torch.randn(2, 5, 4), torch.randint(4, (2, 5))) for _ in range(2)]
    model = Wired()
    mine = train(recomputed(model, policy), batches)
    assert len(mine) == 2 * (1 + 5 + 1) + 9, "the frozen block has no gradients"
    assert_bitwise(mine, train(recomputed(model, "none"), batches))


@pytest.mark.parametrize("policy", POLICIES)
def test_attention_scores_are_kept_by_no_policy(policy: str) -> None:
    model = recomputed(Wired(), policy)
    for block in model.blocks:
        block.forward = functools.partial(lambda run, x: run(x)[0], block.forward)
    shapes = [shape for _, shape in kept_by_blocks(model, torch.randn(2, 50, 4, requires_grad=True))]
    assert ((2, 50, 50) in shapes) == (policy == "none")


@pytest.mark.parametrize("policy", ["selective", "full"])
def test_nothing_is_added_without_training_or_gradients(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = recomputed(small_gpt(), policy), token_batch(2)[0]
    monkeypatch.setattr(recompute, "checkpoint", lambda *args, **kwargs: pytest.fail("recomputes"))
    with torch.no_grad():
        model(tokens)
    model.eval()
    model(tokens).sum().backward()
    model.train()
    with pytest.raises(pytest.fail.Exception):
        model(tokens)


@pytest.mark.parametrize("policy", ["selective", "full"])
def test_hooks_on_a_block_stay_outside(policy: str) -> None:
    """ZeRO-3 gathers and frees in them: in the recomputation they would do so at the wrong time."""
    model, calls = recomputed(small_gpt(), policy), []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda *args: calls.append("before"))
        block.register_forward_hook(lambda *args: calls.append("after"))
    model(token_batch(2)[0]).sum().backward()
    assert calls == ["before", "after"] * 2


def copy_of(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def pickled(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.filterwarnings(GRAD_WARNING)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("make", [copy_of, pickled])
def test_a_copy_runs_its_own_blocks(
    make: Callable[[nn.Module], nn.Module], compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    model = recomputed(small_gpt(), "full")
    if compiled:
        compile_blocks(model, find_blueprint(model))
    tokens = token_batch(2)[0]
    before = model(tokens)
    meta_copy = make(model)
    assert torch.equal(meta_copy(tokens), before)
    with torch.no_grad():
        for parameter in meta_copy.blocks.parameters():
            parameter.zero_()
    meta_copy(tokens).sum().backward()
    assert torch.equal(model(tokens), before) and not torch.equal(meta_copy(tokens), before)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.grad is not None for parameter in meta_copy.parameters())


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(3, 5), nn.ReLU(inplace=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        hidden *= 1.5
        return x + self.down(self.act(hidden))


def test_overwriting_what_selective_keeps_is_refused() -> None:
    model, batches = nn.Sequential(InPlace(), InPlace()), [(torch.randn(4, 3), torch.randint(3, (4,)))]
    with pytest.raises(ModelError, match=r'block "1" overwrites .* policy = "full"'):
        train(recomputed(model, "selective"), batches)
    assert_bitwise(train(recomputed(model, "full"), batches), train(recomputed(model, "none"), batches))


class Counting(nn.Linear):
    """A layer whose answer depends on how often it was asked."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("constant", torch.ones(()))
        self.rebind = False

    def forward(self, x: Tensor) -> Tensor:
        if self.rebind:
            self.calls = self.calls + 1
        else:
            self.calls += 1
        return super().forward(x) * self.calls


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings(GRAD_WARNING)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("rebind", [False, True])
def test_a_block_that_would_not_repeat_itself_is_refused(
    rebind: bool, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    original = nn.Sequential(Counting(), Counting())
    original[0].rebind = rebind
    model = recomputed(original, "full")
    if compiled:
        compile_blocks(model, find_blueprint(model))
    for each in (model, copy.deepcopy(model)):
        with pytest.raises(ModelError, match=r'Counting.calls in block "0" changes') as caught:
            each(torch.randn(2, 3))
        assert "constant" not in str(caught.value)
        with torch.no_grad():
            assert each(torch.randn(2, 3)).shape == (2, 3)


def test_a_model_without_blocks_is_refused() -> None:
    model = MLP()
    with pytest.raises(ModelError, match=r'\[recompute\] policy = "full" needs a model with a list of blocks'):
        recompute_blocks(model, find_blueprint(model), "full")
    with pytest.raises(ModelError, match=r"\[compile\] blocks = true needs a model with a list of blocks"):
        compile_blocks(model, find_blueprint(model))


def test_a_block_that_is_used_twice_is_wrapped_once() -> None:
    model = small_gpt()
    recompute_blocks(model, Blueprint(blocks=("blocks.1", "blocks.0", "blocks.1")), "full")
    for block in model.blocks:
        assert block.forward.__self__.inner.__func__ is type(block).forward


@pytest.mark.long
@pytest.mark.filterwarnings(GRAD_WARNING)
@pytest.mark.parametrize("policy", [pytest.param(p, marks=[pytest.mark.long] * (p != "selective")) for p in POLICIES])
def test_one_compilation_serves_all_blocks(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And it is exact, recomputes, takes another batch size, and leaves hooks outside."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter, fullgraph=True))
    original = small_gpt(num_layers=3, dropout=0.2)
    model, hooked = recomputed(original, policy), []
    compile_blocks(model, find_blueprint(model))
    for block in model.blocks:
        block.register_forward_hook(lambda *args: hooked.append(torch.compiler.is_compiling()))
    batches = [token_batch(4, seed=seed) for seed in range(2)]
    assert_bitwise(train(model, batches), train(recomputed(original, "none"), batches))
    assert counter.frame_count == 1 and hooked == [False] * 6
    assert saved_bytes(model) < saved_bytes(recomputed(original, "none"))
    train(model, [token_batch(3), token_batch(5)])
    assert counter.frame_count == 2, "one for any batch size"


def saved_bytes(model: nn.Module) -> int:
    """What autograd saves, which is all there is where a block is compiled."""
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(token_batch(16)[0])
    return sum(sizes.values())


@pytest.mark.sampled(1)
@pytest.mark.filterwarnings(GRAD_WARNING)
@pytest.mark.parametrize("policy", POLICIES)
def test_compiled_blocks_with_batch_norm_and_in_place_operators(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager", fullgraph=True))
    images, rows = [image_batch(4)] * 2, [(torch.randn(4, 3), torch.randint(3, (4,)))] * 2
    for original, batches in ((small_convnet(), images), (nn.Sequential(InPlace(), InPlace()), rows)):
        model = recomputed(original, policy)
        compile_blocks(model, find_blueprint(model))
        assert_bitwise(train(model, batches), train(recomputed(original, "none"), batches))


def test_compiling_a_batch_norm_that_exchanges_is_refused() -> None:
    model = small_convnet()
    synchronise_batch_norms(model, Group.__new__(Group))
    with pytest.raises(ModelError, match=r'blocks = true cannot compile "blocks.0.norm1"') as caught:
        compile_blocks(model, find_blueprint(model))
    assert len(caught.value.problems) == 4
