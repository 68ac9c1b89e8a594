"""Which values of a plan go together: rules that follow from the methods themselves, whatever is built.

Each rule says why, with the numbers and what to change. A field that merely has no effect is not here but in the table
of switches in `check.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.plan.plan import Plan, said, value_at

# By class name, in small letters. Their update of one element depends on others of the same tensor, or on its shape.
_WHOLE_TENSOR_OPTIMIZERS = frozenset(
    {
        "adafactor",
        "adam_mini",
        "came",
        "dion",
        "distributedshampoo",
        "lamb",
        "lars",
        "lbfgs",
        "muon",
        "novograd",
        "shampoo",
        "sm3",
        "soap",
        "sparseadam",
    }
)


def combination_problems(plan: Plan, *, optimizer: str | None = None, elementwise: bool | None = None) -> Iterator[str]:
    """Every combination in this plan that contradicts itself.

    `optimizer` is its class name, if known; `elementwise` says whether it treats each element by itself, if known.
    """
    yield from _pipeline_problems(plan)
    yield from _replica_problems(plan)
    yield from _optimizer_problems(plan, optimizer, elementwise)
    yield from _codec_problems(plan, optimizer)
    yield from _precision_problems(plan)


def _pipeline_problems(plan: Plan) -> Iterator[str]:
    ranks, chunks, microbatches = plan.axes.pipeline, plan.pipeline.chunks, plan.step.microbatches
    schedule, cuts = plan.pipeline.schedule, plan.pipeline.cuts
    if ranks == 1:
        return
    name = said(plan, "pipeline.schedule")
    if schedule == "interleaved" and chunks < 2:
        yield f'{name} needs at least 2 chunks on each rank, there is 1; set [pipeline] chunks = 2, or use "1f1b"'
    if schedule == "interleaved" and microbatches % ranks:
        yield (
            f"{name} goes round the {ranks} ranks in full rounds, which {microbatches} microbatches do not fill; "
            f"set [step] microbatches to a multiple of {ranks}, such as {-(-microbatches // ranks) * ranks}"
        )
    if schedule == "2bw" and microbatches < ranks:
        yield (
            f"{name} keeps two weight versions, which is too few for {microbatches} microbatches in {ranks} stages; "
            f"set [step] microbatches to {ranks} or more"
        )
    if cuts and len(cuts) != ranks * chunks - 1:
        yield (
            f"{said(plan, 'pipeline.cuts')} makes {len(cuts) + 1} stages, pipeline {ranks} × chunks {chunks} needs "
            f"{ranks * chunks}; list {ranks * chunks - 1} of them, or none for balanced stages"
        )
    # A verdict on the whole model's gradient is known only when the first stage's backward is done; waiting for it
    # would be the very flush that this schedule avoids.
    if schedule == "pipedream" and plan.step.clip_norm:
        yield (
            f"{name} updates each stage at once, before the whole gradient's norm is known; set [step] clip_norm = 0.0 "
            f'(it is {plan.step.clip_norm:g}), or use "2bw" or "1f1b"'
        )
    if schedule in ("pipedream", "2bw"):
        yield from _version_problems(plan)


def _version_problems(plan: Plan) -> Iterator[str]:
    """Weight versions are whole tensors of the model's own precision: what the optimizer updates is what computes."""
    name = said(plan, "pipeline.schedule")
    if plan.data.shard != "nothing":
        yield (
            f"{name} keeps whole weight versions on every stage, which {said(plan, 'data.shard')} would split; set "
            '[data] shard = "nothing", or use "1f1b"'
        )
    for path, default in (("precision.compute", "model"), ("precision.reduce", "fp32")):
        if value_at(plan, path) != default:
            yield (
                f"{name} keeps weight versions in the model's own precision, and {said(plan, path)} would need a "
                f'master copy of each; leave it at "{default}", or use "1f1b"'
            )


