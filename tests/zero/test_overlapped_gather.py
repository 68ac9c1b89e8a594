"""ZeRO-1 and 2 gather beside the next step: whoever reads a weight first waits for it, and nobody reads an old one."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch._dynamo  # before ranks are forked
from listed_weights import ListedWeights
from oracle import (
    ADAMW,
    batch_of,
    cut_evenly,
    data_plan,
    make_trainer,
    pipeline_plan,
    small_gpt,
    token_batch,
    train_alone,
)
from ranks import ranks
from strict_plans import weft_over_strict
from torch import Tensor, nn

from weft.errors import NotFiniteError
from weft.parallel.zero.flat_parameters import FlatParameters
from weft.training.trainer import Trainer

STAGES = ("optimizer", "gradients")
SMALL = 2000
"""Bytes of a bucket, so that every block has several."""


class Late:
    """A gather of which nothing but NaN is seen before it is waited for."""

    def __init__(self, flat: FlatParameters) -> None:
        self.names = flat.names
        self._flat, self._gathered = flat, flat.whole.clone()
        first, last = flat.flat.part(flat.group.index)
        flat.whole[:first] = flat.whole[last:] = torch.nan
        self.is_over = False

    def wait(self) -> None:
        self._flat.whole.copy_(self._gathered)
        self.is_over = True


@contextmanager
def late_gathers() -> Iterator[list[Late]]:
    """Context in which gathers after an update are seen late; yields all of them in the order of their starts."""
    started: list[Late] = []
    start = FlatParameters.start_refresh

    def start_late(flat: FlatParameters) -> Late:
        start(flat).wait()
        started.append(Late(flat))
        return started[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FlatParameters, "start_refresh", start_late)
        yield started


def step(trainer: Trainer, number: int) -> float:
    return float(trainer.step(*cut_evenly(token_batch(8, seed=number), trainer.data_size)[trainer.data_rank]))


def on_their_way(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if type(parameter) is not nn.Parameter]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return ADAMW(model.parameters())


def saved_and_read(what: object) -> Any:
    file = io.BytesIO()
    torch.save(what, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@torch.inference_mode()
def in_inference(parameter: nn.Parameter) -> Tensor:
    return parameter + 0.0


READERS: dict[str, Callable[[nn.Module, nn.Parameter, str], Tensor]] = {
    "attribute": lambda model, parameter, name: parameter.data,
    "operator": lambda model, parameter, name: parameter * 1.0,
    "member of a list": lambda model, parameter, name: torch._foreach_mul([parameter], 1.0)[0],
    "dispatcher": lambda model, parameter, name: torch.ops.aten.mul.Scalar(parameter, 1.0),
    "numpy": lambda model, parameter, name: torch.from_numpy(parameter.detach().numpy()),
    "state_dict": lambda model, parameter, name: model.state_dict()[name],
    "copy of the model": lambda model, parameter, name: copy.deepcopy(model).get_parameter(name),
    "file": lambda model, parameter, name: saved_and_read(parameter),
    "file of the model": lambda model, parameter, name: saved_and_read(model).get_parameter(name),
    "inference mode": lambda model, parameter, name: in_inference(parameter),
}


@pytest.mark.sampled(1)
@ranks(2)
@pytest.mark.parametrize("shard", STAGES)
def test_every_way_to_read_a_weight_between_steps_sees_the_update(shard: str) -> None:
    model = small_gpt().double()
    alone = copy.deepcopy(model)
    held = dict(model.named_parameters())
    trainer = make_trainer(model, data_plan(2, shard=shard, bucket_bytes=SMALL), optimizer=ADAMW)
    seen = train_alone(alone, [token_batch(8, seed=number) for number in range(len(READERS))], optimizer=adamw)
    with late_gathers():
        for number, (expected, (how, read)) in enumerate(zip(seen, READERS.items(), strict=True)):
            assert step(trainer, number) == pytest.approx(expected.loss, rel=1e-12)
            assert on_their_way(model) == list(held)
            for name, parameter in held.items():
                found = read(model, parameter, name)
                assert type(parameter) is nn.Parameter and type(found) in (Tensor, nn.Parameter), how
                torch.testing.assert_close(found.detach(), expected.weights[name], rtol=1e-10, atol=1e-12)
            del found  # memory that somebody refers to would be waited for at once


@ranks(2)
def test_weights_in_a_list_are_gathered_before_the_model_is_called() -> None:
    """Functions of the user's own take a parameter as it is: torch does not ask its class."""
    model = ListedWeights()
    expected = train_alone(copy.deepcopy(model), [batch_of(4, seed) for seed in range(3)])
    trainer = make_trainer(model, data_plan(2, shard="optimizer", bucket_bytes=SMALL))
    with late_gathers():
        for seed, one in enumerate(expected):
            part = cut_evenly(batch_of(4, seed), trainer.data_size)[trainer.data_rank]
            assert float(trainer.step(*part)) == pytest.approx(one.loss, rel=1e-10)


