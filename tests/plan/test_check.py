"""Why a plan cannot run: each table and rule, and all problems at once."""

from pathlib import Path

import pytest

from weft.errors import PlanError
from weft.plan import check as check_file
from weft.plan.all_ranks import with_ranks
from weft.plan.check import check, require
from weft.plan.fields import facts_of
from weft.plan.plan import (
    AXES,
    CODECS,
    SECTIONS,
    Average,
    Axes,
    Codec,
    Comm,
    Compile,
    Data,
    Plan,
    Precision,
    Sequence,
    Server,
    Step,
    said,
    value_at,
)
from weft.plan.text import format_plan, parse_plan, read_plan

EXAMPLES = Path(__file__).parents[2] / "examples" / "plans"
PATHS = {f"{name}.{field}" for name, section in SECTIONS.items() for field in facts_of(section)}


def test_the_default_plan_can_run():
    assert check(Plan(), num_ranks=1, optimizer="AdamW", global_batch=1, local_batch_statistics=True) == []
    require(check(Plan(), num_ranks=1))


@pytest.mark.parametrize(
    "plan",
    [
        Plan(axes=Axes(data=8, order=AXES[::-1])),
        Plan(step=Step(microbatches=3, clip_norm=1.0)),
        Plan(data=Data(buffers="broadcast", check_every=0)),
        Plan(data=Data(buffers="local", check_every=1)),
        Plan(axes=Axes(data=2), data=Data(shard="optimizer")),
        Plan(axes=Axes(data=2, replicate=2), data=Data(shard="gradients", offload=True)),
        Plan(step=Step(microbatches=2), data=Data(shard="parameters", reshard="microbatch")),
        Plan(data=Data(offload=True)),
        Plan(precision=Precision(compute="bf16", reduce="bf16", accumulate="bf16")),
        Plan(precision=Precision(compute="fp16", reduce="fp16", accumulate="fp16", loss_scale=1024)),
        Plan(compile=Compile(blocks=True)),
        Plan(comm=Comm(transport="c10d", bucket_bytes=1)),
        Plan(comm=Comm(transport="shared")),
        Plan(axes=Axes(data=4), step=Step(microbatches=2), data=Data(balance=True)),
        Plan(
            axes=Axes(ring=2, ulysses=2, data=2), sequence=Sequence(layout="contiguous", variant="ring-self-attention")
        ),
        Plan(axes=Axes(data=2), data=Data(sync="local")),
        Plan(data=Data(sync="local", every=3)),  # one replica
        Plan(axes=Axes(data=4), data=Data(sync="local", every=8, switch_step=9), codec=Codec(name="half")),
        Plan(
            axes=Axes(replicate=2, data=2, pipeline=2),
            data=Data(sync="local", shard="optimizer", every=8, outer="nesterov", outer_lr=0.7, outer_momentum=0.9),
            precision=Precision(reduce="bf16"),
        ),
        Plan(data=Data(sync="local", outer="nesterov", switch_step=9)),
        Plan(axes=Axes(data=2), data=Data(sync="server")),
        Plan(axes=Axes(data=2, tensor=2), data=Data(sync="server"), server=Server(mode="bounded", staleness=3)),
        Plan(axes=Axes(data=2), data=Data(sync="server"), server=Server(mode="async"), codec=Codec(name="onebit")),
    ],
)
def test_plans_that_can_run(plan):
    assert check(plan, num_ranks=plan.axes.num_ranks, global_batch=24, optimizer="SGD") == []


def test_tables_speak_of_real_fields_and_values():
    for path, switch in check_file._SWITCHES:
        section, name = switch.path.split(".")
        assert path in PATHS
        least = switch.at_least if switch.above is None else switch.above + 0.5
        for value in switch.values or (least,):
            assert switch.is_on(facts_of(SECTIONS[section])[name].kind.accept(value))


def other_value(path):
    """An allowed value of the field that is not its default, from its declaration alone."""
    section, name = path.split(".")
    facts = facts_of(SECTIONS[section])[name]
    for value in (*getattr(facts.kind, "values", ()), not facts.default, 1, 2, 4, 0.5, (1,)):
        try:
            accepted = facts.kind.accept(value)
        except ValueError:
            continue
        if accepted != facts.default:
            return accepted
    raise AssertionError(path)


def plan_with(*paths):
    """A plan in which each of the fields has the value given, or any other than its default."""
    values = {}
    for path, value in paths:
        section, name = path.split(".")
        values.setdefault(section, {})[name] = value
    return Plan(**{section: SECTIONS[section](**fields) for section, fields in values.items()})