def _replica_problems(plan: Plan) -> Iterator[str]:
    sync, sharded, replicate = plan.data.sync, plan.data.shard != "nothing", plan.axes.replicate
    name, shard = said(plan, "data.sync"), said(plan, "data.shard")
    if sync == "server" and sharded:
        yield f'{shard} cannot go with {name}: the server holds the optimizer\'s state; set [data] shard = "nothing"'
    if sync in ("local", "delayed") and sharded and replicate == 1:
        yield (
            f"{name} lets replicas drift apart, but with {shard} the data axis shares one replica; set [axes] "
            'replicate to 2 or more, or [data] shard = "nothing"'
        )
    if plan.codec.name != "none" and sharded and replicate == 1:
        yield (
            f"{said(plan, 'codec.name')} acts between replicas, but with {shard} the data axis shares one replica; "
            'set [axes] replicate to 2 or more, [data] shard = "nothing", or [codec] name = "none"'
        )
    if sync == "server" and plan.server.mode == "sync" and plan.server.backups >= plan.axes.data:
        yield (
            f"{said(plan, 'server.backups')} leaves none of the {plan.axes.data} workers to wait for; backups are "
            f"counted in [axes] data, so set backups to at most {plan.axes.data - 1}, or data to "
            f"{plan.server.backups + 1} or more"
        )


def _optimizer_problems(plan: Plan, optimizer: str | None, elementwise: bool | None) -> Iterator[str]:
    if elementwise is None:
        elementwise = optimizer is None or optimizer.lower() not in _WHOLE_TENSOR_OPTIMIZERS
    if plan.axes.tensor > 1 and not elementwise:
        yield (
            f"{optimizer or 'this optimizer'} needs whole tensors, but with {said(plan, 'axes.tensor')} each rank has "
            "a part of most of them; use an optimizer that treats each element by itself, such as AdamW or SGD, or set "
            "[axes] tensor = 1"
        )
    if plan.data.shard != "nothing" and not elementwise:
        yield (
            f"{optimizer or 'this optimizer'} needs whole tensors, but with {said(plan, 'data.shard')} each rank keeps "
            "a flat range of every tensor; use an optimizer that treats each element by itself, such as AdamW or SGD, "
            'or set [data] shard = "nothing"'
        )


def _codec_problems(plan: Plan, optimizer: str | None) -> Iterator[str]:
    codec, name = plan.codec.name, said(plan, "codec.name")
    if codec == "dgc" and optimizer is not None and any(word in optimizer.lower() for word in ("adam", "lamb")):
        yield (
            f"{name} takes over the optimizer's momentum, and {optimizer} has moments it cannot take over; use SGD, or "
            'another codec such as "topk"'
        )
    if codec == "dgc" and plan.step.clip_norm:
        yield (
            f"{name} must clip before it accumulates, and {said(plan, 'step.clip_norm')} clips after; set [step] "
            f"clip_norm = 0.0 and [codec] clip = {plan.step.clip_norm!r}"
        )
    if codec != "none" and plan.data.shard == "nothing" and plan.precision.reduce != "fp32":
        yield (
            f"{said(plan, 'precision.reduce')} has no effect with {name}, which decides what travels; leave it out, "
            'or set [codec] name = "none"'
        )


def _precision_problems(plan: Plan) -> Iterator[str]:
    compute, accumulate = plan.precision.compute, plan.precision.accumulate
    if compute == "fp16" and plan.precision.loss_scale in (0, 1):
        yield (
            f"{said(plan, 'precision.compute')} keeps nothing below 6e-8, and {said(plan, 'precision.loss_scale')} "
            'lifts no gradient above that; leave loss_scale at "dynamic", set a factor such as 1024, or set '
            '[precision] compute = "bf16"'
        )
    if accumulate not in ("fp32", compute):
        why = {
            "model": "is for gradients of that very format, and those of {} may be wider",
            "bf16": "overflows at 65504, and gradients of {} are not scaled to stay below",
            "fp16": "keeps 8 of the 11 significant bits that gradients of {} have",
        }[compute].format(said(plan, "precision.compute"))
        yield (
            f'{said(plan, "precision.accumulate")} {why}; leave it at "fp32", or set [precision] compute = '
            f'"{accumulate}"'
        )
    if plan.precision.reduce == "fp16" and compute != "fp16":
        yield (
            f"{said(plan, 'precision.reduce')} overflows at 65504, and only fp16 gradients are scaled to stay below; "
            f'with {said(plan, "precision.compute")} set [precision] reduce to "fp32" or "bf16"'
        )
