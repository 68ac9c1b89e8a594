"""All stages of a cut model in one process: gradients of the whole model, and what a rank would lack is lacking."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import small_gpt, token_batch
from pipelines import Stack, pipeline_plan, vector_batch
from torch import Tensor, nn

from weft.blueprint import find_blueprint
from weft.errors import ModelError
from weft.parallel.pipeline.all_stages import cut_copies, run_stages, run_whole
from weft.parallel.pipeline.cut_model import Outline, outline
from weft.training.data.trees import forward

CPU = torch.device("cpu")


def traced(model: nn.Module, inputs: Tensor) -> Outline:
    return outline(model, find_blueprint(model), pipeline_plan(2), inputs, call=forward, device=CPU)


@pytest.mark.parametrize(
    ("schedule", "num_ranks", "cuts"),
    [("1f1b", 2, (1,)), ("interleaved", 2, (1, 2, 3)), ("zero-bubble", 3, (1, 2)), ("2bw", 4, (1, 2, 3))],
)
def test_gradients_are_those_of_the_whole_model(schedule: str, num_ranks: int, cuts: tuple[int, ...]) -> None:
    inputs, _ = token_batch(2)
    whole = traced(small_gpt(num_layers=4, dropout=0.2).double(), inputs)
    parts = cut_copies(whole, cuts, num_ranks)

    def root(output: Any) -> Tensor:
        return output.pow(2).sum()

    expected = run_whole(whole, lambda model: model(inputs), root)
    found = run_stages(parts, CPU, schedule, lambda model: model(inputs), root)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-12, atol=1e-12, msg=name)


class Aside(Stack):
    """The model keeps a term of the loss beside its output."""

    kept: list[Tensor] = []  # noqa: RUF012

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        self.kept.clear()
        for block in self.blocks:
            x = block(x)
            self.kept.append(x.pow(2).mean())
        return self.head(x)


def test_a_loss_that_reads_values_of_other_stages_beside_the_output_is_refused() -> None:
    inputs, _ = vector_batch(2)
    parts = cut_copies(traced(Aside().double(), inputs), (2,), 2)
    with pytest.raises(ModelError, match="the loss uses a value of another stage that the model does not return"):
        run_stages(parts, CPU, "1f1b", lambda model: model(inputs), lambda output: output.sum() + sum(Aside.kept))