@pytest.mark.parametrize("path", sorted({path for path, _ in check_file._SWITCHES} - {"data.offload"}))
def test_a_field_without_effect_is_refused(path):
    problems = check(plan_with((path, other_value(path))))
    assert len(problems) == 1
    assert " has no effect with [" in problems[0] and "; leave it out" in problems[0]
    assert problems[0].startswith(said(plan_with((path, other_value(path))), path))


@pytest.mark.parametrize("path", sorted({path for path, _ in check_file._SWITCHES}))
def test_a_field_has_an_effect_once_all_its_switches_are_on(path):
    wanted = [(path, other_value(path))]
    for name, switch in check_file._SWITCHES:
        if name == path:
            wanted.append((switch.path, switch.values[0] if switch.values else 4 if switch.above is None else 0.5))
    problems = check(plan_with(*wanted))
    assert not [problem for problem in problems if "has no effect" in problem]


def test_advice_names_what_would_give_a_field_an_effect():
    every, layout = Plan(data=Data(every=8)), Plan(sequence=Sequence(layout="contiguous"))
    assert check(every) == [
        '[data] every = 8 has no effect with [data] sync = "all-reduce"; leave it out, or set [data] sync to "local" '
        'or "delayed"'
    ]
    assert check(layout)[0].endswith("; leave it out, or set [axes] ring to 2 or more")


def test_a_start_without_an_average_has_no_effect():
    message = (
        "[average] start = 9 has no effect with [average] decay = 0.0; leave it out, or set [average] decay above 0"
    )
    assert check(Plan(average=Average(start=9))) == [message]
    assert check(Plan(average=Average(start=9, decay=0.5))) == []


def test_reshard_without_zero_3_has_no_effect():
    assert check(Plan(data=Data(reshard="microbatch"))) == [
        '[data] reshard = "microbatch" has no effect with [data] shard = "nothing"; leave it out, or set [data] shard '
        'to "parameters"'
    ]


def test_replicas_of_nothing_sharded_belong_on_the_data_axis():
    assert check(Plan(axes=Axes(data=2, replicate=2)), num_ranks=4) == [
        '[axes] replicate = 2 has no effect with [data] shard = "nothing"; leave it out and put its ranks on [axes] '
        'data, or set [data] shard to "optimizer", "gradients" or "parameters"'
    ]
    assert check(Plan(axes=Axes(data=4)), num_ranks=4) == []


@pytest.mark.parametrize("compute", ["model", "bf16"])
def test_only_an_fp16_loss_is_scaled(compute):
    assert check(Plan(precision=Precision(compute=compute, loss_scale=1024))) == [
        f'[precision] loss_scale = 1024 has no effect with [precision] compute = "{compute}"; leave it out, or set '
        '[precision] compute to "fp16"'
    ]
    assert check(Plan(precision=Precision(compute=compute, loss_scale="dynamic"))) == []


def test_every_codec_but_none_and_half_warms_up():
    for name in CODECS:
        sync = "local" if name == "half" else "all-reduce"
        problems = check(Plan(data=Data(sync=sync), codec=Codec(name=name, warmup_steps=5)))
        assert len(problems) == (name == "half")
    assert len(check(Plan(codec=Codec(warmup_steps=5)))) == 1


def test_an_outer_rate_needs_nesterov():
    assert check(Plan(data=Data(sync="local", every=2, outer_lr=0.7, outer_momentum=0.9))) == [
        f'[data] {name} has no effect with [data] outer = "average"; leave it out, or set [data] outer to "nesterov"'
        for name in ("outer_lr = 0.7", "outer_momentum = 0.9")
    ]


def test_a_switch_step_needs_something_to_switch_to():
    assert check(Plan(data=Data(sync="local", switch_step=5))) == [
        "[data] switch_step = 5 has no effect with [data] every = 1; leave it out, or set [data] every to 2 or more, "
        'or set [data] outer to "nesterov"'
    ]
    assert check(Plan(data=Data(sync="local", switch_step=5, every=2))) == []
    assert check(Plan(data=Data(sync="local", switch_step=5, outer="nesterov"))) == []


def test_steps_between_exchanges_are_at_least_one():
    with pytest.raises(PlanError) as refusal:
        Data(sync="local", every=0)
    assert list(refusal.value.problems) == [
        "[data] every = 0 must be a whole number, at least 1; 1 exchanges after every step"
    ]


