"""Where models of several shapes may be cut."""

from __future__ import annotations

import pytest
from oracle import small_convnet, small_gpt
from torch import nn

from weft.blueprint import Blueprint, find_blueprint, find_tied
from weft.errors import ModelError


def linears(number: int) -> list[nn.Linear]:
    return [nn.Linear(2, 2) for _ in range(number)]


def test_a_gpt() -> None:
    found = find_blueprint(small_gpt(num_layers=3))
    assert found.prelude == ("embedding", "rotary", "dropout")
    assert found.blocks == ("blocks.0", "blocks.1", "blocks.2")
    assert found.postlude == ("norm", "head")
    assert found.tied == (("embedding.weight", "head.weight"),)
    assert find_blueprint(small_gpt(tied=False)).tied == ()


def test_a_convnet() -> None:
    found = find_blueprint(small_convnet())
    assert (found.prelude, found.blocks) == (("stem", "stem_norm"), ("blocks.0", "blocks.1"))
    assert found.postlude == ("head",)


def test_a_sequential_is_its_own_list() -> None:
    assert find_blueprint(nn.Sequential(*linears(3))) == Blueprint(blocks=("0", "1", "2"))


def test_blocks_inside_a_module_have_neighbours_on_every_level() -> None:
    """The shape of Hugging Face's GPT-2: embeddings and final norm are beside the list, the head one level up."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte, self.wpe = nn.Embedding(3, 2), nn.Embedding(3, 2)
            self.h = nn.ModuleList(linears(4))
            self.ln_f = nn.LayerNorm(2)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.transformer, self.lm_head = nn.Identity(), Inner(), nn.Linear(2, 3)

    found = find_blueprint(Outer())
    assert found.prelude == ("before", "transformer.wte", "transformer.wpe")
    assert found.blocks == tuple(f"transformer.h.{number}" for number in range(4))
    assert found.postlude == ("transformer.ln_f", "lm_head")


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(2, 2),
        nn.Sequential(nn.Linear(2, 2)),  # one block cannot be cut
        nn.Sequential(nn.Linear(2, 2), nn.Tanh()),  # not of one class
        nn.Sequential(nn.Tanh(), nn.Tanh()),  # nothing to train
        nn.Module(),
    ],
)
def test_a_model_that_cannot_be_cut(model: nn.Module) -> None:
    assert find_blueprint(model) == Blueprint()


def test_the_longest_list_wins_and_the_first_of_equals() -> None:
    model = nn.Module()
    model.a, model.b, model.c = nn.ModuleList(linears(2)), nn.ModuleList(linears(3)), nn.ModuleList(linears(3))
    assert find_blueprint(model).blocks == ("b.0", "b.1", "b.2")


def test_every_name_of_a_tied_parameter() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "c": nn.Linear(2, 2, bias=False)})
    model["b"].weight = model["c"].weight = model["a"].weight
    model["b"].bias = model["a"].bias
    assert find_tied(model) == (("a.weight", "b.weight", "c.weight"), ("a.bias", "b.bias"))


class Declared(nn.Module):
    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__()
        self.first, self.layers, self.last = nn.Linear(2, 2), nn.ModuleList(linears(2)), nn.Linear(2, 2)
        self.last.weight = self.first.weight
        self.blueprint = blueprint

    def weft_blueprint(self) -> Blueprint:
        return self.blueprint


def test_a_model_may_declare_its_own() -> None:
    declared = Blueprint(prelude=("last",), blocks=("layers.1", "layers.0"), postlude=("first",))
    found = find_blueprint(Declared(declared))
    assert (found.prelude, found.blocks, found.postlude) == (declared.prelude, declared.blocks, declared.postlude)
    assert found.tied == (("first.weight", "last.weight"),), "ties are found, not declared"


def test_a_declared_name_that_is_no_module_is_refused() -> None:
    with pytest.raises(ModelError) as caught:
        find_blueprint(Declared(Blueprint(prelude=("frist",), blocks=("layers.0", "layers.2"))))
    assert [problem.split('"')[1] for problem in caught.value.problems] == ["frist", "layers.2"]
