"""Values that contradict each other, whatever is built, and their neighbours that do not."""

import pytest

from weft.errors import PlanError
from weft.plan.check import check, require
from weft.plan.plan import Average, Axes, Codec, Data, Pipeline, Plan, Precision, Server, Step
from weft.plan.refusals import Optimizer
from weft.plan.rules import RULES, combination_problems

SHARDED = Data(shard="gradients")
SERVED = Data(sync="server")


REFUSED = [
    (
        Plan(axes=Axes(pipeline=2), step=Step(microbatches=2), pipeline=Pipeline(schedule="interleaved")),
        "needs at least 2 chunks on each rank, there is 1",
    ),
    (
        Plan(axes=Axes(pipeline=4), step=Step(microbatches=3), pipeline=Pipeline(schedule="2bw")),
        "too few for 3 microbatches in 4 stages; set [step] microbatches to 4 or more",
    ),
    (
        Plan(axes=Axes(pipeline=4), pipeline=Pipeline(cuts=(1, 2))),
        "[pipeline] cuts = [1, 2] makes 3 stages, pipeline 4 × chunks 1 needs 4; list 3 of them",
    ),
    (
        Plan(
            axes=Axes(pipeline=2),
            step=Step(microbatches=2),
            pipeline=Pipeline(schedule="interleaved", chunks=2, cuts=(3,)),
        ),
        "makes 2 stages, pipeline 2 × chunks 2 needs 4; list 3 of them",
    ),
    (
        Plan(axes=Axes(pipeline=2), step=Step(clip_norm=0.5), pipeline=Pipeline(schedule="pipedream")),
        "set [step] clip_norm = 0.0 (it is 0.5)",
    ),
    (
        Plan(axes=Axes(pipeline=2), precision=Precision(compute="fp16"), pipeline=Pipeline(schedule="pipedream")),
        "keeps weight versions in the model's own precision, and [precision] compute",
    ),
    (
        Plan(axes=Axes(pipeline=2), precision=Precision(reduce="bf16"), pipeline=Pipeline(schedule="pipedream")),
        'and [precision] reduce = "bf16" would need a master copy of each; leave it at "fp32", or use "1f1b"',
    ),
    (
        Plan(
            axes=Axes(pipeline=2, data=2),
            step=Step(microbatches=2),
            data=Data(shard="optimizer"),
            pipeline=Pipeline(schedule="2bw"),
        ),
        'which [data] shard = "optimizer" would split; set [data] shard = "nothing", or use "1f1b"',
    ),
    (
        Plan(axes=Axes(data=2), step=Step(microbatches=2), data=Data(balance=True, sync="delayed")),
        'it would count as much as one with more; set [data] sync = "all-reduce", or leave balance out',
    ),
    (
        Plan(
            axes=Axes(data=2, pipeline=2),
            step=Step(microbatches=2),
            data=Data(balance=True),
            pipeline=Pipeline(schedule="pipedream"),
        ),
        'has those of several steps in flight, with weight versions for a fixed number; leave balance out, or use "1',
    ),
    (
        Plan(data=Data(sync="server", shard="optimizer")),
        '[data] shard = "optimizer" cannot go with [data] sync = "server"',
    ),
    (
        Plan(
            axes=Axes(data=2, pipeline=2),
            step=Step(microbatches=2),
            data=Data(sync="server"),
            pipeline=Pipeline(schedule="2bw"),
        ),
        'with [data] sync = "server" every step computes with the weights that servers send for it, and [pipeline] '
        'schedule = "2bw" has microbatches of several steps under way',
    ),
    (
        Plan(axes=Axes(data=2), data=Data(sync="server"), average=Average(decay=0.9)),
        "[average] decay = 0.9 averages the weights after every update",
    ),
    (
        Plan(axes=Axes(data=2), data=Data(sync="local", every=2, shard="gradients")),
        '[data] sync = "local" lets replicas drift apart, but with [data] shard = "gradients"',
    ),
    (
        Plan(axes=Axes(data=2), data=Data(sync="delayed", delay=2, shard="parameters")),
        '[data] sync = "delayed" lets replicas drift apart',
    ),
    (
        Plan(axes=Axes(data=2), data=SHARDED, codec=Codec(name="powersgd")),
        '[codec] name = "powersgd" acts between replicas, but with [data] shard = "gradients"',
    ),
    (
        Plan(axes=Axes(data=2), data=Data(sync="server"), server=Server(backups=2)),
        "[server] backups = 2 leaves none of the 2 workers to wait for; backups are counted in [axes] data, so "
        "set backups to at most 1, or data to 3 or more",
    ),
    (
        Plan(axes=Axes(data=2), data=SERVED, server=Server(mode="bounded", compensation=0.1)),
        'with [server] mode = "bounded" and [server] staleness = 0 all workers update together, so no gradient is '
        "stale, and [server] compensation = 0.1 changes nothing; set [server] staleness to 1 or more, or leave "
        "compensation out",
    ),
    (
        Plan(
            axes=Axes(data=2),
            data=SERVED,
            server=Server(mode="bounded", compensation=0.1, lr_scaling="staleness"),
        ),
        '[server] compensation = 0.1 and [server] lr_scaling = "staleness" changes nothing',
    ),
    (
        Plan(axes=Axes(data=2), data=SERVED, server=Server(mode="async"), codec=Codec(name="sign")),
        '[codec] name = "sign" is a vote of all workers, and with [server] mode = "async" every update is made of one',
    ),
    (
        Plan(
            axes=Axes(data=2),
            data=SERVED,
            server=Server(mode="bounded", staleness=1),
            step=Step(clip_norm=1.0),
            codec=Codec(name="topk"),
        ),
        'what [codec] name = "topk" sends has another one, which [step] clip_norm = 1.0 would not bound',
    ),
    (
        Plan(axes=Axes(data=2), data=SERVED, server=Server(pull="fp16"), precision=Precision(compute="bf16")),
        '[server] pull = "fp16" rounds weights to another format than [precision] compute = "bf16", which would round '
        'them again; set [server] pull = "bf16"',
    ),
    (
        Plan(axes=Axes(data=2), data=SERVED, codec=Codec(name="topk"), precision=Precision(compute="fp16")),
        'with [precision] compute = "fp16" the scale of the loss changes from step to step',
    ),
    (
        Plan(step=Step(clip_norm=1.0), codec=Codec(name="dgc")),
        "must clip before it accumulates, and [step] clip_norm = 1.0 clips after; set [step] clip_norm = 0.0 and "
        "[codec] clip = 1.0",
    ),
    (
        Plan(step=Step(clip_norm=1.0), codec=Codec(name="sign")),
        '[codec] name = "sign" have the norm of as many ones, whatever the gradient, so [step] clip_norm = 1.0 would',
    ),
    (
        Plan(axes=Axes(data=2), data=Data(sync="local", every=4), codec=Codec(name="sign")),
        '[codec] name = "sign" makes something of gradients that a change of weights is not',
    ),
    (
        Plan(axes=Axes(data=2), codec=Codec(name="topk"), precision=Precision(compute="fp16")),
        'with [precision] compute = "fp16" the scale of the loss changes from step to step; set [precision] compute = '
        '"bf16"',
    ),
    (
        Plan(axes=Axes(data=2), codec=Codec(name="topk"), precision=Precision(compute="bf16", accumulate="bf16")),
        'with [precision] accumulate = "bf16" such small terms would be rounded away',
    ),
    (
        Plan(axes=Axes(pipeline=2), pipeline=Pipeline(schedule="pipedream"), codec=Codec(name="onebit")),
        'with [pipeline] schedule = "pipedream" every stage updates by itself',
    ),
    (
        Plan(axes=Axes(data=2, tensor=2), codec=Codec(name="dgc", clip=1.0)),
        "[codec] clip = 1.0 is for the norm of each replica's whole gradient before it is compressed",
    ),
    (
        Plan(codec=Codec(name="topk"), precision=Precision(reduce="bf16")),
        '[precision] reduce = "bf16" has no effect with [codec] name = "topk"',
    ),
    (
        Plan(axes=Axes(data=2), codec=Codec(name="half")),
        '[codec] name = "half" is for what replicas exchange when they differ, and with [data] sync = "all-reduce" '
        'gradients are summed in the format of [precision] reduce; set [precision] reduce = "bf16" and leave out',
    ),
    (
        Plan(
            axes=Axes(pipeline=2, data=2),
            step=Step(microbatches=2),
            data=Data(sync="local", every=2),
            pipeline=Pipeline(schedule="2bw"),
        ),
        '[data] sync = "local" puts what other replicas computed into the weights, and with [pipeline] schedule = '
        '"2bw" microbatches of older weight versions are still under way then; use a schedule that flushes, such as '
        '"1f1b"',
    ),
    (
        Plan(axes=Axes(data=2, tensor=2), data=Data(sync="local", every=2), precision=Precision(reduce="bf16")),
        '[precision] reduce = "bf16" has no effect with [data] sync = "local" here: a replica has one rank for each '
        'gradient, and what replicas exchange is weights; leave it out; set [codec] name = "half" to exchange in 16',
    ),
    (
        Plan(data=Data(sync="delayed", delay="auto")),
        '[data] delay = "auto" measures how long exchanges between replicas take, and there is one replica',
    ),
    (
        Plan(axes=Axes(data=2), data=Data(sync="local", every=2, delay="auto")),
        'delay = "auto" may choose 2 steps or more, and with [data] sync = "local" it must be less than',
    ),
    (
        Plan(axes=Axes(data=2), data=Data(sync="local", every=4, delay=4)),
        "[data] delay = 4 is not less than [data] every = 4, so a fragment would be sent again before, or in the same "
        "step as, it is merged; set [data] delay to less than 4, or every to more than 4",
    ),
    (
        Plan(axes=Axes(data=2), data=Data(sync="local", every=2, fragments=3)),
        "[data] fragments = 3 are sent one after the other within [data] every = 2",
    ),
    (
        Plan(axes=Axes(data=2), data=Data(sync="delayed", delay=2), average=Average(decay=0.9)),
        "[average] decay = 0.9 averages weights that all replicas have in common, and where exchanges are merged later",
    ),
    (
        Plan(precision=Precision(compute="fp16", loss_scale=0)),
        '[precision] compute = "fp16" keeps nothing below 6e-8, and [precision] loss_scale = 0 lifts no gradient '
        'above that; leave loss_scale at "dynamic", set a factor such as 1024, or set [precision] compute = "bf16"',
    ),
    (
        Plan(precision=Precision(compute="fp16", loss_scale=1)),
        "[precision] loss_scale = 1 lifts no gradient above that",
    ),
    (
        Plan(precision=Precision(accumulate="bf16")),
        '[precision] accumulate = "bf16" is for gradients of that very format, and those of [precision] compute = '
        '"model" may be wider; leave it at "fp32", or set [precision] compute = "bf16"',
    ),
    (
        Plan(precision=Precision(compute="bf16", accumulate="fp16")),
        '[precision] accumulate = "fp16" overflows at 65504, and gradients of [precision] compute = "bf16" are not '
        'scaled to stay below; leave it at "fp32", or set [precision] compute = "fp16"',
    ),
    (
        Plan(precision=Precision(compute="fp16", accumulate="bf16")),
        '[precision] accumulate = "bf16" keeps 8 of the 11 significant bits that gradients of [precision] compute '
        '= "fp16" have; leave it at "fp32", or set [precision] compute = "bf16"',
    ),
    (
        Plan(precision=Precision(reduce="fp16")),
        '[precision] reduce = "fp16" overflows at 65504, and only fp16 gradients are scaled to stay below; with '
        '[precision] compute = "model" set [precision] reduce to "fp32" or "bf16"',
    ),
    (
        Plan(precision=Precision(compute="bf16", reduce="fp16")),
        'with [precision] compute = "bf16" set [precision] reduce to "fp32" or "bf16"',
    ),
]