@pytest.mark.parametrize(
    ("axes", "shard", "num_ranks", "problem"),
    [
        (
            Axes(data=2, pipeline=2, tensor=2),
            "nothing",
            6,
            "a replica takes pipeline 2 × tensor 2 = 4 ranks, and 6 are not a multiple of that, so one replica would "
            "be smaller than the others; start 8, or another multiple of 4 with [axes] data set to the number of "
            "replicas",
        ),
        (
            Axes(data="all", tensor=2),
            "nothing",
            3,
            "a replica takes tensor 2 ranks, and 3 are not a multiple of that, so one replica would be smaller than "
            "the others; start 2 or another multiple of 2",
        ),
        (
            Axes(data=2, replicate=2, tensor=2),
            "parameters",
            6,
            "a replica takes data 2 × tensor 2 = 4 ranks, and 6 are not a multiple of that, so one replica would be "
            "smaller than the others; start 8, or another multiple of 4 with [axes] replicate set to the number of "
            "replicas",
        ),
        (
            Axes(data=2, tensor=2),
            "nothing",
            8,
            "the axes need data 2 × tensor 2 = 4 ranks, 8 are running; set [axes] data = 4, or start 4",
        ),
    ],
)
def test_a_replica_of_another_size(axes, shard, num_ranks, problem):
    assert check(Plan(axes=axes, data=Data(sync="local", shard=shard)), num_ranks=num_ranks) == [problem]


@pytest.mark.parametrize(
    ("axes", "num_ranks", "problem"),
    [
        (
            Axes(data=2, tensor=2),
            2,
            "the axes need data 2 × tensor 2 = 4 ranks, 2 are running; set [axes] data = 1, or start 4",
        ),
        (Axes(data=4), 1, "the axes need data 4 = 4 ranks, 1 is running; set [axes] data = 1, or start 4"),
        (Axes(), 3, "the axes need data 1 = 1 rank, 3 are running; set [axes] data = 3, or start 1"),
        (
            Axes(data=2, pipeline=3),
            8,
            'the axes need pipeline 3 × data 2 = 6 ranks, 8 are running; start 6, or set [axes] data = "all" and start '
            "any multiple of 3",
        ),
    ],
)
def test_the_number_of_ranks(axes, num_ranks, problem):
    assert check(Plan(axes=axes), num_ranks=num_ranks) == [problem]
    assert check(Plan(axes=axes), num_ranks=axes.num_ranks) == []


@pytest.mark.parametrize(
    ("axes", "num_ranks", "problem"),
    [
        (
            Axes(data=2, replicate=3),
            4,
            "the axes need replicate 3 × data 2 = 6 ranks, 4 are running; 4 is not a multiple of replicate 3; set "
            "[axes] replicate = 2 and data = 2, or start 6",
        ),
        (
            Axes(data=2, replicate=2),
            8,
            "the axes need replicate 2 × data 2 = 4 ranks, 8 are running; set [axes] data = 4, or start 4",
        ),
        (
            Axes(data=2, replicate=2),
            5,
            "the axes need replicate 2 × data 2 = 4 ranks, 5 are running; 5 is not a multiple of replicate 2; set "
            "[axes] replicate = 1 and data = 5, or start 4",
        ),
        (
            Axes(data=2, replicate=4, tensor=2),
            12,
            "the axes need replicate 4 × data 2 × tensor 2 = 16 ranks, 12 are running; 12 is not a multiple of "
            "replicate 4 × tensor 2 = 8; set [axes] replicate = 3 and data = 2, or start 16",
        ),
        (
            Axes(data=2, replicate=2, tensor=2),
            5,
            "the axes need replicate 2 × data 2 × tensor 2 = 8 ranks, 5 are running; start 8, or set [axes] data = "
            '"all" and start any multiple of 4',
        ),
    ],
)
def test_replicas_that_do_not_divide_the_ranks(axes, num_ranks, problem):
    plan = Plan(axes=axes, data=Data(shard="optimizer"))
    assert check(plan, num_ranks=num_ranks) == [problem]
    assert check(plan, num_ranks=axes.num_ranks) == []


def test_the_advice_on_replicas_works():
    for wished in range(2, 7):
        for num_ranks in range(1, 25):
            wanted = Plan(axes=Axes(data=50, replicate=wished), data=Data(shard="parameters"))
            (problem,) = check(wanted, num_ranks=num_ranks)
            numbers = [
                int(word.split(",")[0].split(" ")[0]) for word in problem.split("set [axes] ")[1].split(" = ")[1:]
            ]
            replicate, data = numbers if len(numbers) == 2 else (wished, *numbers)
            axes = Axes(data=data, replicate=replicate)
            assert replicate <= wished
            assert check(Plan(axes=axes, data=Data(shard="parameters")), num_ranks=num_ranks) == []