@ranks(2)
def test_memory_that_somebody_refers_to_is_waited_for_at_once() -> None:
    model = small_gpt().double()
    trainer = make_trainer(model, data_plan(2, shard="optimizer", bucket_bytes=SMALL), optimizer=ADAMW)
    step(trainer, 0)
    kept, others = model.blocks[0].mlp.up.weight.data, model.blocks[1].mlp.up.weight
    with late_gathers():
        step(trainer, 1)
        assert type(model.blocks[0].mlp.up.weight) is nn.Parameter and type(others) is not nn.Parameter
        assert torch.isfinite(kept).all() and kept.data_ptr() == model.blocks[0].mlp.up.weight.data_ptr()
        del kept
        step(trainer, 2)
        assert type(model.blocks[0].mlp.up.weight) is not nn.Parameter


@ranks(2)
def test_a_kept_storage_and_a_gradient_that_is_set() -> None:
    """The one can be read without a use of the parameter; the other must fit it."""
    model = small_gpt().double()
    trainer = make_trainer(model, data_plan(2, shard="optimizer", bucket_bytes=SMALL), optimizer=ADAMW)
    weight, other = model.blocks[0].mlp.up.weight, model.blocks[1].mlp.up.weight
    shape, kept = weight.shape, weight.untyped_storage()
    with late_gathers():
        step(trainer, 0)
        assert type(weight) is nn.Parameter and type(other) is not nn.Parameter
        other.grad = None
        assert type(other) is not nn.Parameter
        other.grad = torch.ones(shape, dtype=torch.float64)
        assert type(other) is nn.Parameter
        del kept
        step(trainer, 1)
        assert type(weight) is not nn.Parameter


@ranks(2)
def test_a_block_waits_for_its_own_weights_only() -> None:
    model = small_gpt(num_layers=3).double()
    trainer = make_trainer(model, data_plan(2, shard="optimizer", bucket_bytes=SMALL), optimizer=ADAMW)
    waiting: dict[str, list[str]] = {}
    for name in ("embedding", "blocks.0", "blocks.1", "blocks.2", "head"):
        model.get_submodule(name).register_forward_pre_hook(
            lambda module, args, name=name: waiting.update({name: on_their_way(model)})
        )
    with late_gathers() as gathers:
        step(trainer, 0)
        assert list(waiting.values()) == [[]] * 5 and not any(gather.is_over for gather in gathers)
        started = [name for late in gathers for name in late.names]
        step(trainer, 1)
    for number in range(3):
        here = waiting[f"blocks.{number}"]
        assert not any(name.startswith(tuple(f"blocks.{n}." for n in range(number + 1))) for name in here)
        assert number == 2 or any(name.startswith(f"blocks.{number + 1}.") for name in here)
    assert waiting["head"] == []
    assert started == [name for name, _ in model.named_parameters()], "gathers start in the order of use"


