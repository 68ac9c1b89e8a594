"""Rules for values of a plan that contradict each other by the nature of the methods, whatever is built.

Fields that merely have no effect are in the table of switches in `check.py`; combinations with a kind of model are in
`model_refusals.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from weft.plan.late_merges import merges_late
from weft.plan.plan import ALL, Plan
from weft.plan.refusals import Optimizer, Rule
from weft.plan.server_rules import SERVER_RULES

# Class names in lower case. Their update of one element depends on other elements of the tensor, or on its shape. LARS
# and LAMB are those of other libraries: weft's own are recognised before names are looked at.
_WHOLE_TENSOR_OPTIMIZERS = frozenset(
    "adafactor adam_mini came dion distributedshampoo lamb lars lbfgs muon novograd shampoo sm3 soap sparseadam".split()
)


def combination_problems(plan: Plan, *, optimizer: str | None = None, elementwise: bool | None = None) -> Iterator[str]:
    """Every contradiction in this plan.

    `optimizer` is its class name, if known; `elementwise`: it updates each element independently, or takes the norms
    of whole tensors from weft (None: not known).
    """
    if elementwise is None:
        elementwise = optimizer is None or optimizer.lower() not in _WHOLE_TENSOR_OPTIMIZERS
    known = Optimizer(name=optimizer, elementwise=elementwise)
    for rule in RULES:
        yield from rule.problems(plan, known)


def _is_scheduled(plan: Plan, *schedules: str) -> bool:
    return plan.axes.pipeline > 1 and plan.pipeline.schedule in schedules


def _is_sharded(plan: Plan) -> bool:
    return plan.data.shard != "nothing"


def _codes_gradients(plan: Plan) -> bool:
    return plan.codec.name != "none" and plan.data.sync in ("all-reduce", "server")


_DIFFERING = ("local", "delayed")
"""Values of `[data] sync` with which replicas differ."""


def _is_one_replica(plan: Plan) -> bool:
    return _is_sharded(plan) and plan.axes.replicate == 1


def _sums_nothing(plan: Plan) -> bool:
    """True if no two ranks of a replica have gradients of the same parameters to sum, where replicas differ."""
    return not _is_sharded(plan) and plan.axes.sequence == 1


def _cuts(plan: Plan, _: Optimizer) -> bool | Mapping[str, object]:
    num_stages, needed = len(plan.pipeline.cuts) + 1, plan.axes.pipeline * plan.pipeline.chunks
    is_broken = plan.axes.pipeline > 1 and num_stages > 1 and num_stages != needed
    return is_broken and dict(num_stages=num_stages, num_needed=needed, num_cuts=needed - 1)


def _accumulates(plan: Plan, compute: str) -> bool:
    """True if a plan with this `compute` accumulates in a 16-bit format other than that."""
    return plan.precision.compute == compute and plan.precision.accumulate not in ("fp32", compute)


def _has_moments(optimizer: Optimizer) -> bool:
    return optimizer.name is not None and any(word in optimizer.name.lower() for word in ("adam", "lamb"))


RULES: tuple[Rule, ...] = (
    Rule(
        combination='[pipeline] schedule = "interleaved" with chunks = 1',
        why="{pipeline.schedule} needs at least 2 chunks on each rank, there is 1",
        remedy='set [pipeline] chunks = 2, or use "1f1b"',
        broken=lambda plan, _: _is_scheduled(plan, "interleaved") and plan.pipeline.chunks < 2,
    ),
    Rule(
        combination='[pipeline] schedule = "2bw" with [step] microbatches < [axes] pipeline',
        why="{pipeline.schedule} keeps two weight versions, which is too few for {step.microbatches:value} "
        "microbatches in {axes.pipeline:value} stages",
        remedy="set [step] microbatches to {axes.pipeline:value} or more",
        broken=lambda plan, _: _is_scheduled(plan, "2bw") and plan.step.microbatches < plan.axes.pipeline,
    ),
    Rule(
        combination="[pipeline] cuts for another number of stages than [axes] pipeline × chunks",
        why="{pipeline.cuts} makes {num_stages} stages, pipeline {axes.pipeline:value} × chunks "
        "{pipeline.chunks:value} needs {num_needed}",
        remedy="list {num_cuts} of them, or none for balanced stages",
        broken=_cuts,
    ),
    # A verdict on the whole model's gradient is known only when the first stage's backward is done; waiting for it
    # would be the very flush that this schedule avoids.
    Rule(
        combination='[pipeline] schedule = "pipedream" with [step] clip_norm',
        why="{pipeline.schedule} updates each stage at once, before the whole gradient's norm is known",
        remedy='set [step] clip_norm = 0.0 (it is {step.clip_norm:value}), or use "2bw" or "1f1b"',
        broken=lambda plan, _: _is_scheduled(plan, "pipedream") and plan.step.clip_norm > 0,
    ),
    # Weight versions are whole tensors of the model's own precision: what the optimizer updates is what computes.
    Rule(
        combination='[pipeline] schedule = "pipedream" or "2bw" with [data] shard',
        why="{pipeline.schedule} keeps whole weight versions on every stage, which {data.shard} would split",
        remedy='set [data] shard = "nothing", or use "1f1b"',
        broken=lambda plan, _: _is_scheduled(plan, "pipedream", "2bw") and _is_sharded(plan),
    ),
    Rule(
        combination='[pipeline] schedule = "pipedream" or "2bw" with [precision] compute',
        why="{pipeline.schedule} keeps weight versions in the model's own precision, and {precision.compute} would "
        "need a master copy of each",
        remedy='leave it at "model", or use "1f1b"',
        broken=lambda plan, _: _is_scheduled(plan, "pipedream", "2bw") and plan.precision.compute != "model",
    ),
    Rule(
        combination='[pipeline] schedule = "pipedream" or "2bw" with [precision] reduce',
        why="{pipeline.schedule} keeps weight versions in the model's own precision, and {precision.reduce} would need "
        "a master copy of each",
        remedy='leave it at "fp32", or use "1f1b"',
        broken=lambda plan, _: _is_scheduled(plan, "pipedream", "2bw") and plan.precision.reduce != "fp32",
    ),
    Rule(
        combination='[data] sync = "server" with [data] shard',
        why="{data.shard} cannot go with {data.sync}: the server holds the optimizer's state",
        remedy='set [data] shard = "nothing"',
        broken=lambda plan, _: plan.data.sync == "server" and _is_sharded(plan),
    ),
    Rule(
        combination='[data] sync = "server" with [pipeline] schedule = "pipedream" or "2bw"',
        why="with {data.sync} every step computes with the weights that servers send for it, and {pipeline.schedule} "
        "has microbatches of several steps under way, with weight versions of its own",
        remedy='use a schedule that flushes, such as "1f1b"',
        broken=lambda plan, _: plan.data.sync == "server" and _is_scheduled(plan, "pipedream", "2bw"),
    ),
    Rule(
        combination='[data] sync = "server" with [average] decay',
        why="{average.decay} averages the weights after every update, and with {data.sync} updates are the servers', "
        "of which a worker does not see every one",
        remedy="leave out [average] decay",
        broken=lambda plan, _: plan.data.sync == "server" and plan.average.decay > 0,
    ),
    Rule(
        combination='[data] sync = "local" or "delayed" with [data] shard and [axes] replicate = 1',
        why="{data.sync} lets replicas drift apart, but with {data.shard} the data axis shares one replica",
        remedy='set [axes] replicate to 2 or more, or [data] shard = "nothing"',
        broken=lambda plan, _: plan.data.sync in _DIFFERING and _is_one_replica(plan),
    ),
    # Gradients of the old weights are in flight, and would be applied to the average, which they were not made for.
    Rule(
        combination='[data] sync = "local" or "delayed" with [pipeline] schedule = "pipedream" or "2bw"',
        why="{data.sync} puts what other replicas computed into the weights, and with {pipeline.schedule} "
        "microbatches of older weight versions are still under way then",
        remedy='use a schedule that flushes, such as "1f1b"',
        broken=lambda plan, _: plan.data.sync in _DIFFERING and _is_scheduled(plan, "pipedream", "2bw"),
    ),
    Rule(
        combination='[data] sync = "local" or "delayed" with [precision] reduce where no ranks of a replica sum '
        "gradients",
        why="{precision.reduce} has no effect with {data.sync} here: a replica has one rank for each gradient, and "
        "what replicas exchange is weights",
        remedy='leave it out; set [codec] name = "half" to exchange in 16 bits',
        broken=lambda plan, _: plan.data.sync in _DIFFERING and plan.precision.reduce != "fp32" and _sums_nothing(plan),
    ),
    Rule(
        combination='[data] delay = "auto" with [data] sync = "local"',
        why="{data.delay} may choose {data.every:value} steps or more, and with {data.sync} it must be less than "
        "{data.every}",
        remedy='set a number of steps, or [data] sync = "delayed"',
        broken=lambda plan, _: plan.data.sync == "local" and plan.data.delay == "auto",
    ),
    Rule(
        combination='[data] delay = "auto" with one replica',
        why="{data.delay} measures how long exchanges between replicas take, and there is one replica, which exchanges "
        "nothing",
        remedy="start two ranks or more, or leave out [data] sync and delay",
        broken=lambda plan, _: (
            plan.data.delay == "auto"
            and plan.replica_axis is not None
            and plan.axes.data != ALL
            and plan.num_replicas == 1
        ),
    ),
    Rule(
        combination='[data] delay not below every with [data] sync = "local"',
        why="{data.delay} is not less than {data.every}, so a fragment would be sent again before, or in the same step "
        "as, it is merged",
        remedy="set [data] delay to less than {data.every:value}, or every to more than {data.delay:value}",
        broken=lambda plan, _: (
            plan.data.sync == "local" and isinstance(plan.data.delay, int) and plan.data.delay >= plan.data.every
        ),
    ),
    Rule(
        combination="[data] fragments larger than every",
        why="{data.fragments} are sent one after the other within {data.every}, so several would leave in one step",
        remedy="set [data] fragments to {data.every:value} or less, or every to {data.fragments:value} or more",
        broken=lambda plan, _: plan.data.sync == "local" and plan.data.fragments > plan.data.every,
    ),
    # The average takes the weights that all replicas have, and there never are any.
    Rule(
        combination='[average] decay with [data] sync = "delayed", or with fragments, delay or mix',
        why="{average.decay} averages weights that all replicas have in common, and where exchanges are merged later "
        "or mixed ({data.sync}) they never have them",
        remedy='leave out [average] decay, or use [data] sync = "local" without fragments, delay and mix',
        broken=lambda plan, _: plan.average.decay > 0 and merges_late(plan),
    ),
    Rule(
        combination='[codec] name = "half" with [data] sync = "all-reduce"',
        why="{codec.name} is for what replicas exchange when they differ, and with {data.sync} gradients are summed in "
        "the format of [precision] reduce",
        remedy='set [precision] reduce = "bf16" and leave out the codec',
        broken=lambda plan, _: (plan.codec.name, plan.data.sync) == ("half", "all-reduce"),
    ),
    Rule(
        combination="[codec] name with [data] shard and [axes] replicate = 1",
        why="{codec.name} acts between replicas, but with {data.shard} the data axis shares one replica",
        remedy='set [axes] replicate to 2 or more, [data] shard = "nothing", or [codec] name = "none"',
        broken=lambda plan, _: plan.codec.name != "none" and _is_one_replica(plan),
    ),
    Rule(
        combination='[data] balance with another [data] sync than "all-reduce"',
        why="{data.balance} gives a slow replica fewer samples, and where {data.sync} averages replicas it would count "
        "as much as one with more",
        remedy='set [data] sync = "all-reduce", or leave balance out',
        broken=lambda plan, _: plan.data.balance and plan.data.sync != "all-reduce",
    ),
    Rule(
        combination='[data] balance with [pipeline] schedule = "pipedream" or "2bw"',
        why="{data.balance} changes the number of microbatches from step to step, and {pipeline.schedule} has those of "
        "several steps in flight, with weight versions for a fixed number",
        remedy='leave balance out, or use "1f1b"',
        broken=lambda plan, _: plan.data.balance and _is_scheduled(plan, "pipedream", "2bw"),
    ),
    *SERVER_RULES,
    Rule(
        combination='[data] sync = "server" with an optimizer that needs whole tensors (Muon, Adafactor, LBFGS, ...)',
        why="{optimizer} needs whole tensors, but with {data.sync} servers hold flat ranges of them",
        remedy="use an optimizer that treats each element by itself, such as AdamW or SGD, or weft.optim's LARS or "
        'LAMB, or set [data] sync = "all-reduce"',
        broken=lambda plan, optimizer: plan.data.sync == "server" and not optimizer.elementwise,
    ),
    Rule(
        combination="[axes] tensor > 1 with an optimizer that needs whole tensors (Muon, Adafactor, LBFGS, ...)",
        why="{optimizer} needs whole tensors, but with {axes.tensor} each rank has a part of most of them",
        remedy="use an optimizer that treats each element by itself, such as AdamW or SGD, or weft.optim's LARS or "
        "LAMB, which add up their norms over ranks, or set [axes] tensor = 1",
        broken=lambda plan, optimizer: plan.axes.tensor > 1 and not optimizer.elementwise,
    ),
    Rule(
        combination="[data] shard with an optimizer that needs whole tensors (Muon, Adafactor, LBFGS, ...)",
        why="{optimizer} needs whole tensors, but with {data.shard} each rank keeps a flat range of every tensor",
        remedy="use an optimizer that treats each element by itself, such as AdamW or SGD, or weft.optim's LARS or "
        'LAMB, which add up their norms over ranks, or set [data] shard = "nothing"',
        broken=lambda plan, optimizer: _is_sharded(plan) and not optimizer.elementwise,
    ),
    Rule(
        combination='[codec] name = "dgc" with Adam or LAMB',
        why="{codec.name} takes over the optimizer's momentum, and {optimizer} has moments it cannot take over",
        remedy='use SGD, or another codec such as "topk"',
        broken=lambda plan, optimizer: plan.codec.name == "dgc" and _has_moments(optimizer),
    ),
    Rule(
        combination='[codec] name = "dgc" or "sign" with [data] sync = "local" or "delayed"',
        why="{codec.name} makes something of gradients that a change of weights is not: dgc corrects the optimizer's "
        "momentum, sign gives up the size of every entry; and with {data.sync} replicas exchange changes of weights",
        remedy='use "topk" or "onebit", or [data] sync = "all-reduce"',
        broken=lambda plan, _: plan.codec.name in ("dgc", "sign") and plan.data.sync in _DIFFERING,
    ),
    Rule(
        combination='[codec] name with [precision] compute = "fp16" and [data] sync = "all-reduce" or "server"',
        why="{codec.name} keeps what it did not send in the unit of scaled gradients, and with {precision.compute} the "
        "scale of the loss changes from step to step",
        remedy='set [precision] compute = "bf16", which needs no scale, or [codec] name = "none"',
        broken=lambda plan, _: _codes_gradients(plan) and plan.precision.compute == "fp16",
    ),
    Rule(
        combination='[codec] name with [precision] accumulate in 16 bits and [data] sync = "all-reduce" or "server"',
        why="{codec.name} adds what it did not send to later gradients, and with {precision.accumulate} such small "
        "terms would be rounded away",
        remedy='set [precision] accumulate = "fp32"',
        broken=lambda plan, _: _codes_gradients(plan) and plan.precision.accumulate != "fp32",
    ),
    Rule(
        combination='[codec] name with [pipeline] schedule = "pipedream" or "2bw" and [data] sync = "all-reduce"',
        why="{codec.name} changes what it keeps when all stages have decided on an update, and with "
        "{pipeline.schedule} every stage updates by itself",
        remedy='use a schedule that flushes, such as "1f1b", or [codec] name = "none"',
        broken=lambda plan, _: (
            plan.data.sync == "all-reduce" and plan.codec.name != "none" and _is_scheduled(plan, "pipedream", "2bw")
        ),
    ),
    Rule(
        combination="[codec] clip with [axes] tensor, pipeline, ring or ulysses, [data] shard or [precision] compute",
        why="{codec.clip} is for the norm of each replica's whole gradient before it is compressed, and in this plan "
        "no rank has a whole one in its own format by then",
        remedy="set [codec] clip = 0.0, or leave these out",
        broken=lambda plan, _: (
            plan.codec.clip > 0
            and (
                plan.axes.tensor * plan.axes.pipeline * plan.axes.sequence > 1
                or _is_sharded(plan)
                or plan.precision.compute != "model"
            )
        ),
    ),
    Rule(
        combination='[codec] name = "sign" with [step] clip_norm',
        why="votes of {codec.name} have the norm of as many ones, whatever the gradient, so {step.clip_norm} would be "
        "no more than another learning rate",
        remedy="set [step] clip_norm = 0.0",
        broken=lambda plan, _: plan.codec.name == "sign" and plan.step.clip_norm > 0,
    ),
    Rule(
        combination='[codec] name = "dgc" with [step] clip_norm',
        why="{codec.name} must clip before it accumulates, and {step.clip_norm} clips after",
        remedy="set [step] clip_norm = 0.0 and [codec] clip = {step.clip_norm:value}",
        broken=lambda plan, _: plan.codec.name == "dgc" and plan.step.clip_norm > 0,
    ),
    Rule(
        combination='[codec] name with [precision] reduce and [data] shard = "nothing"',
        why="{precision.reduce} has no effect with {codec.name}, which decides what travels",
        remedy='leave it out, or set [codec] name = "none"',
        # Where replicas differ the codec acts on weights, and gradients are summed inside a replica.
        broken=lambda plan, _: (
            plan.codec.name not in ("none", "half")
            and plan.data.sync not in _DIFFERING
            and not _is_sharded(plan)
            and plan.precision.reduce != "fp32"
        ),
    ),
    Rule(
        combination='[precision] compute = "fp16" with loss_scale = 0 or 1',
        why="{precision.compute} keeps nothing below 6e-8, and {precision.loss_scale} lifts no gradient above that",
        remedy='leave loss_scale at "dynamic", set a factor such as 1024, or set [precision] compute = "bf16"',
        broken=lambda plan, _: plan.precision.compute == "fp16" and plan.precision.loss_scale in (0, 1),
    ),
    Rule(
        combination='[precision] accumulate = "bf16" or "fp16" with compute = "model"',
        why="{precision.accumulate} is for gradients of that very format, and those of {precision.compute} may be "
        "wider",
        remedy='leave it at "fp32", or set [precision] compute = {precision.accumulate:value}',
        broken=lambda plan, _: _accumulates(plan, "model"),
    ),
    Rule(
        combination='[precision] accumulate = "fp16" with compute = "bf16"',
        why="{precision.accumulate} overflows at 65504, and gradients of {precision.compute} are not scaled to stay "
        "below",
        remedy='leave it at "fp32", or set [precision] compute = {precision.accumulate:value}',
        broken=lambda plan, _: _accumulates(plan, "bf16"),
    ),
    Rule(
        combination='[precision] accumulate = "bf16" with compute = "fp16"',
        why="{precision.accumulate} keeps 8 of the 11 significant bits that gradients of {precision.compute} have",
        remedy='leave it at "fp32", or set [precision] compute = {precision.accumulate:value}',
        broken=lambda plan, _: _accumulates(plan, "fp16"),
    ),
    Rule(
        combination='[precision] reduce = "fp16" with another compute',
        why="{precision.reduce} overflows at 65504, and only fp16 gradients are scaled to stay below",
        remedy='with {precision.compute} set [precision] reduce to "fp32" or "bf16"',
        broken=lambda plan, _: plan.precision.reduce == "fp16" and plan.precision.compute != "fp16",
    ),
)
