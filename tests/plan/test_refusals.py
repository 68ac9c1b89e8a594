"""Refusals that take a kind of model: each is used by the code it speaks for, and speaks of fields that there are."""

import ast
import re
import string
from pathlib import Path

import pytest

import weft
from weft.plan import in_process_refusals, model_refusals
from weft.plan.fields import facts_of
from weft.plan.model_refusals import IMAGE_RULES, MODEL_REFUSALS, image_problems
from weft.plan.plan import SECTIONS, Axes, Compile, Data, Plan, Sequence, value_at
from weft.plan.rules import RULES

SOURCE = Path(weft.__file__).parent


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(axes=Axes(ring=2, ulysses=2)), "[axes] ulysses = 2 does not go with images"),
        (dict(axes=Axes(ring=2, pipeline=2)), "[axes] pipeline = 2 does not go with images"),
        (dict(axes=Axes(ring=2, tensor=2)), "[axes] tensor = 2 does not go with images"),
        (dict(sequence=Sequence(layout="contiguous")), '[sequence] layout = "contiguous" does not go with images'),
        (dict(sequence=Sequence(variant="ring-self-attention")), "in one way only; leave it out"),
        (dict(compile=Compile(blocks=True)), "[compile] blocks = true does not go with images"),
        (dict(data=Data(buffers="local")), '[data] buffers = "local" does not go with images'),
    ],
)
def test_what_does_not_go_with_images(changes, words):
    (problem,) = image_problems(Plan(**{"axes": Axes(ring=2), **changes}))
    assert words in problem
    assert not list(image_problems(Plan(axes=Axes(ring=2, data=2), data=Data(shard="parameters"))))


def test_there_is_a_plan_for_every_rule_of_images():
    plan = Plan(
        axes=Axes(ring=2, ulysses=2, pipeline=2, tensor=2),
        sequence=Sequence(layout="contiguous", variant="ring-self-attention"),
        compile=Compile(blocks=True),
        data=Data(buffers="broadcast"),
    )
    assert len(list(image_problems(plan))) == len(IMAGE_RULES)


def places_in(refusal):
    """Names in braces, fields of the plan apart."""
    named = {name for _, name, _, _ in string.Formatter().parse(f"{refusal.why}{refusal.remedy}") if name}
    return {name for name in named if "." not in name}, {name for name in named if "." in name}


NAMED = vars(model_refusals) | vars(in_process_refusals)


@pytest.mark.parametrize("name", [name for name, value in NAMED.items() if value in MODEL_REFUSALS])
def test_code_refuses_by_every_name_and_fills_in_all_of_it(name):
    """A call that left one out would only be found by somebody whose model is refused."""
    values, fields = places_in(NAMED[name])
    calls = [
        node
        for path in SOURCE.rglob("*.py")
        if name in (text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == f"{name}.message"
    ]
    assert calls
    for call in calls:
        assert {keyword.arg for keyword in call.keywords} == values, ast.unparse(call)
        assert bool(call.args) == bool(fields), ast.unparse(call)


@pytest.mark.parametrize("refusal", [*RULES, *MODEL_REFUSALS, *IMAGE_RULES], ids=lambda refusal: refusal.combination)
def test_refusals_speak_of_real_fields(refusal):
    for section, field in re.findall(r"\[(\w+)\] (\w+)", f"{refusal.combination} {refusal.why} {refusal.remedy}"):
        assert field in facts_of(SECTIONS[section])
    for path in places_in(refusal)[1]:
        assert value_at(Plan(), path) is not None
