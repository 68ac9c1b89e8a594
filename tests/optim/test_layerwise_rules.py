"""LARS and LAMB on whole tensors: the published rules as loops, what leaves a step unchanged, what is refused."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from weft.errors import JobError
from weft.optim.lamb import LAMB
from weft.optim.lars import LARS
from weft.optim.schedule import warmup_polynomial

SHAPES = ((4, 6), (6,), (3, 2, 2), ())
NUM_STEPS = 4


def drawn(seed: int, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [scale * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def run(
    make: Callable[..., torch.optim.Optimizer], gradients: list[list[Tensor]], settings: Mapping[int, Any] | None = None
) -> list[list[Tensor]]:
    """The weights after every step; `settings` of a tensor, by number."""
    weights = [nn.Parameter(one) for one in drawn(0)]
    groups = [{"params": [weight], **(settings or {}).get(number, {})} for number, weight in enumerate(weights)]
    optimizer = make(groups if settings else weights)
    seen = []
    for step in gradients:
        for weight, gradient in zip(weights, step, strict=True):
            weight.grad = gradient.clone()
        optimizer.step()
        seen.append([weight.detach().clone() for weight in weights])
    return seen


def assert_close(found: list[list[Tensor]], true: list[list[Tensor]], tolerance: float = 1e-13) -> None:
    for one, other in zip(found, true, strict=True):
        for mine, theirs in zip(one, other, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


def ratio_of(numerator: float, denominator: float) -> float:
    return numerator / denominator if numerator > 0 and denominator > 0 else 1.0


def lamb_by_hand(gradients: list[list[Tensor]], *, lr: float, decay: float, most: float = math.inf) -> Any:
    beta1, beta2, eps = 0.9, 0.999, 1e-6
    seen: list[list[Tensor]] = [[] for _ in gradients]
    for number, w in enumerate(drawn(0)):
        m = v = torch.zeros_like(w)
        for step, every in enumerate(gradients, start=1):
            g = every[number]
            m = beta1 * m + (1 - beta1) * g
            v = beta2 * v + (1 - beta2) * g * g
            r = (m / (1 - beta1**step)) / ((v / (1 - beta2**step)).sqrt() + eps) + decay * w
            w = w - lr * ratio_of(min(float(w.norm()), most), float(r.norm())) * r
            seen[step - 1].append(w)
    return seen


def lars_by_hand(gradients: list[list[Tensor]], *, lr: float, mu: float, decay: float, trust: float) -> Any:
    seen: list[list[Tensor]] = [[] for _ in gradients]
    for number, w in enumerate(drawn(0)):
        v = torch.zeros_like(w)
        for step, every in enumerate(gradients):
            g = every[number]
            size = float(w.norm())
            local = trust * ratio_of(size, float(g.norm()) + decay * size) if float(g.norm()) > 0 else 1.0
            v = mu * v + lr * local * (g + decay * w)
            w = w - v
            seen[step].append(w)
    return seen


def normalised_by_hand(gradients: list[list[Tensor]], *, lr: float, mu: float, decay: float) -> Any:
    seen: list[list[Tensor]] = [[] for _ in gradients]
    for number, w in enumerate(drawn(0)):
        m = torch.zeros_like(w)
        for step, every in enumerate(gradients):
            m = mu * m + (1 - mu) * (every[number] + decay * w)
            w = w - lr * ratio_of(float(w.norm()), float(m.norm())) * m
            seen[step].append(w)
    return seen


GRADIENTS = [drawn(seed) for seed in range(1, NUM_STEPS + 1)]


def test_lamb_is_its_rule() -> None:
    found = run(functools.partial(LAMB, lr=0.1, weight_decay=0.02), GRADIENTS)
    assert_close(found, lamb_by_hand(GRADIENTS, lr=0.1, decay=0.02))
    clamped = run(functools.partial(LAMB, lr=0.1, weight_decay=0.02, clamp=(0.0, 1.5)), GRADIENTS)
    assert_close(clamped, lamb_by_hand(GRADIENTS, lr=0.1, decay=0.02, most=1.5))
    assert not torch.equal(found[0][0], clamped[0][0])


def test_lars_is_its_rule_in_both_variants() -> None:
    found = run(functools.partial(LARS, lr=2.0, weight_decay=0.02, trust=0.05), GRADIENTS)
    assert_close(found, lars_by_hand(GRADIENTS, lr=2.0, mu=0.9, decay=0.02, trust=0.05))
    usual = run(functools.partial(LARS, lr=2.0), GRADIENTS)
    assert_close(usual, lars_by_hand(GRADIENTS, lr=2.0, mu=0.9, decay=0.0, trust=0.001))
    other = run(functools.partial(LARS, lr=0.1, weight_decay=0.02, variant="normalised-momentum"), GRADIENTS)
    assert_close(other, normalised_by_hand(GRADIENTS, lr=0.1, mu=0.9, decay=0.02))


INVARIANT = {
    "lars": functools.partial(LARS, lr=1.0, momentum=0.0),
    "lars, normalised momentum": functools.partial(LARS, lr=0.1, variant="normalised-momentum"),
    "lamb": functools.partial(LAMB, lr=0.1, eps=1e-30, weight_decay=0.1),
}


@pytest.mark.parametrize("name", INVARIANT)
@pytest.mark.parametrize("factor", [1e-6, 1e6])
def test_the_size_of_a_tensors_gradient_does_not_matter(name: str, factor: float) -> None:
    larger = [[factor * step[0], *step[1:]] for step in GRADIENTS]
    assert_close(run(INVARIANT[name], larger), run(INVARIANT[name], GRADIENTS), 1e-10)


@pytest.mark.parametrize(("name", "setting"), [("lars", {"weight_decay": 0.1}), ("lamb", {"eps": 0.1})])
def test_what_breaks_that(name: str, setting: dict[str, float]) -> None:
    """So the test above can fail."""
    make = functools.partial(INVARIANT[name], **setting)
    larger = [[100 * step[0], *step[1:]] for step in GRADIENTS]
    assert (run(make, larger)[0][0] - run(make, GRADIENTS)[0][0]).abs().max() > 1e-6


KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "lamb": functools.partial(LAMB, lr=0.1, weight_decay=0.0),
    "lars": functools.partial(LARS, lr=0.1),
    "lars, normalised momentum": functools.partial(LARS, lr=0.1, variant="normalised-momentum"),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_norm_of_zero_makes_the_ratio_one(name: str) -> None:
    start, gradient = torch.ones(3, dtype=torch.float64), torch.full((3,), 2.0, dtype=torch.float64)
    for weight, by in ((0 * start, gradient), (start, 0 * gradient)):
        parameters = [nn.Parameter(weight.clone()) for _ in range(2)]
        for parameter in parameters:
            parameter.grad = by.clone()
        # The same as a tensor that is not adapted.
        KINDS[name]([{"params": parameters[:1]}, {"params": parameters[1:], "adapt": False}]).step()
        assert torch.equal(parameters[0], parameters[1])
        assert parameters[0].isfinite().all()


def test_biases_and_norms_are_left_alone_where_asked() -> None:
    excluded = {number: weft.optim.exclude_one_dim("", shape) for number, shape in enumerate(SHAPES)}
    assert [bool(one) for one in excluded.values()] == [False, True, False, True]
    found = run(functools.partial(LAMB, lr=0.1, weight_decay=0.02), GRADIENTS, excluded)
    adam = run(functools.partial(torch.optim.AdamW, lr=0.1, eps=1e-6, weight_decay=0.0), GRADIENTS)
    usual = lamb_by_hand(GRADIENTS, lr=0.1, decay=0.02)
    for mine, whole, plain in zip(found, usual, adam, strict=True):
        for number, shape in enumerate(SHAPES):
            torch.testing.assert_close(mine[number], (plain if len(shape) < 2 else whole)[number])


@pytest.mark.parametrize("name", KINDS)
def test_state_is_saved_and_a_parameter_may_be_unused(name: str) -> None:
    weights = [nn.Parameter(one) for one in drawn(0)]
    optimizer = KINDS[name](weights)

    def step(seed: int, without: int | None, optimizer: torch.optim.Optimizer, weights: list[nn.Parameter]) -> None:
        for number, (weight, gradient) in enumerate(zip(weights, drawn(seed), strict=True)):
            weight.grad = None if number == without else gradient
        optimizer.step()

    step(1, 0, optimizer, weights)
    assert torch.equal(weights[0], drawn(0)[0]) and weights[0] not in optimizer.state
    step(2, None, optimizer, weights)
    if name == "lamb":
        assert [int(optimizer.state[weight]["step"]) for weight in weights] == [1, 2, 2, 2]
    kept = {key for state in optimizer.state.values() for key, value in state.items() if value.shape == (4, 6)}
    assert kept == set(getattr(optimizer, "state_names"))  # noqa: B009
    copies = [nn.Parameter(weight.detach().clone()) for weight in weights]
    resumed = KINDS[name](copies)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for seed, without in ((3, 2), (4, None)):
        step(seed, without, optimizer, weights)
        step(seed, without, resumed, copies)
    assert all(torch.equal(one, other) for one, other in zip(weights, copies, strict=True))


def test_loaded_state_lies_in_memory_as_its_weight() -> None:
    """Kernels go through both in the order of memory, and a checkpoint's tensors are laid out otherwise."""
    weight = nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
    optimizer = LAMB([weight])
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    kept = copy.deepcopy(optimizer.state_dict())
    for name in optimizer.state_names:
        kept["state"][0][name] = kept["state"][0][name].contiguous()
    optimizer.load_state_dict(kept)
    for name in optimizer.state_names:
        assert optimizer.state[weight][name].stride() == weight.stride()
        assert torch.equal(optimizer.state[weight][name], kept["state"][0][name])