@pytest.mark.parametrize(("plan", "words"), REFUSED)
def test_what_does_not_go_together(plan, words):
    (problem,) = combination_problems(plan, optimizer="SGD")
    assert problem in check(plan, optimizer="SGD")
    assert words in problem


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.combination)
def test_every_rule_is_broken_by_some_plan(rule):
    """The sentences of each are filled in, and nothing is left of a place for something."""
    whole_tensors = Optimizer(name="Lamb", elementwise=False)
    plans = [plan for plan, _ in REFUSED] + [
        Plan(axes=Axes(data=2, tensor=2), data=SHARDED),
        Plan(codec=Codec(name="dgc")),
    ]
    problems = [problem for plan in plans for problem in rule.problems(plan, whole_tensors)]
    assert problems
    assert not any(mark in problem for mark in "{}" for problem in problems)
    assert not list(rule.problems(Plan(), whole_tensors))


@pytest.mark.parametrize(
    "plan",
    [
        Plan(
            axes=Axes(pipeline=2),
            step=Step(microbatches=4, clip_norm=1.0),
            pipeline=Pipeline(schedule="interleaved", chunks=2, cuts=(1, 2, 3)),
        ),
        Plan(axes=Axes(pipeline=4), step=Step(microbatches=4), pipeline=Pipeline(schedule="2bw", cuts=(1, 5, 7))),
        Plan(axes=Axes(pipeline=3), pipeline=Pipeline(schedule="pipedream", vertical_sync=True)),
        Plan(axes=Axes(data=2, replicate=2), data=SHARDED, codec=Codec(name="topk")),
        Plan(axes=Axes(data=2, replicate=2), data=SHARDED, codec=Codec(name="dgc"), precision=Precision(reduce="bf16")),
        Plan(axes=Axes(data=2, replicate=2), data=Data(sync="local", every=4, shard="parameters")),
        Plan(
            axes=Axes(data=2, ring=2),
            data=Data(sync="local", every=4),
            codec=Codec(name="half"),
            precision=Precision(reduce="bf16"),
        ),
        Plan(axes=Axes(data=2, pipeline=2), data=Data(sync="local", every=4)),
        Plan(axes=Axes(data=4), data=Data(sync="server"), server=Server(backups=3)),
        Plan(axes=Axes(data=2), data=SERVED, server=Server(mode="bounded"), codec=Codec(name="sign")),
        Plan(axes=Axes(data=2), data=SERVED, server=Server(mode="bounded", staleness=1, compensation=0.1)),
        Plan(axes=Axes(data=2), data=SERVED, codec=Codec(name="half")),
        Plan(axes=Axes(data=2), data=SERVED, step=Step(clip_norm=1.0), codec=Codec(name="topk")),
        Plan(
            axes=Axes(data=2),
            data=SERVED,
            server=Server(mode="async"),
            step=Step(clip_norm=1.0),
            codec=Codec(name="half"),
        ),
        Plan(axes=Axes(data=2), data=SERVED, server=Server(pull="bf16"), precision=Precision(compute="bf16")),
        Plan(axes=Axes(data=2), data=SERVED, server=Server(pull="fp16", mode="async")),
        Plan(axes=Axes(data=2), data=Data(sync="delayed", delay=3, every=2)),
        Plan(codec=Codec(name="dgc", density=0.001, clip=1.0)),
        Plan(precision=Precision(compute="fp16")),
        Plan(precision=Precision(compute="fp16", loss_scale=2, reduce="fp16", accumulate="fp16")),
        Plan(precision=Precision(compute="fp16", reduce="bf16")),
        Plan(precision=Precision(compute="bf16", reduce="bf16", accumulate="bf16")),
        Plan(precision=Precision(reduce="bf16")),
        Plan(
            axes=Axes(data=2, replicate=2),
            step=Step(microbatches=2, clip_norm=1.0),
            data=Data(shard="parameters", reshard="microbatch", offload=True),
            precision=Precision(compute="fp16"),
        ),
    ],
)
def test_what_does_go_together(plan):
    assert check(plan, optimizer="SGD", num_ranks=plan.axes.num_ranks) == []


