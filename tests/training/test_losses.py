"""Losses as people write them, under plans that cut batches: right, or refused with the way out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from losses import LOSSES, WrittenLoss, targets_of
from meshes import verify
from oracle import (
    MLP,
    SGD,
    batch_of,
    cut,
    data_plan,
    make_trainer,
    pipeline_plan,
    sequence_plan,
    small_gpt,
    token_batch,
)
from ranks import gathered, ranks
from torch import Tensor, nn

from weft.errors import ModelError, VerifyError
from weft.plan.plan import Plan
from weft.training.loss.loss import Loss
from weft.training.setup.probe_loss import LossFinding, probe_loss

FIRST = (0,)
"""Cut along the samples."""


def tried(function: Any, output: Any, targets: Any) -> bool | None:
    found: LossFinding | None = probe_loss(Loss(function=function), output, targets, FIRST)
    return None if found is None else found.is_additive


# ---- the trial by itself ----


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("num_samples", [1, 6])
def test_ten_losses_people_write(name: str, num_samples: int) -> None:
    """Whatever the first batch holds: one sample, outputs that are all alike, no ignored target, a full mask."""
    loss, targets = LOSSES[name], targets_of(LOSSES[name].targets, num_samples)
    for output in (torch.zeros(num_samples, 3), torch.randn(num_samples, 3).to(torch.bfloat16)):
        assert tried(loss.function, output, targets) is loss.is_right


def test_what_targets_are_taken_for() -> None:
    """Numbers, where they are integers without −100; and a loss may leave out −100 by any test of its own."""
    output, ratings = torch.randn(4, 1), torch.tensor([1, 5, 3, 3])
    assert tried(lambda output, targets: (output[:, 0] - targets).square().mean(), output, ratings)
    for by_hand in (lambda t: t >= 0, lambda t: t != -100):

        def own(output: Tensor, targets: Tensor, keep: Any = by_hand) -> Tensor:
            return F.cross_entropy(output[keep(targets)], targets[keep(targets)])

        assert tried(own, torch.randn(4, 7), ratings)
        assert tried(own, torch.randn(4, 6, 7), torch.randint(7, (4, 6)))
    padded = torch.randint(1, 7, (4, 6))
    assert tried(lambda o, t: F.cross_entropy(o.mT, t, ignore_index=0), torch.randn(4, 6, 7), padded) is False


def test_a_loss_that_shifts_by_itself_is_found_where_targets_are_ignored() -> None:
    def shifting(output: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(output[:, :-1].flatten(0, 1), targets[:, 1:].flatten())

    output, targets = torch.randn(2, 8, 7), torch.randint(7, (2, 8))
    found = probe_loss(Loss(function=shifting), output, targets, FIRST)
    assert found is not None and found.is_additive and found.needs_all_targets
    targets[0, :3] = -100
    assert tried(shifting, output, targets) is False
    tokens, targets = token_batch(4)
    trainer = make_trainer(small_gpt(), data_plan(1, microbatches=2), loss=shifting)
    trainer.step(tokens, targets)
    targets[0, 2] = -100
    with pytest.raises(ModelError, match="a target is -100.*shift targets in the data"):
        trainer.step(tokens, targets)


def test_dicts_objects_and_losses_of_many_tokens() -> None:
    def two_heads(output: dict[str, Tensor], targets: dict[str, Tensor]) -> Tensor:
        first = F.cross_entropy(output["a"].flatten(0, 1), targets["tokens"].flatten())
        return first + 0.1 * output["balance"] + F.mse_loss(output["b"], targets["value"])

    output = {"a": torch.randn(2, 300, 50), "b": torch.randn(2), "balance": torch.tensor(0.3)}
    targets = {"tokens": torch.randint(50, (2, 300)), "value": torch.randn(2)}
    assert tried(two_heads, output, targets)
    probabilities = torch.rand(3, 4)
    assert tried(F.binary_cross_entropy, probabilities, torch.rand(3, 4))


def test_images_are_tried_by_some_of_their_rows() -> None:
    """Classes before rows: as a whole they would be too large, and an ignored class that is not there not found."""
    for size in (1, 2):
        output, targets = torch.randn(1, 1, 1, 1).expand(size, 21, 512, 512), torch.randint(21, (size, 512, 512))
        assert tried(F.cross_entropy, output, targets)
        assert tried(nn.CrossEntropyLoss(ignore_index=255), output, targets) is False


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_loss_in_16_bits_is_right_within_its_rounding(dtype: torch.dtype) -> None:
    for size in (1, 2, 6):
        output, targets = torch.randn(size, 7), torch.randn(size, 7)
        assert tried(lambda o, t: F.mse_loss(o.to(dtype), t.to(dtype)), output, targets)
        assert tried(lambda o, t: F.mse_loss(o.to(dtype), t.to(dtype), reduction="sum"), output, targets) is False


def test_a_compiled_loss_is_tried_as_it_is_written() -> None:
    compiled = []

    def note(graph: Any, _: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    loss = torch.compile(lambda o, t: F.cross_entropy(o, t, ignore_index=9), backend=note)
    assert tried(loss, torch.randn(4, 7), torch.randint(7, (4,))) is False and not compiled
    loss(torch.randn(4, 7), torch.randint(7, (4,)))
    assert compiled


def test_a_trial_leaves_no_trace() -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("center", torch.zeros(4))
            self.latest: Tensor | None = None
            self.seen: list[float] = [0.5]

        def forward(self, output: Tensor, targets: Tensor) -> Tensor:
            self.center.mul_(0.9).add_(output.detach().float().mean(0))
            self.latest = output
            self.seen.append(float(output.mean()))
            return F.cross_entropy(output, targets)

    loss, state = Centred(), torch.get_rng_state()
    seen: list[int] = []
    assert tried(loss, *batch_of(4)) and loss.seen == [0.5]
    assert tried(lambda output, targets: seen.append(1) or F.cross_entropy(output, targets), *batch_of(4)) and not seen
    assert not loss.center.any() and loss.latest is None and torch.equal(torch.get_rng_state(), state)


def test_a_loss_that_draws_is_not_judged() -> None:
    def noisy(output: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(output + torch.randn_like(output), targets)

    assert tried(noisy, *batch_of(4)) is None


# ---- under plans ----


def check(loss: WrittenLoss, plan: Plan, model: nn.Module, batches: list[Any]) -> None:
    """It equals one process, or is refused before anything is trained; on all ranks alike."""

    def run() -> str:
        try:
            verify(model, plan, loss=loss.function, optimizer=SGD, batches=batches, device="cpu").require()
        except ModelError as error:
            return str(error)
        return "right"

    said = run()
    everywhere = gathered(said) if plan.axes.num_ranks > 1 else [said]
    assert set(everywhere) == {said}
    assert said == "right" if loss.is_right else "return (sum, count)" in said


def uneven(loss: WrittenLoss) -> list[Any]:
    """Two batches that neither ranks nor microbatches divide."""
    sizes = (5, 3)
    return [(batch_of(size, seed=size)[0], targets_of(loss.targets, size, seed=size)) for size in sizes]


@pytest.mark.parametrize("name", LOSSES)
def test_microbatches_on_one_rank(name: str) -> None:
    check(LOSSES[name], data_plan(1, microbatches=2), MLP(), uneven(LOSSES[name]))


@pytest.mark.long
@ranks(2)
def test_uneven_data_ranks() -> None:
    for name in ("cross-entropy", "(sum, count)", "mean squared error", "class weights", "mask divided by its sum"):
        check(LOSSES[name], data_plan(2), MLP(), uneven(LOSSES[name]))


@ranks(2)
@pytest.mark.long
def test_uneven_data_ranks_with_every_loss() -> None:
    for loss in LOSSES.values():
        check(loss, data_plan(2), MLP(), uneven(loss))


@ranks(2)
def test_zero_3() -> None:
    for name in ("(sum, count)", "class weights", "contrastive by place"):
        check(LOSSES[name], data_plan(2, shard="parameters"), MLP(), uneven(LOSSES[name]))


def of_tokens(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def ignoring_minus_one(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets.flatten(), ignore_index=-1)


@ranks(2)
@pytest.mark.parametrize("kind", ["pipeline", pytest.param("flush-free", marks=pytest.mark.long), "ring"])
def test_stages_and_shared_sequences(kind: str) -> None:
    plan = {
        "pipeline": pipeline_plan(2, microbatches=3),
        "flush-free": pipeline_plan(2, schedule="2bw", microbatches=2),
        "ring": sequence_plan(ring=2),
    }[kind]
    batches = [token_batch(5), token_batch(4, seed=1)]
    check(WrittenLoss(function=ignoring_minus_one, is_right=False), plan, small_gpt(), batches)
    batches[0][1][1, 3:] = -100
    check(WrittenLoss(function=of_tokens, is_right=True), plan, small_gpt(), batches)


def test_a_plan_that_cuts_nothing_takes_any_loss() -> None:
    trainer = make_trainer(MLP().float(), data_plan(1), loss=LOSSES["class weights"].function)
    inputs, targets = batch_of(4)
    expected = LOSSES["class weights"].function(trainer.model(inputs.float()), targets).item()
    assert float(trainer.step(inputs.float(), targets)) == pytest.approx(expected)


@ranks(2)
def test_a_rank_without_samples_refuses_too() -> None:
    trainer = make_trainer(MLP(), data_plan(2), loss=LOSSES["contrastive"].function)
    with pytest.raises(ModelError, match="gather_batch"):
        trainer.step(*cut(batch_of(3), (0, 3))[trainer.data_rank])
    trainer = make_trainer(MLP(), data_plan(2), loss=LOSSES["contrastive"].function)
    with pytest.raises(ModelError, match="gather_batch"):
        trainer.evaluate([cut(batch_of(5), (2, 3))[trainer.data_rank]])


@ranks(2)
def test_what_fails_on_one_rank_is_told_by_all() -> None:
    def picky(output: Tensor, targets: Tensor) -> Tensor:
        if len(output) != 3:
            raise RuntimeError("not this one")
        return F.cross_entropy(output, targets)

    trainer = make_trainer(MLP(), data_plan(2), loss=picky)
    with pytest.raises(ModelError, match="failed on rank 1 .*not this one.*gather_batch"):
        trainer.step(*cut(batch_of(5), (3, 2))[trainer.data_rank])
    trainer = make_trainer(MLP(), data_plan(2), loss=picky)
    with pytest.raises(RuntimeError, match="not this one"):  # all of them: the user's own error
        trainer.step(*cut(batch_of(4), (2, 2))[trainer.data_rank])


def test_nothing_is_tried_after_the_first_step() -> None:
    calls = []

    def counted(output: Tensor, targets: Tensor) -> Tensor:
        calls.append(len(output))
        return F.cross_entropy(output, targets)

    trainer = make_trainer(MLP(), data_plan(1, microbatches=2), loss=counted)
    trainer.step(*batch_of(6))
    calls.clear()
    trainer.step(*batch_of(6))
    assert calls == [3, 3]


def test_verify_computes_the_loss_of_the_whole_batch_too() -> None:
    """A loss that no trial can judge: one process computes it on the same microbatches as the plan."""

    def rigid(output: Tensor, targets: Tensor) -> Tensor:
        assert len(output) in (4, 8)
        return LOSSES["contrastive"].function(output, targets)

    def run(loss: Any) -> None:
        plan = data_plan(1, microbatches=2)
        verify(MLP(), plan, loss=loss, optimizer=SGD, batches=[batch_of(8)], device="cpu").require()

    with pytest.raises(
        VerifyError, match=r"loss of the whole batch.*Likely cause: the loss is no mean.*\(sum, count\)"
    ):
        run(rigid)
    run(F.cross_entropy)


@ranks(2)
def test_verify_names_the_loss() -> None:
    def rigid(output: Tensor, targets: Tensor) -> Tensor:
        assert len(output) in (4, 8)
        return LOSSES["contrastive"].function(output, targets)

    outcome = verify(MLP(), data_plan(2), loss=rigid, optimizer=SGD, batches=[batch_of(8)], device="cpu")
    assert outcome.first is not None and "or the loss is no mean over its targets" in outcome.first.cause.text


def test_verify_takes_losses_that_hold_or_cast_to_float32() -> None:
    table = torch.rand(3)
    teacher = nn.Linear(3, 3)

    def casting(output: Tensor, targets: Tensor) -> Tensor:
        scores = output.float() @ table.diag() + teacher(output)
        return F.cross_entropy(scores.log_softmax(-1, dtype=torch.float32), targets)

    plan = data_plan(1, microbatches=2)
    verify(MLP(), plan, loss=casting, optimizer=SGD, batches=[batch_of(5)], device="cpu").require()


def test_labels_that_nobody_shifted_are_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    tokens, targets = token_batch(4)
    trainer = make_trainer(small_gpt(), data_plan(1))
    labels = tokens.clone()
    labels[0, :4] = -100
    for _ in range(2):
        trainer.step(tokens, labels)
    assert [record.message for record in caplog.records if "the targets are the inputs" in record.message]
    assert len(caplog.records) == 1
    caplog.clear()
    make_trainer(small_gpt(), data_plan(1)).step(tokens, targets)
    make_trainer(small_gpt(), data_plan(1), loss=of_tokens).step(tokens, labels)  # it may shift by itself
    assert not caplog.records
