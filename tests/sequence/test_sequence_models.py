"""Sequence parallelism of models that weft has never seen: what works as it is, and what is refused with a reason."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attending import Lengths, NanoGPT, RotaryInside, Transformer, Wrapped, batch
from meshes import verify
from oracle import SGD, make_trainer, sequence_plan, small_gpt, token_batch
from ranks import ranks

from weft.errors import DataError, ModelError, WeftError
from weft.plan.plan import Plan

RING, ULYSSES = sequence_plan(ring=2), sequence_plan(ulysses=2)


def verified(model: torch.nn.Module, plan: Plan, *batches: Any) -> None:
    verify(model, plan, loss="cross-entropy", optimizer=SGD, batches=list(batches), device="cpu").require()


@pytest.mark.sampled(2)
@ranks(2)
@pytest.mark.parametrize("plan", [RING, ULYSSES])
@pytest.mark.parametrize("way", ["causal", "full", "imported", "three dims"])
def test_attention_is_torchs(way: str, plan: Plan) -> None:
    verified(Transformer(way), plan, batch(2, 8), batch(3, 7, 1))


@ranks(2)
@pytest.mark.parametrize("where", ["module", "table"])
def test_declared_positions(where: str) -> None:
    for plan in (RING, ULYSSES, sequence_plan(ring=2, layout="contiguous", microbatches=2)):
        verified(Transformer("causal", where), plan, batch(2, 8), batch(3, 13, 1))


@pytest.mark.long
@ranks(4)
def test_declared_positions_in_a_pipeline() -> None:
    for where in ("module", "table"):
        verified(Transformer("full", where), sequence_plan(ring=2, pipeline=2, microbatches=2), batch(3, 7))


@ranks(2)
def test_a_model_that_recomputes_by_itself() -> None:
    verified(Transformer("causal", "table", checkpoints=True), RING, batch(2, 8), batch(3, 6, 1))


@pytest.mark.long
@ranks(4)
def test_masks_of_padding_are_honoured() -> None:
    is_text = torch.arange(9) < torch.tensor([[9], [4], [1]])
    for plan in (sequence_plan(ring=2, ulysses=2), sequence_plan(ring=4), sequence_plan(ulysses=2, data=2)):
        verified(Transformer("padding"), plan, batch(3, 9, is_text=is_text))


def refused(make: Callable[[], object], *parts: str, kind: type[WeftError] = ModelError) -> None:
    with pytest.raises(kind) as caught:
        make()
    for part in parts:
        assert re.search(part, str(caught.value)), f"{part!r} is not in: {caught.value}"


@ranks(2)
@pytest.mark.parametrize(
    ("way", "where", "parts"),
    [
        ("causal", "hidden", ("ring = 2", "computes something else than the whole one", "Positions")),
        ("by hand", "none", ("computes something else than the whole one", "scaled_dot_product_attention")),
        ("causal", "shift", ("computes something else than the whole one",)),
        ("causal", "pooled", (r"\(2, 17\)", "without a dim of tokens")),
        ("dropout", "none", ("drops 0.1", "attention dropout to 0")),
        ("triangle", "none", (r"mask of \(4, 4\)", "is_causal=True")),
        ("cross", "none", ("4 queries to 3 keys", "self-attention only")),
    ],
)
def test_what_would_be_wrong_is_refused(way: str, where: str, parts: tuple[str, ...]) -> None:
    refused(lambda: make_trainer(Transformer(way, where).double(), RING, example=batch(2, 8)[0]), *parts)


@ranks(2)
def test_what_a_model_that_has_learned_nothing_hides_is_seen() -> None:
    """Its scores are near 0, so that it hardly matters which places tokens are taken to have."""
    tokens = batch(2, 64)[0]
    refused(lambda: make_trainer(RotaryInside(), RING, example=tokens), "computes something else than the whole one")
    both = {"tokens": batch(2, 256)[0], "lengths": torch.tensor([256, 200])}
    refused(lambda: make_trainer(Lengths(), RING, example=both), "computes something else than the whole one")


@ranks(2)
def test_layers_of_torchs_own() -> None:
    """They are evaluated by kernels that call no function of torch's, unless told not to."""
    alone, is_fast = Wrapped().double(), torch.backends.mha.get_fastpath_enabled()
    trainer = make_trainer(copy.deepcopy(alone), RING, example=batch(2, 8)[0])
    alone.load_state_dict(trainer.model.state_dict())
    tokens, targets = batch(3, 8, 1)
    with torch.no_grad():
        expected = float(torch.nn.functional.cross_entropy(alone(tokens).flatten(0, 1), targets.flatten()))
    assert abs(trainer.evaluate([(tokens, targets)]) - expected) < 1e-12
    assert torch.backends.mha.get_fastpath_enabled() == is_fast
    make_trainer(Wrapped(in_object=True).double(), RING, example=tokens)  # what is in an object is seen too