@pytest.mark.parametrize("optimizer", ["Adam", "AdamW", "adamw", "NAdam", "Lamb"])
def test_dgc_refuses_adam(optimizer):
    plan = Plan(codec=Codec(name="dgc"))
    (problem,) = combination_problems(plan, optimizer=optimizer)
    assert problem.startswith('[codec] name = "dgc" takes over the optimizer\'s momentum') and optimizer in problem
    assert problem in check(plan, optimizer=optimizer)
    assert not list(combination_problems(plan, optimizer="SGD"))
    assert not list(combination_problems(plan))


@pytest.mark.parametrize("shard", ["optimizer", "gradients", "parameters"])
def test_sharding_refuses_an_optimizer_that_needs_whole_tensors(shard):
    plan = Plan(axes=Axes(data=2), data=Data(shard=shard))
    assert check(plan, optimizer="Whitening", elementwise=False) == [
        f'Whitening needs whole tensors, but with [data] shard = "{shard}" each rank keeps a flat range of every '
        "tensor; use an optimizer that treats each element by itself, such as AdamW or SGD, or weft.optim's LARS or "
        'LAMB, which add up their norms over ranks, or set [data] shard = "nothing"'
    ]
    assert check(plan, elementwise=False)[0].startswith("this optimizer needs whole tensors")
    assert check(Plan(axes=Axes(data=2)), optimizer="Whitening", elementwise=False) == []
    with pytest.raises(PlanError, match="^Whitening needs whole tensors"):
        require(check(plan, optimizer="Whitening", elementwise=False))


@pytest.mark.parametrize("optimizer", ["Muon", "Adafactor", "LBFGS", "SparseAdam", "Shampoo", "SOAP", "LARS", "Lamb"])
def test_optimizers_that_need_whole_tensors_are_known_by_name(optimizer):
    plan = Plan(axes=Axes(data=2), data=SHARDED)
    (problem,) = check(plan, optimizer=optimizer)
    assert problem.startswith(f"{optimizer} needs whole tensors")
    # what was found by trying goes before the name
    assert check(plan, optimizer=optimizer, elementwise=True) == []
    assert check(Plan(axes=Axes(data=2)), optimizer=optimizer) == []


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "Adam", "NAdam", "Adagrad", "RMSprop", "Rprop", "MyOwn", None])
def test_sharding_takes_any_other_optimizer(optimizer):
    assert check(Plan(axes=Axes(data=2), data=SHARDED), optimizer=optimizer) == []
