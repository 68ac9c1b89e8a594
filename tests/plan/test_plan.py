"""The plan's fields: defaults, bounds, and refusal of everything else, with all problems at once."""

import copy
import dataclasses
import math
import pickle

import pytest

from weft.errors import PlanError
from weft.plan.fields import (
    Choice,
    Flag,
    Increasing,
    Permutation,
    Real,
    Section,
    Whole,
    accept_values,
    facts_of,
    section_name,
)
from weft.plan.plan import AXES, SECTIONS, Axes, Codec, Data, Pipeline, Plan, Precision, Step

EVERY_FIELD = [(section, facts) for section in SECTIONS.values() for facts in facts_of(section).values()]
FIELD_IDS = [f"{section_name(section)}.{facts.name}" for section, facts in EVERY_FIELD]

# The whole format, written out once more by hand: a changed default or order must be meant.
DEFAULTS = {
    "axes": dict(data=1, replicate=1, pipeline=1, tensor=1, ulysses=1, ring=1, order=AXES),
    "step": dict(microbatches=1, clip_norm=0.0),
    "pipeline": dict(schedule="1f1b", chunks=1, cuts=(), vertical_sync=False),
    "tensor": dict(sequence=False),
    "sequence": dict(layout="zigzag", variant="ring"),
    "data": dict(
        sync="all-reduce",
        shard="nothing",
        reshard="step",
        offload=False,
        every=1,
        switch_step=0,
        outer="average",
        outer_lr=1.0,
        outer_momentum=0.0,
        fragments=1,
        delay=0,
        mix=0.0,
        balance=False,
        buffers="synchronise",
        check_every=100,
    ),
    "server": dict(mode="sync", shards=1, staleness=0, backups=0, compensation=0.0, lr_scaling="none", pull="master"),
    "codec": dict(
        name="none",
        density=0.01,
        bits=32,
        rank=4,
        levels=256,
        memory=1.0,
        clip=0.0,
        masking=True,
        warmup_steps=0,
        dense_below=1024,
    ),
    "average": dict(decay=0.0, start=0),
    "precision": dict(compute="model", reduce="fp32", accumulate="fp32", loss_scale="dynamic"),
    "recompute": dict(policy="none"),
    "compile": dict(blocks=False),
    "comm": dict(transport="auto", bucket_bytes=26214400, timeout_s=0.0),
}


def bad_values(kind):
    """Values that a field of this kind must refuse: wrong types for all, then its own bounds."""
    wrong_types = {
        Whole: [True, 1.0, "1", None, [1], {}],
        Real: [True, "0.5", None, [0.5], math.nan, math.inf, -math.inf, 10**400],
        Flag: [0, 1, "true", None, []],
        Choice: [0, True, None, ["none"], "", "no such value"],
        Permutation: ["data", None, 3, [1, 2], []],
        Increasing: [1, "1", None, [1.0], [True], ["1"], [0], [-1], [2, 2], [3, 2]],
    }[type(kind)]
    if isinstance(kind, Whole):
        return [*wrong_types, kind.minimum - 1, -(10**30), 2**63, "Auto"]
    if isinstance(kind, Real):
        beyond = {"minimum": -1e-9, "above": 0.0, "maximum": 1e-9, "below": 0.0}
        return [*wrong_types, *(getattr(kind, at) + by for at, by in beyond.items() if getattr(kind, at) is not None)]
    return wrong_types


def test_the_default_plan_is_the_documented_one():
    plan = Plan()
    assert {name: dataclasses.asdict(getattr(plan, name)) for name in SECTIONS} == DEFAULTS
    assert {name: list(facts_of(section)) for name, section in SECTIONS.items()} == {
        name: list(fields) for name, fields in DEFAULTS.items()
    }
    assert list(SECTIONS) == list(DEFAULTS)


def test_the_default_plan_is_one_rank():
    assert Plan().axes.num_ranks == 1
    assert Plan(axes=Axes(data=2)).axes.num_ranks == 2


def test_section_names_are_the_plan_fields():
    assert [section_name(section) for section in SECTIONS.values()] == list(SECTIONS)


@pytest.mark.parametrize(("section", "facts"), EVERY_FIELD, ids=FIELD_IDS)
def test_every_field_accepts_its_default_and_says_what_it_is(section, facts):
    assert facts.kind.accept(facts.default) == facts.default
    assert type(facts.kind.accept(facts.default)) is type(facts.default)
    assert facts.doc.endswith(".") and "|" not in facts.doc + facts.kind.allowed
    assert section.__doc__.endswith(".")


@pytest.mark.parametrize(("section", "facts"), EVERY_FIELD, ids=FIELD_IDS)
def test_every_field_refuses_bad_values(section, facts):
    for value in bad_values(facts.kind):
        with pytest.raises(PlanError) as refusal:
            section(**{facts.name: value})
        assert len(refusal.value.problems) == 1, value
        assert refusal.value.problems[0].startswith(f"[{section_name(section)}] {facts.name} = "), value
        assert accept_values(section, {facts.name: value})[1] == list(refusal.value.problems)


