"""Rules for the values of [server], and for codecs on the way to servers; `rules.py` has all others."""

from __future__ import annotations

from weft.plan.plan import Plan, said
from weft.plan.refusals import Rule


def _updates_alone(plan: Plan) -> bool:
    """True if servers make an update of every worker's gradient by itself."""
    return plan.data.sync == "server" and not plan.server.updates_together


def _rounds_twice(plan: Plan) -> bool:
    return plan.server.pull != "master" and plan.precision.compute not in ("model", plan.server.pull)


def _for_stale_gradients(plan: Plan) -> dict[str, str]:
    """What a plan sets for stale gradients alone: with its value, and by name; nothing if it sets none of it."""
    default = Plan().server
    names = [name for name in ("compensation", "lr_scaling") if getattr(plan.server, name) != getattr(default, name)]
    idle = " and ".join(said(plan, f"server.{name}") for name in names)
    return {"idle": idle, "name": " and ".join(names)} if names else {}


SERVER_RULES: tuple[Rule, ...] = (
    Rule(
        combination="[server] backups as many as [axes] data, or more",
        why="{server.backups} leaves none of the {axes.data:value} workers to wait for",
        remedy="backups are counted in [axes] data, so set backups to at most {most}, or data to {least} or more",
        broken=lambda plan, _: (
            (plan.data.sync, plan.server.mode) == ("server", "sync")
            and isinstance(plan.axes.data, int)
            and plan.server.backups >= plan.axes.data
            and dict(most=plan.axes.data - 1, least=plan.server.backups + 1)
        ),
    ),
    Rule(
        combination='[server] compensation or lr_scaling with mode = "bounded" and staleness 0',
        why="with {server.mode} and {server.staleness} all workers update together, so no gradient is stale, and "
        "{idle} changes nothing",
        remedy="set [server] staleness to 1 or more, or leave {name} out",
        broken=lambda plan, _: (
            (plan.data.sync, plan.server.mode, plan.server.staleness) == ("server", "bounded", 0)
            and _for_stale_gradients(plan)
        ),
    ),
    # A vote is over the workers of one update. What a worker sends through any other codec is decoded alone.
    Rule(
        combination='[codec] name = "sign" with [server] mode = "async", or "bounded" with a staleness above 0',
        why="{codec.name} is a vote of all workers, and with {server.mode} every update is made of one worker's "
        "gradient",
        remedy='set [server] mode = "sync", or use another codec such as "onebit"',
        broken=lambda plan, _: plan.codec.name == "sign" and _updates_alone(plan),
    ),
    Rule(
        combination='[codec] name other than "half" with [step] clip_norm and [server] mode = "async", or "bounded" '
        "with a staleness above 0",
        why="with {server.mode} a worker clips by the norm of its own gradient, and what {codec.name} sends has "
        "another one, which {step.clip_norm} would not bound",
        remedy='set [step] clip_norm = 0.0, or [server] mode = "sync", where servers clip what updates are made of',
        broken=lambda plan, _: (
            plan.codec.name not in ("none", "half", "dgc", "sign") and plan.step.clip_norm > 0 and _updates_alone(plan)
        ),
    ),
    Rule(
        combination='[server] pull = "bf16" or "fp16" with the other one as [precision] compute',
        why="{server.pull} rounds weights to another format than {precision.compute}, which would round them again",
        remedy="set [server] pull = {precision.compute:value}, which loses nothing more, or leave it out",
        broken=lambda plan, _: plan.data.sync == "server" and _rounds_twice(plan),
    ),
)
