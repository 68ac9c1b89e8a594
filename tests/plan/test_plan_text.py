"""plan.toml: exact round trip, all problems of a text at once, whole files or none, and the reference page."""

import os
import random
import tomllib
from pathlib import Path

import pytest
from reference import reference

from weft.errors import PlanError
from weft.plan.fields import Choice, Flag, Increasing, Permutation, Real, Whole, facts_of
from weft.plan.plan import SECTIONS, Axes, Codec, Data, Pipeline, Plan, Step
from weft.plan.text import format_plan, parse_plan, read_plan, write_plan

ROOT = Path(__file__).parents[2]


def draw(kind, rng):
    """A random value of a kind, made from nothing but its declaration."""
    match kind:
        case Whole(among=numbers) if numbers:
            return rng.choice(numbers)
        case Whole():
            numbers = [kind.minimum, rng.randint(kind.minimum, 9), rng.randint(kind.minimum, 2**63 - 1)]
            return rng.choice([*numbers, *kind.words])
        case Real():
            low = next(bound for bound in (kind.minimum, kind.above, 0.0) if bound is not None)
            high = next((bound for bound in (kind.maximum, kind.below) if bound is not None), None)
            share = 1 - rng.random()  # in (0, 1]
            return (
                low + (high - low) * share * 0.999 if high is not None else low + share * 10 ** rng.uniform(-300, 300)
            )
        case Flag():
            return rng.random() < 0.5
        case Choice():
            return rng.choice(kind.values)
        case Permutation():
            return tuple(rng.sample(kind.values, len(kind.values)))
        case Increasing():
            return tuple(sorted(rng.sample(range(kind.minimum, 100), rng.randint(0, 5))))


def random_plan(rng):
    sections = {}
    for name, section in SECTIONS.items():
        values = {facts.name: draw(facts.kind, rng) for facts in facts_of(section).values() if rng.random() < 0.6}
        sections[name] = section(**values)
    return Plan(**sections)


@pytest.mark.parametrize("seed", range(200))
def test_every_plan_survives_the_round_trip(seed):
    plan = random_plan(random.Random(seed))
    text = format_plan(plan)
    assert parse_plan(text) == plan
    assert format_plan(parse_plan(text)) == text


def test_only_what_differs_is_written():
    assert format_plan(Plan()) == "[axes]\ndata = 1\n"
    plan = Plan(
        axes=Axes(data=2, pipeline=3),
        pipeline=Pipeline(cuts=(2, 5), vertical_sync=True),
        data=Data(delay="auto"),
        codec=Codec(density=1e-5),
    )
    assert format_plan(plan) == (
        "[axes]\ndata = 2\npipeline = 3\n\n"
        "[pipeline]\ncuts = [2, 5]\nvertical_sync = true\n\n"
        '[data]\ndelay = "auto"\n\n'
        "[codec]\ndensity = 1e-05\n"
    )


@pytest.mark.parametrize("text", ["", "# nothing\n", "[axes]\n", "[axes]\ndata = 1\n[server]\n"])
def test_a_text_that_changes_nothing_is_the_default_plan(text):
    assert parse_plan(text) == Plan()


def test_whole_numbers_may_stand_for_numbers():
    assert parse_plan("[step]\nclip_norm = 1").step == Step(clip_norm=1.0)


def test_all_problems_of_a_text_come_at_once():
    text = """
    clip_norm = 1.0
    colour = "red"
    step = 3
    [axis]
    data = 2
    [axes]
    data = 0
    tensors = 2
    [data]
    sync = "allreduce"
    density = 0.5
    delay = "soon"
    [[codec]]
    name = "topk"
    """
    with pytest.raises(PlanError) as refusal:
        parse_plan(text, source="my.toml")
    assert refusal.value.problems == (
        "my.toml: clip_norm = 1.0 stands outside any section; put it under [step]",
        'my.toml: colour = "red" stands outside any section; put each field under its section',
        "my.toml: step must be a section: write [step], and its fields on the lines below",
        'my.toml: [axis] is not a section of a plan; did you mean "axes"?',
        'my.toml: [axes] data = 0 must be a whole number, at least 1, or "all"',
        'my.toml: [axes] tensors = 2 is not a field of [axes]; did you mean "tensor"?',
        'my.toml: [data] sync = "allreduce" is not a known value; did you mean "all-reduce"?',
        "my.toml: [data] density = 0.5 is not a field of [data]; it belongs in [codec]",
        'my.toml: [data] delay = "soon" must be a whole number, at least 0, or "auto"',
        "my.toml: codec must be a section: write [codec], and its fields on the lines below",
    )


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "true", '"1"', "1979-05-27", "[1.0]", "{ a = 1 }"])
def test_what_toml_can_say_and_a_plan_cannot(value):
    with pytest.raises(PlanError, match=r"^plan: \[step\] clip_norm = "):
        parse_plan(f"[step]\nclip_norm = {value}")