@ranks(2)
def test_a_rank_without_samples_and_a_skipped_update() -> None:
    """The first reads no weight in its step; the second gathers nothing."""
    model = small_gpt().double()
    trainer = make_trainer(model, data_plan(2, shard="gradients", clip_norm=1.0, bucket_bytes=SMALL), optimizer=ADAMW)
    alone = copy.deepcopy(model)
    batches = [token_batch(4, seed=number) for number in range(3)]
    seen = train_alone(alone, batches, optimizer=adamw, clip_norm=1.0)
    empty = tuple(tensor[:0] for tensor in batches[0])
    with late_gathers() as gathers:
        for batch, expected in zip(batches, seen, strict=True):
            loss = trainer.step(*(batch if trainer.data_rank == 0 else empty))
            assert float(loss) == pytest.approx(expected.loss, rel=1e-12)
        trainer.check_divergence()
        assert on_their_way(model) == []
        num_gathers = len(gathers)
        model.head.weight.data[0, 0] = torch.inf
        with pytest.raises(NotFiniteError, match="weights"):
            trainer.step(*batches[0])
        assert trainer.num_skipped == 1 and len(gathers) == num_gathers and on_their_way(model) == []


@ranks(4)
def test_stages_of_a_pipeline_wait_too() -> None:
    model = small_gpt(num_layers=4).double()
    alone = copy.deepcopy(model)
    plan = pipeline_plan(2, data=2, microbatches=2, shard="optimizer", bucket_bytes=SMALL)
    trainer = make_trainer(model, plan, optimizer=ADAMW, example=token_batch(2)[0])
    seen = train_alone(alone, [token_batch(8, seed=number) for number in range(3)], optimizer=adamw)
    with late_gathers():
        for number, expected in enumerate(seen):
            assert step(trainer, number) == pytest.approx(expected.loss, rel=1e-12)
            assert on_their_way(trainer.named_model)
        for name, parameter in trainer.named_model.named_parameters():
            torch.testing.assert_close(parameter.detach(), seen[-1].weights[name], rtol=1e-10, atol=1e-12)


@pytest.mark.long
@pytest.mark.sampled(1)
@ranks(2)
@pytest.mark.parametrize("how", ["as a whole", "in place"])
def test_a_compiled_model_is_compiled_once(how: str) -> None:
    """What is compiled must not see parameters of another class, or it would be compiled again and again."""
    model, num_compiled = small_gpt().double(), 0

    def count(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        nonlocal num_compiled
        num_compiled += 1
        return graph.forward

    torch._dynamo.reset()
    called: Any = torch.compile(model, backend=count) if how == "as a whole" else model
    if how == "in place":
        model.compile(backend=count)
    trainer = make_trainer(called, data_plan(2, shard="optimizer"), optimizer=ADAMW)
    with late_gathers() as gathers:
        step(trainer, 0)
        assert (on_their_way(model) == []) == (how == "in place")
        for number in (1, 2):
            step(trainer, number)
    assert num_compiled == 1 and len(gathers) == 3 * len(trainer.sync.flats)


@ranks(2)
def test_over_a_transport_that_shows_nothing_before_a_wait() -> None:
    """The stand-in for NCCL: with the real gathers, of which several are under way at once."""
    with weft_over_strict():
        model = small_gpt().double()
        alone = copy.deepcopy(model)
        batches = [token_batch(8, seed=number) for number in range(4)]
        plan = data_plan(2, shard="optimizer", bucket_bytes=SMALL)
        with make_trainer(model, plan, optimizer=ADAMW, mesh=None) as trainer:
            for number, expected in enumerate(train_alone(alone, batches, optimizer=adamw)):
                assert step(trainer, number) == pytest.approx(expected.loss, rel=1e-12)
                assert len(on_their_way(model)) == len(list(model.parameters()))
                if number % 2:
                    saved = {name: model.state_dict()[name] for name in expected.weights}
                    torch.testing.assert_close(saved, expected.weights, rtol=1e-10, atol=1e-12)
                    del saved
        assert on_their_way(model) == []