def test_bfloat16_has_norms_in_float32() -> None:
    """A sum of squares in 8 bits would stop growing at 256 equal terms."""
    weight = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    LARS([weight], lr=1.0, trust=0.25, momentum=0.0).step()
    assert torch.equal(weight, torch.full_like(weight, 0.75))


def test_a_closure_and_a_schedule() -> None:
    weight = nn.Parameter(torch.ones(3, 2))
    optimizer = LAMB([weight], lr=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    factor = warmup_polynomial(2, 50)
    losses = []
    for step in range(50):
        optimizer.param_groups[0]["lr"] = 0.1 * factor(step)
        losses.append(optimizer.step(closure).item())
    assert losses[-1] < 0.1 * losses[0]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: LARS([nn.Parameter(torch.ones(1))], variant="2018"),
            'no variant "2018"; known: scaled-grad',
        ),
        (lambda: LARS([nn.Parameter(torch.ones(1))], clamp=(0, 1)), "clamp = .* has no effect in the variant"),
        (lambda: LARS([nn.Parameter(torch.ones(1))], momentum=1.0), "momentum is 1.0; give a number from 0 to below 1"),
        (lambda: LARS([nn.Parameter(torch.ones(1))], lr=-1.0, trust="x"), "lr is -1.0(.|\n)*trust is 'x'"),
        (lambda: LAMB([nn.Parameter(torch.ones(1))], betas=(0.9, 1.0)), r"betas is \(0.9, 1.0\); give two numbers"),
        (lambda: LAMB([nn.Parameter(torch.ones(1))], clamp=(2.0, 1.0)), "clamp is .*; give the least and the largest"),
        (lambda: LAMB([nn.Parameter(torch.ones(1))], lr=True), "lr is True"),
    ],
)
def test_bad_settings(make: Callable[[], object], words: str) -> None:
    with pytest.raises(JobError, match=words):
        make()


def test_they_are_public() -> None:
    assert weft.optim.LAMB is LAMB and weft.optim.LARS is LARS
    assert weft.optim.batch_scaling("linear", global_batch=512, base_batch=256) == 2.0
    with pytest.raises(AttributeError, match="no attribute 'LAMP'"):
        weft.optim.LAMP  # noqa: B018