def test_invalid_toml_is_located():
    with pytest.raises(PlanError, match=r"^plan: is not valid TOML: .*line 2, column 6"):
        parse_plan("[axes]\ndata 2\n")
    with pytest.raises(PlanError, match="is not valid TOML"):
        parse_plan("[axes]\ndata = 2\ndata = 3\n")


@pytest.mark.parametrize("text", ["a = " + "[" * 100_000, f"a = {'9' * 5000}"], ids=["nesting", "digits"])
def test_endless_text_is_refused_like_any_other(text):
    with pytest.raises(PlanError, match="is not valid TOML"):
        parse_plan(text)


def test_files_round_trip(tmp_path):
    plan = random_plan(random.Random(7))
    path = tmp_path / "plan.toml"
    write_plan(Plan(), path)
    write_plan(plan, str(path))
    assert read_plan(path) == read_plan(str(path)) == plan
    assert os.listdir(tmp_path) == ["plan.toml"]


def test_an_interrupted_write_leaves_the_old_plan(tmp_path, monkeypatch):
    path = tmp_path / "plan.toml"
    write_plan(Plan(axes=Axes(data=2)), path)

    def full_disk(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.raises(PlanError, match="plan.toml: cannot be written: No space left on device"):
        write_plan(Plan(axes=Axes(data=4)), path)
    assert read_plan(path).axes.data == 2
    assert os.listdir(tmp_path) == ["plan.toml"]


def test_a_missing_folder_cannot_be_written_to(tmp_path):
    with pytest.raises(PlanError, match="cannot be written: No such file"):
        write_plan(Plan(), tmp_path / "nowhere" / "plan.toml")


def test_unreadable_files(tmp_path):
    with pytest.raises(PlanError, match="absent.toml: cannot be read: No such file"):
        read_plan(tmp_path / "absent.toml")
    with pytest.raises(PlanError, match="cannot be read: Is a directory"):
        read_plan(tmp_path)
    latin = tmp_path / "latin.toml"
    latin.write_bytes(b"[axes]\n# caf\xe9\n")
    with pytest.raises(PlanError, match="latin.toml: byte 12 is not UTF-8"):
        read_plan(latin)


def test_a_byte_order_mark_is_no_problem(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_bytes(b"\xef\xbb\xbf[axes]\r\ndata = 2\r\n")
    assert read_plan(path) == Plan(axes=Axes(data=2))


def test_problems_name_the_file(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text("[axes]\ndata = -1\n")
    with pytest.raises(PlanError) as refusal:
        read_plan(path)
    assert str(refusal.value) == f'{path}: [axes] data = -1 must be a whole number, at least 1, or "all"'


def test_the_reference_page_is_the_generated_one():
    page = (ROOT / "docs" / "plan-format.md").read_text(encoding="utf-8")
    assert page == reference(), "run: python docs/reference.py plan > docs/plan-format.md"


def test_the_reference_page_has_every_field_and_its_default():
    for section in SECTIONS.values():
        for facts in facts_of(section).values():
            rows = [line for line in reference().splitlines() if line.startswith(f"| `{facts.name}` | ")]
            assert any(facts.doc in row for row in rows)
    example = reference().split("```toml\n")[1].split("```")[0]
    assert parse_plan(example) == Plan(axes=Axes(data=2))
    assert tomllib.loads(example) == {"axes": {"data": 2}}
