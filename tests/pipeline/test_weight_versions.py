"""Weight versions keep their promise: flush-free pipelines, run in one process, equal a plain loop to the bit."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sequential import Weights, pipedream, relative_error, two_bw, without_stashing
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from weft.parallel.pipeline.weight_versions import WeightVersions

SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAMW = functools.partial(torch.optim.AdamW, lr=0.01)
OPTIMIZERS = pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=["sgd", "adamw"])
STAGES = pytest.mark.parametrize("num_stages", [2, 3, 4])


class Recomputed(nn.Sequential):
    """Layers that run again in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def make_model(inner: type[nn.Sequential] = nn.Sequential) -> nn.Sequential:
    """A bit of everything whose backward pass needs its weights."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(11, 12),
        nn.LayerNorm(12),
        nn.Linear(12, 12),
        inner(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12)),
        nn.Unflatten(2, (3, 4)),
        nn.Conv2d(4, 4, 3, padding=1),
        nn.BatchNorm2d(4, track_running_stats=False),
        nn.Tanh(),
        nn.Conv2d(4, 2, 3, padding=1),
        nn.GroupNorm(2, 2),
        nn.Flatten(),
        nn.Linear(24, 5),
    ).double()


CUTS = {2: (0, 6, 12), 3: (0, 3, 8, 12), 4: (0, 2, 6, 9, 12)}
"""The first layer of each stage, and the end."""
MODEL = make_model()
WEIGHTS = {name: weight.detach() for name, weight in MODEL.named_parameters()}
MICROBATCHES = [(torch.randint(11, (3, 4)), torch.randint(5, (3,))) for _ in range(16)]


def stage_of(num_stages: int, name: str) -> int:
    return sum(int(name.split(".")[0]) >= first for first in CUTS[num_stages]) - 1


def loss_of(weights: Weights, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(functional_call(MODEL, weights, (batch[0],)), batch[1])


class Pipeline:
    """A stage after the other in one process, in the order of a flush-free pipeline: at tick k, microbatch k goes
    forward through all stages, then stage i goes back through microbatch k - (p - 1 - i)."""

    def __init__(self, num_stages: int, needs: Callable[[int], tuple[int, int]], optimizer: Any = SGD) -> None:
        model, cuts = make_model(Recomputed), CUTS[num_stages]
        self.stages = [model[first:end] for first, end in itertools.pairwise(cuts)]
        self.versions = []
        for i, stage in enumerate(self.stages):
            num_slots, lag = needs(i)
            self.versions.append(WeightVersions(stage, dict(stage.named_parameters()), num_slots=num_slots, lag=lag))
        self.optimizers = [optimizer(versions.heads) for versions in self.versions]
        self.in_flight: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.losses: list[float] = []
        self.history: dict[int, Weights] = {0: WEIGHTS}
        self.gradients: dict[int, Weights] = {}

    def run(self, version_of: Callable[[int, int], int], start: int, stop: int, *, every: int = 1) -> None:
        """Microbatches from an empty pipeline to an empty one, with an update after `every` of them."""
        last = len(self.stages) - 1
        for tick in range(start, stop + last):
            for i in range(len(self.stages)) if tick < stop else ():
                self.forward(i, tick, version_of(i, tick))
            for i in range(last, -1, -1):
                k = tick - (last - i)
                if start <= k < stop:
                    self.backward(i, k, version_of(i, k))
                    if (k + 1) % every == 0:
                        self.update(i, version_of(i, k))

    def forward(self, i: int, k: int, version: int) -> None:
        given = self.in_flight[i - 1, k][1].detach().requires_grad_() if i else MICROBATCHES[k][0]
        self.versions[i].hold(version)
        with self.versions[i].using(version):
            made = self.stages[i](given)
        if i == len(self.stages) - 1:
            made = F.cross_entropy(made, MICROBATCHES[k][1])
            self.losses.append(float(made.detach()))
        self.in_flight[i, k] = given, made

    def backward(self, i: int, k: int, version: int) -> None:
        after = self.in_flight.pop((i + 1, k), None)
        with self.versions[i].using(version):
            self.in_flight[i, k][1].backward(None if after is None else after[0].grad)
        self.versions[i].release(version)

    def update(self, i: int, version: int) -> None:
        self.versions[i].take_gradients(version)
        named = dict(self.stages[i].named_parameters())
        with self.versions[i].advance():
            self.optimizers[i].step()
        made = self.versions[i].newest
        self.gradients.setdefault(made, {}).update({n: p.grad for n, p in named.items() if p.grad is not None})
        self.history.setdefault(made, {}).update({n: p.detach().clone() for n, p in named.items()})
        self.optimizers[i].zero_grad()


def assert_equal(pipeline: Pipeline, run: Any) -> None:
    assert pipeline.losses == run.losses
    assert len(pipeline.history) == len(run.history)
    for version, weights in enumerate(run.history):
        assert pipeline.history[version].keys() == weights.keys()
        for name, weight in weights.items():
            assert torch.equal(pipeline.history[version][name], weight), f"{name} of version {version}"


@pytest.mark.sampled(2, long=3)
@OPTIMIZERS
@STAGES
@pytest.mark.parametrize("vertical_sync", [False, True])
def test_pipedream_equals_a_plain_loop(num_stages: int, vertical_sync: bool, optimizer: Any) -> None:
    p = num_stages
    for number in range(1, 11):
        flushes = (0, number // 4)
        pipeline = Pipeline(p, lambda i: (p, i) if vertical_sync else (p - i, 0), optimizer)
        for start, stop in zip(flushes, (*flushes[1:], number), strict=True):

            def version_of(i: int, k: int, start: int = start) -> int:
                return max(start, k - (p - 1 - (0 if vertical_sync else i)))

            pipeline.run(version_of, start, stop)
            for versions in pipeline.versions:
                versions.forget_older()
                assert versions.live == (versions.newest,)
        run = pipedream(
            loss_of,
            WEIGHTS,
            MICROBATCHES[:number],
            stage_of=functools.partial(stage_of, p),
            num_stages=p,
            optimizer=optimizer,
            flushes=flushes,
            vertical_sync=vertical_sync,
        )
        assert_equal(pipeline, run)
        most = [versions.most_live for versions in pipeline.versions]
        assert all(live <= (p if vertical_sync else p - i) for i, live in enumerate(most))
        if number == 10:
            assert most == [p if vertical_sync else p - i for i in range(p)], "the table's figures are reached"


def version_2bw(every: int, i: int, k: int) -> int:
    return max(0, k // every - 1)


@pytest.mark.sampled(3)
@OPTIMIZERS
@STAGES
def test_2bw_equals_a_plain_loop(num_stages: int, optimizer: Any) -> None:
    for every in (num_stages, num_stages + 1):
        for number in (1, 2, 3):
            pipeline = Pipeline(num_stages, lambda i: (2, 1), optimizer)
            pipeline.run(functools.partial(version_2bw, every), 0, every * number, every=every)
            batches = [MICROBATCHES[t * every : (t + 1) * every] for t in range(number)]
            assert_equal(pipeline, two_bw(loss_of, WEIGHTS, batches, optimizer=optimizer))
            assert [versions.most_live for versions in pipeline.versions] == [2] * num_stages


@STAGES
def test_gradients_are_wrong_without_stashing_and_right_with_it(num_stages: int) -> None:
    settings: Any = {"stage_of": functools.partial(stage_of, num_stages), "num_stages": num_stages, "optimizer": SGD}
    errors = without_stashing(loss_of, WEIGHTS, MICROBATCHES[:8], **settings)
    assert errors[0] == 0.0, "the first microbatch finds one version only"
    assert min(errors[1:]) > 1e-3
    pipeline = Pipeline(num_stages, lambda i: (num_stages - i, 0))
    pipeline.run(lambda i, k: max(0, k - (num_stages - 1 - i)), 0, 8)
    true = pipedream(loss_of, WEIGHTS, MICROBATCHES[:8], **settings).gradients
    assert [relative_error(pipeline.gradients[k + 1], true[k]) for k in range(8)] == [0.0] * 8


def test_2bw_goes_on_from_its_state() -> None:
    whole, before, after = (Pipeline(2, lambda i: (2, 1)) for _ in range(3))
    version_of = functools.partial(version_2bw, 2)
    whole.run(version_of, 0, 6, every=2)
    before.run(version_of, 0, 4, every=2)
    for i, versions in enumerate(before.versions):
        older = copy.deepcopy(versions.older())
        assert versions.newest == 2 and list(older) == [1]
        after.stages[i].load_state_dict(before.stages[i].state_dict())
        after.optimizers[i].load_state_dict(before.optimizers[i].state_dict())
        after.versions[i].load(versions.newest, older)
    after.run(version_of, 4, 6, every=2)
    assert all(torch.equal(after.history[3][name], weight) for name, weight in whole.history[3].items())
