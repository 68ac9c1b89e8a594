"""Mistakes of a first day: each is refused in words that say what to give instead, and all of them at once."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import SGD
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import weft
from weft.errors import DataError, ModelError, PlanError, WeftError
from weft.plan.plan import Axes, Data, Plan
from weft.training.data.trees import stack_samples

X, Y = torch.ones(4, 3), torch.tensor([0, 1, 0, 1])


def parallelize(model: Any = None, plan: Any = None, **others: Any) -> weft.Trainer:
    given = {"loss": "cross-entropy", "optimizer": SGD, **others}
    return weft.parallelize(nn.Linear(3, 2) if model is None else model, plan or Plan(), **given)


def test_a_path_is_a_plan_too(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text('[axes]\ndata = "all"\n[step]\nmicrobatches = 2\n')
    for path in (tmp_path / "plan.toml", str(tmp_path / "plan.toml")):
        with parallelize(plan=path) as trainer:
            assert trainer.plan == Plan(step=trainer.plan.step) and trainer.plan.step.microbatches == 2
    with pytest.raises(PlanError, match=r"nowhere.toml: cannot be read"):
        parallelize(plan="nowhere.toml")
    with pytest.raises(PlanError, match="the plan is a dict; give a weft.Plan, or the path of a plan file"):
        parallelize(plan={"axes": {}})


def test_an_optimizer_that_is_made_already() -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(ModelError) as caught:
        parallelize(model, optimizer=torch.optim.AdamW(model.parameters(), lr=3e-4))
    assert str(caught.value) == (
        "the optimizer is an AdamW that was already made, for the whole model's parameters, and weft makes one for "
        "each rank's part of them; give what makes it: functools.partial(torch.optim.AdamW, lr=0.0003)"
    )
    with pytest.raises(ModelError, match="the optimizer is a str; give a function that makes one"):
        parallelize(model, optimizer="adamw")


def test_problems_of_model_plan_loss_and_optimizer_come_together() -> None:
    frozen = nn.Linear(3, 2).requires_grad_(False)
    with pytest.raises(WeftError) as caught:
        parallelize(frozen, Plan(axes=Axes(data=3)), loss="cross-entropie", optimizer=3)
    found = caught.value.problems
    assert len(found) == 4
    words = ("every one is frozen", "the optimizer is an int", "data 3 = 3 ranks, 1 is running", "unknown loss")
    assert [word for word, problem in zip(words, found, strict=True) if word not in problem] == []
    with pytest.raises(PlanError):  # of its own kind, if there is one kind
        parallelize(plan=Plan(axes=Axes(data=3)))
    with pytest.raises(WeftError) as caught:
        muon = functools.partial(torch.optim.Adafactor, lr=0.1)
        parallelize(frozen, Plan(axes=Axes(data=1), data=Data(shard="optimizer")), optimizer=muon)
    assert ["frozen" in caught.value.problems[0], "needs whole tensors" in caught.value.problems[1]] == [True, True]


def test_a_model_class_instead_of_a_model() -> None:
    with pytest.raises(ModelError, match=r"the model is a type \(a class: call it first\); give an nn.Module"):
        parallelize(nn.Linear)


class Returning(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(3, 2), kind

    def forward(self, inputs: torch.Tensor) -> Any:
        logits = self.layer(inputs)
        if self.kind == "tuple":
            return logits, logits.mean()
        return {"logits": logits, "aux": logits.mean()} if self.kind == "dict" else logits[0, 0]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("tuple", "a tuple of 2 (a tensor of (4, 2), a tensor of ())"),
        ("dict", "a dict of logits (a tensor of (4, 2)) and aux (a tensor of ())"),
        ("scalar", "a tensor of ()"),
    ],
)
def test_a_model_that_returns_more_than_logits(kind: str, words: str) -> None:
    with parallelize(Returning(kind)) as trainer, pytest.raises(ModelError) as caught:
        trainer.step(X, Y)
    assert f'the model returns {words}, and loss="cross-entropy" takes logits alone' in str(caught.value)
    assert "loss=lambda output, targets: F.cross_entropy(" in str(caught.value)
    own = {"tuple": lambda output, targets: F.cross_entropy(output[0], targets)}.get(kind)
    if own is not None:
        with parallelize(Returning(kind), loss=own) as trainer:
            assert trainer.step(X, Y).isfinite()


def test_a_data_loader_given_to_batches() -> None:
    with parallelize() as trainer:
        loader = DataLoader(TensorDataset(X, Y), batch_size=2)
        with pytest.raises(DataError, match=r"weft.batches\(loader.dataset, trainer, global_batch=2\)"):
            weft.batches(loader, trainer, global_batch=2)
        assert len(list(weft.batches(loader.dataset, trainer, global_batch=2))) == 2


def test_lists_of_a_tokenizer() -> None:
    """As samples of a dataset they are taken; as a batch they are refused."""
    sample = {"input_ids": [5, 6, 7], "weights": [0.5, 1.0]}
    stacked = stack_samples([sample, sample])
    assert stacked["input_ids"].tolist() == [[5, 6, 7]] * 2 and stacked["input_ids"].dtype == torch.int64
    assert stacked["weights"].dtype == torch.float32 and stacked["weights"].shape == (2, 2)
    with pytest.raises(DataError, match="lists of 3 and 2 numbers; pad or crop them to one length"):
        stack_samples([sample, {**sample, "input_ids": [5, 6]}])
    with parallelize() as trainer, pytest.raises(DataError) as caught:
        trainer.step({"input_ids": [[5, 6, 7], [8, 9, 1]]}, torch.tensor([1, 0]))
    assert str(caught.value) == (
        "inputs['input_ids'] is a list of lists of numbers, as a tokenizer returns it; give a tensor: "
        'tokenizer(..., padding=True, return_tensors="pt"), or torch.tensor(...)'
    )
