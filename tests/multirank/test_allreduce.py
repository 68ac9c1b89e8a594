"""All-reduce data parallelism against one process that sees whole batches: gradients, weights and losses in float64.

Batches are given as one part a rank, of any sizes; the reference (`oracle.py`) is plain torch on their concatenation.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from oracle import (
    ADAMW,
    SGD,
    assert_same,
    call,
    cross_entropy,
    cut,
    cut_evenly,
    data_plan,
    image_batch,
    make_trainer,
    small_convnet,
    small_gpt,
    token_batch,
    train_alone,
    train_parallel,
)
from ranks import ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from weft.comm import collectives
from weft.errors import DataError, ModelError
from weft.mesh import join_world
from weft.plan.plan import Plan
from weft.sync.allreduce import AllReduce
from weft.training.trees import map_tensors


class MLP(nn.Module):
    """Three layers, in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(x).tanh()).tanh())


def batch_of(num_samples: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(num_samples, 4, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(3, (num_samples,), generator=generator)


def batches_of(*sizes: int) -> list[tuple[Tensor, Tensor]]:
    return [batch_of(size, seed) for seed, size in enumerate(sizes)]


def check(model: nn.Module, plan: Plan, parts: Sequence[Sequence[Any]], **changes: Any) -> None:
    """Train a copy of the model under the plan and one alone, on the same steps, and compare after every step."""
    alone = copy.deepcopy(model)
    mine = train_parallel(make_trainer(model, plan, **changes), parts)
    whole = [map_tensors(torch.clone, _join(step_parts)) for step_parts in parts]
    assert_same(mine, train_alone(alone, whole, clip_norm=plan.step.clip_norm))


def _join(step_parts: Sequence[Any]) -> Any:
    first = step_parts[0]
    if isinstance(first, Tensor):
        return torch.cat(list(step_parts))
    return type(first)(_join(branch) for branch in zip(*step_parts, strict=True))


# ---- how samples are spread over ranks ----


@ranks(2)
@pytest.mark.parametrize("microbatches", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "sizes",
    [
        [(4, 4), (4, 4), (4, 4)],
        [(5, 3), (1, 7), (4, 4)],
        [(4, 4), (3, 0), (0, 3)],  # a rank without samples, after steps with all
        [(4, 0), (4, 4), (4, 4)],  # a rank without samples in the very first step
        [(0, 4), (4, 4), (4, 4)],  # and rank 0, which decides the order of buckets
        [(0, 4), (0, 4), (1, 4), (5, 5)],
        [(8, 8), (8, 8), (1, 0), (8, 8)],  # a short last batch after full ones, and full ones again
    ],
)
def test_any_spread_of_samples(sizes: list[tuple[int, int]], microbatches: int) -> None:
    steps = batches_of(*(sum(parts) for parts in sizes))
    check(MLP(), data_plan(2, microbatches=microbatches), list(map(cut, steps, sizes)))


@ranks(4)
@pytest.mark.parametrize("microbatches", [1, 3])
def test_any_spread_of_samples_over_four_ranks(microbatches: int) -> None:
    sizes = [(0, 0, 1, 0), (3, 2, 2, 2), (0, 5, 0, 1), (2, 2, 2, 2)]
    steps = batches_of(*(sum(parts) for parts in sizes))
    check(MLP(), data_plan(4, microbatches=microbatches), list(map(cut, steps, sizes)))


@ranks(2)
def test_an_empty_global_batch_is_refused_on_every_rank() -> None:
    trainer = make_trainer(MLP(), data_plan(2))
    with pytest.raises(DataError, match="no rank has a target"):
        trainer.step(*batch_of(0))


def test_an_empty_batch_is_refused_by_one_process_too() -> None:
    trainer = make_trainer(MLP(), data_plan(1))
    with pytest.raises(DataError, match="no rank has a target"):
        trainer.step(*batch_of(0))
    assert trainer.steps_done == 0


@ranks(2)
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("loss", ["built-in", "mean", "sum and count"])
def test_ignored_targets_anywhere(loss: str, microbatches: int) -> None:
    """Unevenly spread, all on one rank, a whole micro-batch of them, and all but one in the run."""
    steps = [token_batch(8, seed=seed) for seed in range(4)]
    steps[0][1][0, :5] = steps[0][1][5, 2:] = -100
    steps[1][1][4:] = -100
    steps[2][1][:2] = steps[2][1][6:] = -100
    steps[3][1].fill_(-100)[7, 3] = 4
    losses = {"built-in": "cross-entropy", "mean": mean_cross_entropy, "sum and count": cross_entropy}
    model = small_gpt().double()
    plan = data_plan(2, microbatches=microbatches)
    check(model, plan, [cut_evenly(step, 2) for step in steps], loss=losses[loss])


def mean_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


@ranks(2)
def test_a_loss_that_counts_for_itself_decides_what_a_target_is() -> None:
    """To such a loss -100 is a number like any other: a part full of them counts."""
    steps = [(inputs, torch.full_like(targets, -100)) for inputs, targets in batches_of(6, 6, 3)]
    steps[0][1][:3] = steps[1][1][3:] = 1

    def distance(output: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        return ((output.sum(1) - targets) ** 2).sum(), 2 * len(targets)

    model = MLP()
    alone = train_alone(copy.deepcopy(model), steps, loss=distance)
    trainer = make_trainer(model, data_plan(2), loss=distance)
    assert_same(train_parallel(trainer, [cut_evenly(step, 2) for step in steps]), alone)


@ranks(2)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_mean_over_samples_where_targets_are_no_integers(microbatches: int) -> None:
    steps = [(inputs, torch.sin(inputs[:, :3])) for inputs, _ in batches_of(8, 5, 7)]
    parts = [cut(steps[0], (4, 4)), cut(steps[1], (1, 4)), cut(steps[2], (7, 0))]
    model = MLP()
    alone = train_alone(copy.deepcopy(model), steps, loss=lambda output, y: (((output - y) ** 2).mean(1).sum(), len(y)))
    trainer = make_trainer(model, data_plan(2, microbatches=microbatches), loss=F.mse_loss)
    assert_same(train_parallel(trainer, parts), alone)


@ranks(2)
def test_a_loss_with_a_fractional_count() -> None:
    """Weighted samples: the sum of weights is the count, and is below one on a rank."""
    weights = torch.linspace(0.1, 0.7, 6, dtype=torch.float64)
    steps = [(inputs, (targets, weights[: len(targets)])) for inputs, targets in batches_of(6, 5)]

    def weighted(logits: Tensor, targets: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        classes, weights = targets
        return (F.cross_entropy(logits, classes, reduction="none") * weights).sum(), weights.sum()

    model = MLP()
    alone = train_alone(copy.deepcopy(model), steps, loss=weighted)
    trainer = make_trainer(model, data_plan(2), loss=weighted)
    mine = [map_tensors(lambda tensor: tensor[:2] if trainer.data_rank == 0 else tensor[2:], step) for step in steps]
    assert_same(train_parallel(trainer, [[part, part] for part in mine]), alone)


# ---- what a batch looks like ----


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 3).double(), nn.Linear(4, 3).double()

    def forward(self, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
        return self.left(a) + scale * self.right(b)


@ranks(2)
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("kind", ["tuple", "dict", "wrapped"])
def test_inputs_of_several_tensors(kind: str, microbatches: int) -> None:
    a, targets = batch_of(7)
    b, _ = batch_of(7, seed=1)
    inputs: Any = {"a": a, "b": b, "scale": 0.5} if kind == "dict" else (a, b)
    model = TwoInputs()
    alone = train_alone(copy.deepcopy(model), [(inputs, targets)])
    trained = HuggingFaceLike(model) if kind == "wrapped" else model
    trainer = make_trainer(trained, data_plan(2, microbatches=microbatches))
    rows = slice(0, 4) if trainer.data_rank == 0 else slice(4, 7)
    mine = map_tensors(lambda tensor: tensor[rows], inputs)
    loss = trainer.step(mine, targets[rows])
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, alone[0].gradients[name], rtol=1e-12, atol=1e-14)
    assert float(loss) == pytest.approx(alone[0].loss, rel=1e-12)


class HuggingFaceLike(nn.Module):
    """A model whose output is an object with `.logits`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Tensor) -> Any:
        class Output:
            logits = self.model(*args)

        return Output


# ---- which parameters are used ----


class Branches(nn.Module):
    """A branch a value of the first feature; each sample goes through one of them, so ranks may use different ones."""

    def __init__(self, num_branches: int = 3) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 5)
        self.branches = nn.ModuleList(nn.Linear(5, 3) for _ in range(num_branches))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.trunk(x).tanh()
        output = hidden[:, :3] * 0
        for number, branch in enumerate(self.branches):
            rows = (x[:, 0] == number).nonzero().flatten()
            if len(rows):
                output = output.index_add(0, rows, branch(hidden[rows]))
        return output


def routed(route: Sequence[int], seed: int = 0) -> tuple[Tensor, Tensor]:
    """A batch in which sample i takes branch route[i]."""
    inputs, targets = batch_of(len(route), seed)
    inputs[:, 0] = torch.tensor(route, dtype=torch.float64)
    return inputs, targets


@ranks(2)
@pytest.mark.parametrize("bucket_bytes", [1, 200, 26214400])
@pytest.mark.parametrize(
    ("routes", "microbatches"),
    [
        (["0000", "0000", "0022"], 1),  # 1 and 2 used by nobody: their gradient stays None, until somebody does
        (["0011", "1100", "0101"], 1),  # disjoint on the two ranks, by turns
        (["0012", "2101", "2222"], 2),  # different in every micro-batch
        (["1000", "0001", "0100"], 2),  # used in an early micro-batch only, on one rank only
        (["2212", "0000"], 2),
    ],
)
def test_ranks_that_use_different_parameters(routes: list[str], microbatches: int, bucket_bytes: int) -> None:
    steps = [routed([int(letter) for letter in route], seed) for seed, route in enumerate(routes)]
    plan = data_plan(2, microbatches=microbatches, bucket_bytes=bucket_bytes)
    check(Branches(), plan, [cut_evenly(step, 2) for step in steps])


@ranks(4)
def test_four_ranks_that_use_disjoint_parameters_do_not_wait_for_each_other() -> None:
    steps = [routed([0, 1, 2, 3]), routed([3, 2, 1, 0], 1), routed([2, 2, 2, 2], 2)]
    check(Branches(4), data_plan(4, bucket_bytes=1), [cut_evenly(step, 4) for step in steps])


@ranks(2)
def test_an_unused_parameter_is_not_decayed() -> None:
    """AdamW decays what has a gradient, even one of zeros; what nobody used keeps its weights to the bit."""
    model = Branches()
    before = model.branches[2].weight.detach().clone()
    trainer = make_trainer(model, data_plan(2), optimizer=ADAMW)
    for number in range(3):
        trainer.step(*cut_evenly(routed([0, 1, 1, 0], number), 2)[trainer.data_rank])
    assert model.branches[2].weight.grad is None
    assert torch.equal(model.branches[2].weight, before)


@ranks(2)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_tied_weights(microbatches: int) -> None:
    model = small_gpt(tied=True).double()
    assert model.head.weight is model.embedding.weight
    steps = [cut_evenly(token_batch(6, seed=seed), 2) for seed in range(3)]
    check(model, data_plan(2, microbatches=microbatches, bucket_bytes=300), steps)
    assert model.head.weight is model.embedding.weight


@ranks(2)
def test_frozen_parameters_stay() -> None:
    model = MLP()
    model.first.requires_grad_(False)
    model.last.bias.requires_grad_(False)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    check(model, data_plan(2), [cut_evenly(step, 2) for step in batches_of(6, 6)])
    for name, weight in before.items():
        assert torch.equal(model.get_parameter(name), weight) and model.get_parameter(name).grad is None


class OutOfOrder(nn.Module):
    """Registered in an order that has nothing to do with the order of use."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.a, self.d, self.b = nn.Linear(5, 6), nn.Linear(4, 5), nn.Linear(6, 3), nn.Linear(5, 5)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.b(self.a(x).tanh()).tanh()).tanh())


@ranks(2)
@pytest.mark.parametrize("bucket_bytes", [1, 100, 300, 26214400])
def test_buckets_are_laid_out_in_the_order_of_use(bucket_bytes: int) -> None:
    model = OutOfOrder()
    names = [name for name, _ in model.named_parameters()]
    alone = copy.deepcopy(model)
    trainer = make_trainer(model, data_plan(2, bucket_bytes=bucket_bytes))
    steps = batches_of(6, 6, 6, 6)
    mine = []
    for step in steps:
        mine += train_parallel(trainer, [cut_evenly(step, 2)])
        if len(mine) == 1:
            assert trainer.sync.state()["order"] == list(reversed(range(len(names))))
    order = [names[index].split(".")[0] for index in trainer.sync.state()["order"]]
    assert order == ["d", "d", "c", "c", "b", "b", "a", "a"] and trainer.sync.state()["agreed"]
    assert_same(mine, train_alone(alone, steps))


# ---- how the exchange is made ----


@ranks(2)
@pytest.mark.parametrize("bucket_bytes", [1, 8, 240, 26214400])
def test_a_gradient_is_a_part_of_its_bucket(bucket_bytes: int) -> None:
    """Neither copied out of the bucket nor into it again: one memory, also where a bucket is smaller than it."""
    trainer = make_trainer(MLP(), data_plan(2, bucket_bytes=bucket_bytes))
    for _ in range(3):
        trainer.step(*batch_of(2))
        sync = trainer.sync
        assert isinstance(sync, AllReduce)
        spans = [(bucket.flat.data_ptr(), bucket.flat.nbytes) for bucket in sync._buckets.buckets]
        for parameter in trainer.model.parameters():
            assert parameter.grad is not None
            place = parameter.grad.data_ptr()
            assert any(start <= place and place + parameter.grad.nbytes <= start + size for start, size in spans)
    assert len(spans) == (7 if bucket_bytes <= 8 else 1 if bucket_bytes > 1000 else len(spans))


@ranks(2)
@pytest.mark.parametrize("fused", [True, False])
def test_a_gradient_has_the_strides_of_its_parameter(fused: bool) -> None:
    """A fused optimizer on the CPU reads both in memory order: in another order the update is silently wrong."""
    model = small_convnet(batch_norm=False).double().to(memory_format=torch.channels_last)
    alone = copy.deepcopy(model)

    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.01, fused=fused)

    steps = [image_batch(6, seed=seed) for seed in range(3)]
    mine = train_parallel(make_trainer(model, data_plan(2), optimizer=make), [cut_evenly(step, 2) for step in steps])
    for parameter in model.parameters():
        assert parameter.grad is not None and parameter.grad.stride() == parameter.stride()
    assert_same(mine, train_alone(alone, steps, optimizer=lambda m: make(m.parameters())))


@ranks(2)
@pytest.mark.parametrize("microbatches", [1, 4])
def test_accumulation_exchanges_once(microbatches: int) -> None:
    """As many collectives with four micro-batches as with one: one a bucket."""
    trainer = make_trainer(MLP(), data_plan(2, microbatches=microbatches, bucket_bytes=1))
    traffic = trainer.mesh.traffic["data"]
    for number in range(4):
        before = traffic.num_calls
        trainer.step(*batch_of(8))
        assert number < 2 or traffic.num_calls - before == 7, "six parameters and the tail"


@ranks(2)
def test_buckets_leave_while_the_backward_pass_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(OutOfOrder(), data_plan(2, bucket_bytes=1))
    for _ in range(2):
        trainer.step(*batch_of(4))
    events: list[str] = []
    sync = trainer.sync
    finish, reduce = sync.finish, collectives.all_reduce
    monkeypatch.setattr(sync, "finish", lambda *args: (events.append("finish"), finish(*args))[1])
    monkeypatch.setattr(
        "weft.sync.allreduce.all_reduce", lambda *args, **kwargs: (events.append("sent"), reduce(*args, **kwargs))[1]
    )
    trainer.step(*batch_of(4))
    assert events == ["sent"] * 8 + ["finish", "sent"]


@ranks(2)
def test_a_backward_pass_outside_of_a_step_exchanges_nothing() -> None:
    """A user who differentiates the model for a plot must not start a collective that no other rank takes part in."""
    model = MLP()
    trainer = make_trainer(model, data_plan(2, bucket_bytes=1))
    steps = batches_of(4, 4, 4)
    alone = train_alone(copy.deepcopy(model), steps)
    mine = []
    for step in steps:
        mine += train_parallel(trainer, [cut_evenly(step, 2)])
        if trainer.data_rank == 1:
            model(step[0]).sum().backward()
    assert_same(mine, alone)


class Shared(nn.Module):
    """One layer used twice, each time under a checkpoint."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first, self.layer, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(lambda hidden: self.layer(hidden).tanh(), x, use_reentrant=self.reentrant)
        return self.last(x)


@ranks(2)
def test_recomputed_shared_layers() -> None:
    check(Shared(reentrant=False), data_plan(2, bucket_bytes=1), [cut_evenly(step, 2) for step in batches_of(4, 4, 4)])


@ranks(2)
def test_a_gradient_that_comes_after_its_bucket_left_is_refused() -> None:
    """Reentrant checkpoints accumulate into a shared layer once for each use; the first would travel alone."""
    trainer = make_trainer(Shared(reentrant=True), data_plan(2, bucket_bytes=1))
    with pytest.raises(ModelError, match="use_reentrant=False"):
        for _ in range(2):
            trainer.step(*batch_of(4))


@ranks(2)
def test_reentrant_shared_layers_are_right_where_their_bucket_waits() -> None:
    check(Shared(reentrant=True), data_plan(2), [cut_evenly(step, 2) for step in batches_of(4, 4)])


@ranks(2)
def test_ranks_start_from_the_weights_and_buffers_of_rank_0() -> None:
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = small_convnet().double().to(memory_format=torch.channels_last)
    model.stem_norm.running_mean.fill_(rank)
    model.register_buffer("nothing", torch.empty(0))
    model.register_buffer("flags", torch.tensor([rank == 0, True]))
    torch.manual_seed(0)
    expected = small_convnet().double()
    make_trainer(model, data_plan(2))
    for name, parameter in expected.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter)
    assert model.stem_norm.running_mean.eq(0).all() and model.get_buffer("flags").all()


# ---- what happens to a gradient after the exchange ----


@ranks(2)
@pytest.mark.parametrize("clip_norm", [0.05, 1e6])
def test_clipping_is_that_of_torch(clip_norm: float) -> None:
    """Also where the shared count must be corrected in the same pass."""
    steps = batches_of(8, 3, 8)
    parts = [cut(steps[0], (4, 4)), cut(steps[1], (3, 0)), cut(steps[2], (2, 6))]
    check(MLP(), data_plan(2, clip_norm=clip_norm), parts)


@ranks(2)
def test_the_norm_before_clipping_is_told() -> None:
    model = MLP()
    steps = batches_of(6, 3)
    alone = copy.deepcopy(model)
    trainer = make_trainer(model, data_plan(2, clip_norm=0.05))
    optimizer = SGD(alone.parameters())
    for step in steps:
        trainer.step(*cut_evenly(step, 2)[trainer.data_rank])
        optimizer.zero_grad()
        total, count = cross_entropy(call(alone, step[0]), step[1])
        (total / count).backward()
        norm = nn.utils.clip_grad_norm_(alone.parameters(), 0.05)
        optimizer.step()
        assert trainer.grad_norm is not None
        assert float(trainer.grad_norm) == pytest.approx(float(norm), rel=1e-12)


@ranks(2)
def test_parameter_groups_and_a_schedule() -> None:
    def groups(name: str, shape: tuple[int, ...]) -> dict[str, Any]:
        settings: dict[str, Any] = {"weight_decay": 0.3 if len(shape) > 1 else 0.0}
        return {**settings, "lr": 0.02} if name.startswith("last") else settings

    def schedule(step: int) -> float:
        return 1.0 / (1 + step)

    def grouped(model: nn.Module) -> torch.optim.Optimizer:
        named = [({**groups(n, tuple(p.shape)), "params": [p]}) for n, p in model.named_parameters()]
        return torch.optim.AdamW(named, lr=0.01)

    model = MLP()
    steps = batches_of(6, 6, 4, 6)
    alone = train_alone(copy.deepcopy(model), steps, optimizer=grouped, schedule=schedule)

    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.01)

    trainer = make_trainer(model, data_plan(2), optimizer=make, groups=groups, schedule=schedule)
    assert [(g["weight_decay"], g["lr"], len(g["params"])) for g in trainer.optimizer.param_groups] == [
        (0.3, 0.01, 2),
        (0.0, 0.01, 2),
        (0.3, 0.02, 1),
        (0.0, 0.02, 1),
    ]
    assert_same(train_parallel(trainer, [cut_evenly(step, 2) for step in steps]), alone)


# ---- evaluation ----


@ranks(2)
def test_evaluation_is_the_mean_over_all_ranks_and_wakes_nothing() -> None:
    model = small_convnet().double()
    trainer = make_trainer(model, data_plan(2, microbatches=2))
    model.stem_norm.eval()  # frozen by the user, and to stay so
    sizes = (5, 3, 0) if trainer.data_rank == 0 else (2,)
    mine = [image_batch(size, seed=10 * trainer.data_rank + number) for number, size in enumerate(sizes)]
    everything = [image_batch(5), image_batch(3, seed=1), image_batch(2, seed=10)]
    found = trainer.evaluate(mine)
    assert model.training and not model.stem_norm.training and model.blocks[0].norm1.training
    model.eval()
    with torch.no_grad():
        sums = [cross_entropy(model(images), classes) for images, classes in everything]
    assert found == pytest.approx(float(sum(s for s, _ in sums) / 10), rel=1e-12)
    assert torch.equal(model.stem_norm.running_mean, torch.zeros_like(model.stem_norm.running_mean))


@ranks(2)
def test_every_rank_generates_the_same_text() -> None:
    torch.manual_seed(dist.get_rank())
    model = small_gpt(dropout=0.5)
    trainer = make_trainer(model, data_plan(2))
    model.blocks[0].eval()
    text = trainer.generate([1, 2, 3], num_tokens=12, context=8, seed=5)
    everybodys: list[Any] = [None, None]
    dist.all_gather_object(everybodys, text)
    assert everybodys[0] == everybodys[1] and len(text) == 15
    assert model.training and not model.blocks[0].training
    greedy = trainer.generate([1], num_tokens=3, context=8, temperature=0)
    model.eval()
    assert greedy[1] == int(model(torch.tensor([[1]]))[0, -1].argmax())


@ranks(2)
def test_going_on_from_a_state_taken_before_the_order_was_agreed() -> None:
    """The order that rank 0 saw in the first step is part of the state: the second step is the same to the bit."""
    plan, steps = data_plan(2, bucket_bytes=100), batches_of(6, 6, 6)
    first = make_trainer(OutOfOrder(), plan)
    rank = join_world("cpu").rank
    first.step(*cut_evenly(steps[0], 2)[rank])
    second = make_trainer(copy.deepcopy(first.model), plan)
    second.sync.load_state(first.sync.state())
    assert second.sync.state() == first.sync.state() and not first.sync.state()["agreed"]
    for step in steps[1:]:
        for trainer in (first, second):
            trainer.step(*cut_evenly(step, 2)[rank])
        assert second.sync.state()["order"] == first.sync.state()["order"]
    assert second.sync.state()["agreed"]