def test_bounds_that_belong_to_the_range_are_accepted():
    assert Codec(density=1).density == 1.0
    assert Data(outer_momentum=0, delay="auto", check_every=0) == Data(outer_momentum=0.0, delay="auto", check_every=0)
    assert (Codec(levels=4).levels, Codec(bits=2).bits) == (4, 2)
    with pytest.raises(PlanError, match=r"^\[codec\] bits = 4 must be 2, 8 or 32"):
        Codec(bits=4)
    assert Precision(reduce="fp16", accumulate="fp16").accumulate == "fp16"
    assert [Precision(loss_scale=scale).loss_scale for scale in ("dynamic", 0, 1024)] == ["dynamic", 0, 1024]
    with pytest.raises(PlanError, match=r"^\[precision\] loss_scale = 0.5 must be a whole number, at least 0, or "):
        Precision(loss_scale=0.5)


def test_a_whole_number_is_a_number():
    clip_norm = Step(clip_norm=1).clip_norm
    assert clip_norm == 1.0 and isinstance(clip_norm, float)


def test_lists_become_tuples():
    assert Pipeline(cuts=[2, 5]).cuts == (2, 5)
    order = ["tensor", "data", "pipeline", "replicate", "ring", "ulysses"]
    assert Axes(order=order).order == tuple(order)
    assert hash(Axes(order=order)) == hash(Axes(order=tuple(order)))


def test_a_misspelt_choice_gets_the_nearest_one():
    with pytest.raises(
        PlanError, match=r'^\[data\] sync = "allreduce" is not a known value; did you mean "all-reduce"'
    ):
        Data(sync="allreduce")


@pytest.mark.parametrize(
    ("order", "hint"),
    [
        (["data"], "add pipeline, replicate, ring, ulysses, tensor"),
        ([*AXES, "data"], "repeated: data"),
        ([*AXES[:-1], "tensors"], 'names "tensors", which is not known; did you mean "tensor"?'),
    ],
)
def test_a_bad_order_says_what_is_wrong_with_it(order, hint):
    with pytest.raises(PlanError) as refusal:
        Axes(order=order)
    assert str(refusal.value).endswith(hint)


def test_all_problems_of_a_section_come_at_once():
    with pytest.raises(PlanError) as refusal:
        Data(sync="ring", every=0, delay=-1, offload="yes", outer_lr=math.nan)
    assert [problem.split(" =")[0] for problem in refusal.value.problems] == [
        "[data] sync",
        "[data] offload",
        "[data] every",
        "[data] outer_lr",
        "[data] delay",
    ]


def test_unknown_fields_are_named_and_where_they_belong():
    problems = accept_values(Pipeline, {"schedul": "gpipe", "microbatches": 4, "chunks": 0, "cuts": [1]}, SECTIONS)[1]
    assert problems == [
        '[pipeline] schedul = "gpipe" is not a field of [pipeline]; did you mean "schedule"?',
        "[pipeline] microbatches = 4 is not a field of [pipeline]; it belongs in [step]",
        "[pipeline] chunks = 0 must be a whole number, at least 1",
    ]


def test_a_monstrous_value_is_cut_short():
    for value in ["x" * 10_000, 16**5000, list(range(1000))]:
        assert len(accept_values(Step, {"microbatches": value})[1][0]) < 200


def test_a_section_of_the_wrong_class_is_refused():
    with pytest.raises(PlanError) as refusal:
        Plan(axes={"data": 2}, step=Codec())
    assert refusal.value.problems == (
        "[axes] must be given as Axes(...), not as dict",
        "[step] must be given as Step(...), not as Codec",
    )


def test_sizes_follow_the_order():
    order = ("data", "tensor", "ring", "ulysses", "pipeline", "replicate")
    axes = Axes(data=2, tensor=3, pipeline=5, order=order)
    assert list(axes.sizes.items()) == [
        ("data", 2),
        ("tensor", 3),
        ("ring", 1),
        ("ulysses", 1),
        ("pipeline", 5),
        ("replicate", 1),
    ]
    assert axes.num_ranks == 30


def test_a_plan_is_a_frozen_value():
    plan = Plan(axes=Axes(data=2))
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.axes.data = 4
    assert not hasattr(plan.axes, "__dict__")
    assert pickle.loads(pickle.dumps(plan)) == copy.deepcopy(plan) == plan
    assert hash(plan) == hash(Plan(axes=Axes(data=2)))
    with pytest.raises(PlanError):
        dataclasses.replace(plan.axes, data=0)


def test_every_section_is_positional_free():
    for section in SECTIONS.values():
        assert issubclass(section, Section)
        with pytest.raises(TypeError):
            section(1)