def test_the_advice_on_ranks_works():
    for others in range(1, 6):
        for num_ranks in range(1, 20):
            (problem,) = check(Plan(axes=Axes(data=50, tensor=others)), num_ranks=num_ranks)
            if num_ranks % others == 0:
                data = int(problem.split("[axes] data = ")[1].split(",")[0])
                assert check(Plan(axes=Axes(data=data, tensor=others)), num_ranks=num_ranks) == []
            else:
                most = int(problem.split("multiple of ")[1])
                plan = Plan(axes=Axes(data="all", tensor=others))
                assert all(check(plan, num_ranks=started) == [] for started in (most, 2 * most, 3 * most))


def test_all_ranks_are_those_the_other_axes_leave() -> None:
    plan = parse_plan('[axes]\ndata = "all"\npipeline = 2\ntensor = 2\n')
    assert parse_plan(format_plan(plan)) == plan and 'data = "all"' in format_plan(plan)
    assert [with_ranks(plan, num_ranks).axes.data for num_ranks in (4, 8, 12)] == [1, 2, 3]
    assert with_ranks(Plan(axes=Axes(data=3)), 8) == Plan(axes=Axes(data=3))
    assert check(plan) == check(plan, global_batch=1) == check(plan, num_ranks=8, global_batch=2) == []
    assert check(plan, num_ranks=6) == [
        '[axes] data = "all" takes the ranks that the other axes leave, and 6 are not a multiple of pipeline 2 × '
        "tensor 2 = 4; start 4 or another multiple of 4"
    ]
    (problem,) = check(plan, num_ranks=8, global_batch=1)
    assert "smaller than the 2 data ranks (replicate 1 × data 2)" in problem
    with pytest.raises(PlanError, match='data = "all" is a number only where ranks run'):
        _ = plan.axes.num_ranks


def test_a_batch_smaller_than_the_data_ranks():
    plan = Plan(axes=Axes(data=2, replicate=2, tensor=2), data=Data(shard="optimizer"))
    assert check(plan, global_batch=4) == check(plan, global_batch=5) == []
    assert check(plan, global_batch=3) == [
        "a global batch of 3 is smaller than the 4 data ranks (replicate 2 × data 2), so some rank would never have a "
        "sample; use a global batch of at least 4, or fewer ranks along data"
    ]


@pytest.mark.parametrize("buffers", ["broadcast", "local"])
def test_batch_statistics_need_equal_parts(buffers):
    plan = Plan(axes=Axes(data=4), step=Step(microbatches=2), data=Data(buffers=buffers))
    assert check(plan, global_batch=32, local_batch_statistics=True) == []
    assert check(plan, global_batch=30) == []
    (problem,) = check(plan, global_batch=30, local_batch_statistics=True)
    assert f'own samples with [data] buffers = "{buffers}"' in problem
    assert "a global batch of 30 does not divide by 4 data ranks × 2 microbatches = 8" in problem
    assert "use a global batch of 24 or 32, or" in problem
    (problem,) = check(plan, global_batch=6, local_batch_statistics=True)
    assert "use a global batch of 8, or" in problem


def test_synchronised_statistics_take_any_batch():
    plan = Plan(axes=Axes(data=4), step=Step(microbatches=2))
    assert check(plan, global_batch=30, local_batch_statistics=True) == []


def test_all_problems_come_at_once():
    plan = Plan(
        axes=Axes(data=4, tensor=2),
        step=Step(clip_norm=1.0),
        data=Data(every=4, buffers="local"),
        codec=Codec(name="dgc"),
    )
    given = dict(num_ranks=6, optimizer="Adam", global_batch=3, local_batch_statistics=True)
    problems = check(plan, **given)
    starts = [
        "[data] every = 4 has no effect",
        '[codec] name = "dgc" takes over',
        '[codec] name = "dgc" must clip',
        "the axes need data 4 × tensor 2 = 8 ranks",
        "a global batch of 3 is smaller",
        "each rank normalises",
    ]
    assert len(problems) == len(starts)
    for problem, start in zip(problems, starts, strict=True):
        assert problem.startswith(start)
    with pytest.raises(PlanError) as refusal:
        require(check(plan, **given))
    assert list(refusal.value.problems) == problems


def test_the_example_of_data_parallelism_runs():
    plan = read_plan(EXAMPLES / "data-parallel.toml")
    assert (plan.axes.data, plan.data.sync) == (2, "all-reduce")
    require(check(plan, num_ranks=2, optimizer="AdamW", global_batch=8))
    assert parse_plan(format_plan(plan)) == plan


def test_values_are_found_by_path():
    assert {path: value_at(Plan(), path) for path in PATHS} == {
        f"{name}.{facts.name}": facts.default
        for name, section in SECTIONS.items()
        for facts in facts_of(section).values()
    }
    assert said(Plan(), "data.delay") == "[data] delay = 0"
