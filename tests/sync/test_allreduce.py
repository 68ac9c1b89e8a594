"""All-reduce data parallelism against one process that sees whole batches: gradients, weights and losses in float64.

Here: which parameters are used by whom, and how their gradients travel. Batches that are uneven are in
`test_uneven_batches.py`; what is done with gradients after the exchange is in `test_trainer.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from oracle import (
    ADAMW,
    MLP,
    assert_same,
    batch_of,
    batches_of,
    check_against_one_process,
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
from weft.errors import ModelError
from weft.sync.allreduce import AllReduce
from weft.world import join_world

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
        (["0012", "2101", "2222"], 2),  # different in every microbatch
        (["1000", "0001", "0100"], 2),  # used in an early microbatch only, on one rank only
        (["2212", "0000"], 2),
    ],
)
def test_ranks_that_use_different_parameters(routes: list[str], microbatches: int, bucket_bytes: int) -> None:
    steps = [routed([int(letter) for letter in route], seed) for seed, route in enumerate(routes)]
    plan = data_plan(2, microbatches=microbatches, bucket_bytes=bucket_bytes)
    check_against_one_process(Branches(), plan, [cut_evenly(step, 2) for step in steps])


@ranks(4)
def test_four_ranks_that_use_disjoint_parameters_do_not_wait_for_each_other() -> None:
    steps = [routed([0, 1, 2, 3]), routed([3, 2, 1, 0], 1), routed([2, 2, 2, 2], 2)]
    check_against_one_process(Branches(4), data_plan(4, bucket_bytes=1), [cut_evenly(step, 4) for step in steps])


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
    check_against_one_process(model, data_plan(2, microbatches=microbatches, bucket_bytes=300), steps)
    assert model.head.weight is model.embedding.weight


@ranks(2)
def test_frozen_parameters_stay() -> None:
    model = MLP()
    model.first.requires_grad_(False)
    model.last.bias.requires_grad_(False)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    check_against_one_process(model, data_plan(2), [cut_evenly(step, 2) for step in batches_of(6, 6)])
    for name, weight in before.items():
        assert torch.equal(model.get_parameter(name), weight) and model.get_parameter(name).grad is None


@ranks(2)
@pytest.mark.parametrize("bucket_bytes", [1, 26214400])
def test_a_parameter_without_elements(bucket_bytes: int) -> None:
    """Some adapters of rank 0 have one; with small buckets it travels alone, as nothing."""
    model = MLP()
    model.register_parameter("empty", nn.Parameter(torch.empty(0, 4, dtype=torch.float64)))
    model.register_forward_hook(lambda module, inputs, output: output + module.empty.sum())
    trainer = make_trainer(model, data_plan(2, bucket_bytes=bucket_bytes, clip_norm=0.1, check_every=1))
    for step in batches_of(4, 4, 4):
        assert torch.isfinite(trainer.step(*cut_evenly(step, 2)[trainer.data_rank]))
    assert model.empty.grad is not None and model.empty.grad.shape == (0, 4)


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


@ranks(2)
def test_the_order_is_agreed_when_rank_0_has_seen_one() -> None:
    """Rank 0 has no data in the first step, so it has nothing to say before the third; all ranks learn it then."""
    trainer = make_trainer(OutOfOrder(), data_plan(2))
    agreed = []
    for step, sizes in zip(batches_of(4, 4, 4, 4), [(0, 4), (3, 1), (4, 0), (2, 2)], strict=True):
        trainer.step(*cut(step, sizes)[trainer.data_rank])
        agreed.append(trainer.sync.state()["agreed"])
    assert agreed == [False, False, True, True]
    assert trainer.sync.state()["order"] == [5, 4, 1, 0, 7, 6, 3, 2], "d, c, b, a; the bias before its weight"


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
        spans = [(bucket.data_ptr(), bucket.nbytes) for bucket in sync._buckets.buckets]
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
    """As many collectives with four microbatches as with one: one per bucket."""
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
    monkeypatch.setattr(sync, "finish", lambda *args, **kwargs: (events.append("finish"), finish(*args, **kwargs))[1])
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
    check_against_one_process(
        Shared(reentrant=False), data_plan(2, bucket_bytes=1), [cut_evenly(step, 2) for step in batches_of(4, 4, 4)]
    )


@ranks(2)
def test_a_gradient_that_comes_after_its_bucket_left_is_refused() -> None:
    """Reentrant checkpoints accumulate into a shared layer once for each use; the first would travel alone."""
    trainer = make_trainer(Shared(reentrant=True), data_plan(2, bucket_bytes=1))
    with pytest.raises(ModelError, match="use_reentrant=False"):
        for _ in range(2):
            trainer.step(*batch_of(4))


@ranks(2)
def test_reentrant_shared_layers_are_right_where_their_bucket_waits() -> None:
    check_against_one_process(Shared(reentrant=True), data_plan(2), [cut_evenly(step, 2) for step in batches_of(4, 4)])


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


@ranks(2)
def test_a_sum_that_came_back_early_stays_on_a_rank_that_added_nothing() -> None:
    """In a pipeline a stage says that it is done; others' sums may be here long before the step is finished."""
    trainer = make_trainer(MLP(), data_plan(2, bucket_bytes=1))
    sync, rank = trainer.sync, trainer.mesh.world.rank
    names = [name for name, _ in trainer.model.named_parameters()]
    assert isinstance(sync, AllReduce)
    sync.begin()
    sync.arm()
    if rank == 0:
        trainer.model(batch_of(3)[0]).sum().backward()
    sync.complete(names)
    for pending in sync._pending:
        pending.wait()
    sync.finish(torch.zeros(()), torch.ones(()), with_norm=False)
    alone = MLP()
    alone.load_state_dict(trainer.model.state_dict())
    alone(batch_of(3)[0]).sum().backward()
    for mine, true in zip(trainer.model.parameters(), alone.parameters(), strict=True):
        assert mine.grad is not None and torch.equal(mine.grad, true.grad)


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