@pytest.mark.long
@ranks(2)
def test_no_loss_sees_padding() -> None:
    """Whatever it ignores, and whatever targets are; sequences of unequal length weigh as in one process."""

    def by_hand(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (output.mean(-1) - targets).square().mean()

    def ignoring_minus_one(output: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output, targets = output.flatten(0, 1), targets.flatten()
        lost = torch.nn.functional.cross_entropy(output, targets, ignore_index=-1, reduction="sum")
        return lost, (targets != -1).sum()

    batches = [batch(2, 7), batch(3, 5, 1), batch(1, 1, 2)]
    wide = [(tokens, targets.double() / 17) for tokens, targets in batches]
    for loss, given in ((by_hand, wide), (by_hand, batches), (ignoring_minus_one, batches)):
        for plan in (RING, sequence_plan(ulysses=2, microbatches=2)):
            verify(Transformer(), plan, loss=loss, optimizer=SGD, batches=given, device="cpu").require()


@ranks(2)
def test_a_loss_that_looks_at_several_tokens_is_refused() -> None:
    def shifting(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(output[:, :-1].flatten(0, 1), targets[:, 1:].flatten())

    def by_sequence(output: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
        each = torch.nn.functional.cross_entropy(output.mT, targets, reduction="none")
        return each.sum(1).sigmoid().sum(), len(targets)

    for loss in (shifting, by_sequence):
        trainer = make_trainer(Transformer().double(), RING, loss=loss, example=batch(2, 8)[0])
        refused(lambda trainer=trainer: trainer.step(*batch(3, 8)), "do not add up", "shift targets in the data")


@ranks(2)
def test_padding_is_nothing_a_model_has_not_seen() -> None:
    """Padding with zeros would make NaN in this model."""

    class Normed(Transformer):
        def forward(self, features: torch.Tensor) -> torch.Tensor:
            x = features / features.norm(dim=-1, keepdim=True)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    generator = torch.Generator().manual_seed(0)
    features = torch.randn(2, 7, 16, generator=generator, dtype=torch.float64)
    verified(Normed(), RING, (features, batch(2, 7)[1]))


@ranks(2)
def test_torchs_attention_is_given_back_after_an_error() -> None:
    before = torch.nn.functional.scaled_dot_product_attention
    trainer = make_trainer(Transformer().double(), RING, example=batch(2, 8)[0])
    tokens, targets = batch(2, 8)
    with pytest.raises(IndexError):
        trainer.step(tokens + 100, targets)
    assert torch.nn.functional.scaled_dot_product_attention is before
    assert float(trainer.step(tokens, targets)) > 0


@ranks(2)
def test_refusals_of_inputs_and_targets() -> None:
    refused(lambda: make_trainer(Transformer(), RING), "example=inputs", "Positions")
    trainer = make_trainer(Transformer().double(), RING, example=batch(2, 8)[0])
    tokens, targets = batch(2, 8)
    refused(lambda: trainer.step(tokens, targets[:, 0]), r"\(2,\)", "8 tokens", "target of its own", kind=DataError)
    both = {"tokens": tokens, "is_text": torch.ones(2, 8, 8, dtype=torch.bool)}
    refused(lambda: trainer.step(both, targets), r"is_text.* \(2, 8, 8\)", "nowhere else", kind=DataError)
    refused(lambda: trainer.step(tokens[0], targets[0]), "no input has a dim of tokens", kind=DataError)


@ranks(2)
def test_ranks_that_share_a_sequence_are_given_the_same_one() -> None:
    trainer = make_trainer(Transformer().double(), RING, example=batch(2, 8)[0])
    refused(
        lambda: trainer.step(*batch(2, 8, seed=trainer.mesh.world.rank)),
        "rank 1 was given another batch than rank 0",
        "trainer.data_rank",
        kind=DataError,
    )


@ranks(2)
def test_masks_of_torchs_own_layers_are_honoured() -> None:
    """They reach attention as a bias of 0 and -inf, once per head."""

    class Padded(Wrapped):
        def forward(self, tokens: torch.Tensor, is_padding: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = self.head(self.encoder(self.embedding(tokens), src_key_padding_mask=is_padding))
            return made

    is_padding = torch.arange(7) >= torch.tensor([[7], [4]])
    verified(Padded(), RING, batch(2, 7, is_padding=is_padding))


@ranks(2)
def test_inputs_in_containers_are_cut_too() -> None:
    class Weighed(Transformer):
        def forward(self, tokens: torch.Tensor, extra: dict[str, torch.Tensor]) -> torch.Tensor:
            return super().forward(tokens) * extra["weight"]

    weight = torch.rand(2, 7, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    verified(Weighed(), RING, batch(2, 7, extra={"weight": weight}))


@ranks(2)
def test_tokens_of_the_models_own_are_refused() -> None:
    class Prefixed(Transformer):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return super().forward(torch.cat((tokens[:, :1] * 0, tokens), 1))[:, 1:]

    refused(lambda: make_trainer(Prefixed().double(), RING, example=batch(2, 8)[0]), "5 tokens where this rank has 4")


@ranks(2)
def test_a_rank_with_nothing_to_count_takes_part() -> None:
    def early(output: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
        counts = targets != -100
        if not counts.any():
            return torch.zeros((), requires_grad=True), 0
        lost = torch.nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum")
        return lost, int(counts.sum())

    tokens, targets = batch(2, 8)
    targets[:, 2:6] = -100  # all that the second rank has
    verify(Transformer(), RING, loss=early, optimizer=SGD, batches=[(tokens, targets)] * 2, device="cpu").require()


@ranks(2)
def test_a_loss_that_calls_a_model_is_outside_of_the_pass() -> None:
    """Attention inside the loss would attend to this rank's tokens only, and is refused."""
    teacher, calm = Transformer("full").double(), torch.nn.Linear(1, 17).double()

    def distilled(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (output - teacher(targets)).square().mean()

    def each_token(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (output - calm(targets[..., None].double())).square().mean()

    trainer = make_trainer(Transformer().double(), RING, loss=distilled, example=batch(2, 8)[0])
    refused(lambda: trainer.step(*batch(2, 8)), "do not add up")
    calm.load_state_dict({name: torch.ones_like(value) for name, value in calm.state_dict().items()})
    calm.requires_grad_(False)
    verify(Transformer(), RING, loss=each_token, optimizer=SGD, batches=[batch(2, 8)], device="cpu").require()


@ranks(2)
@pytest.mark.parametrize("where", ["module", "table"])
def test_sequences_longer_than_the_model_knows_places_are_refused_by_all(where: str) -> None:
    trainer = make_trainer(Transformer("causal", where).double(), RING, example=batch(2, 8)[0])
    refused(lambda: trainer.step(*batch(2, 17)), "17 tokens and the model has places for 16", kind=DataError)
    gpt = make_trainer(small_gpt().double(), RING, example=token_batch(2)[0])
    refused(lambda: gpt.step(*batch(2, 9)), "9 tokens and the model has places for 8", kind=DataError)


@ranks(2)
def test_what_is_cut_can_be_viewed() -> None:
    """Many losses call .view on inputs, outputs and targets."""

    def viewing(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(output.view(-1, output.shape[-1]), targets.view(-1))

    class Viewing(Transformer):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return super().forward(tokens.view(-1).view(tokens.shape))

    for plan in (RING, ULYSSES, sequence_plan(ring=2, layout="contiguous")):
        batches = [batch(2, 8), batch(3, 7)]
        verify(Viewing(), plan, loss=viewing, optimizer=SGD, batches=batches, device="cpu").require()


@pytest.mark.long
@ranks(4)
def test_beside_tensor_parallelism_that_follows_the_models_calls() -> None:
    for plan in (sequence_plan(ring=2, tensor=2), sequence_plan(ulysses=2, tensor=2)):
        verify(NanoGPT(), plan, loss="cross-entropy", optimizer=SGD, batches=[batch(2, 8)], device="cpu").require()


@ranks(2)
def test_a_model_that_casts_by_itself_is_tried_with_patience() -> None:
    class Casting(Transformer):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(tokens).float()

    make_trainer(Casting(), RING, example=batch(2, 32)[0]).step(*batch(2, 32))


@ranks(2)
def test_blocks_left_out_at_random_are_refused() -> None:
    model = Transformer().double()
    model.layerdrop = 0.1
    refused(lambda: make_trainer(model, RING, example=batch(2, 8)[0]), "layerdrop = 0.1", "set layerdrop = 0")


@ranks(4)
def test_too_few_heads_for_ulysses() -> None:
    model = small_gpt(heads=2).double()
    refused(
        lambda: make_trainer(model, sequence_plan(ulysses=4), example=token_batch(2)[0]),
        "2 heads on this rank",
        "ulysses = 4",
        "ulysses = 2, ring = 2",
    )
