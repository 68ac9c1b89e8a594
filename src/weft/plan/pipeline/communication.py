"""The schedule of a plan: the compute order of `schedules.py` with the exchanges that each compute action needs.

The rules are the same for every schedule:

    receive    one pass before the message is needed, so that the transfer overlaps that pass; an update does not count
               as a pass, because it is short and waits for a reduce. A gradient is not received before an update:
               the totals of that update follow its gradients in the same group
    send       right after the action that made the message
    gather     ZeRO-3: as early as a receive, so that the stage's parameters are whole when it computes
    release    ZeRO-3: right after the stage has computed
    reduce     after the last action that adds to the gradients of an update, if there are other data ranks

A receive and a gather only begin where they stand; the action that needs them waits. NCCL has no tags, so two ranks
send and receive the messages of a group (`message_group` in `plan/partition/groups.py`) in one order.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from weft.plan.partition.replicas import shares_batch
from weft.plan.pipeline import schedules
from weft.plan.pipeline.actions import Action, Schedule
from weft.plan.plan import Plan

FLUSH_FREE = ("pipedream", "2bw")
"""Schedules whose pipeline stays full from one step to the next."""
_SIMPLE = {
    "1f1b": schedules.one_f_one_b,
    "gpipe": schedules.gpipe,
    "naive": schedules.naive,
    "zero-bubble": schedules.zero_bubble,
}


def schedule_of(
    plan: Plan,
    *,
    num_microbatches: int | None = None,
    first: int = 0,
    start: int = 0,
    drain: bool = True,
    together: bool = False,
) -> Schedule:
    """The actions of every rank along the pipeline in a training step.

    `num_microbatches` are fed, by default those of the plan; with 2bw a multiple of those. `first`, `start`, `drain`
    and `together` concern the flush-free schedules only, and are explained in `schedules.py`.
    """
    num_stages, num_fed = plan.axes.pipeline, plan.step.microbatches if num_microbatches is None else num_microbatches
    match plan.pipeline.schedule:
        case "interleaved":
            order = schedules.interleaved(num_stages, num_fed, plan.pipeline.chunks)
        case "pipedream":
            sync = plan.pipeline.vertical_sync
            order = schedules.pipedream(num_stages, num_fed, first=first, start=start, drain=drain, vertical_sync=sync)
        case "2bw":
            m = plan.step.microbatches
            batches, left = divmod(num_fed, m)
            assert left == 0, f"{num_fed} microbatches are no whole batches of {m}"
            order = schedules.two_bw(
                num_stages, m, num_batches=batches, first=first, start=start, drain=drain, together=together
            )
        case simple:
            order = _SIMPLE[simple](num_stages, num_fed)
    if plan.pipeline.schedule in FLUSH_FREE:
        assert plan.data.shard != "parameters", "stashed weight versions are whole, so there is nothing to gather"
    else:
        order = tuple((*actions, Action(kind="update", stage=rank, version=1)) for rank, actions in enumerate(order))
    return with_exchanges(
        order,
        num_stages=plan.axes.pipeline * plan.pipeline.chunks,
        gathers=_gathers(plan),
        reduces_gradients=shares_batch(plan),
    )


def evaluation_of(plan: Plan, num_microbatches: int) -> Schedule:
    """The actions of every rank along the pipeline that run microbatches forward only."""
    order = schedules.forward_only(plan.axes.pipeline, num_microbatches, plan.pipeline.chunks)
    return with_exchanges(order, num_stages=plan.axes.pipeline * plan.pipeline.chunks, gathers=_gathers(plan))


def with_exchanges(
    order: Schedule, *, num_stages: int | None = None, gathers: str = "never", reduces_gradients: bool = False
) -> Schedule:
    """The compute order with its exchanges.

    `num_stages` of the model, if the order does not go through all of them. `gathers`: how long parameters stay whole,
    for the "step", for consecutive actions on the same stage ("microbatch"), or always ("never" gathered).
    """
    if num_stages is None:
        num_stages = 1 + max((action.stage for actions in order for action in actions), default=0)
    return tuple(
        _rank_with_exchanges(actions, num_stages, gathers=gathers, reduces_gradients=reduces_gradients)
        for actions in order
    )


def source_of(action: Action, num_stages: int) -> int | None:
    """The stage whose message a compute action needs; None at the ends of the model."""
    return _neighbour(action, -1, num_stages)


def _neighbour(action: Action, step: int, num_stages: int) -> int | None:
    """The stage before (-1) or after (1) an action's own, in the direction in which its message travels."""
    direction = {"forward": 1, "backward": -1, "input-grad": -1}.get(action.kind)
    if direction is None or not 0 <= action.stage + step * direction < num_stages:
        return None
    return action.stage + step * direction


def _rank_with_exchanges(
    actions: tuple[Action, ...], num_stages: int, *, gathers: str, reduces_gradients: bool
) -> tuple[Action, ...]:
    before: list[list[Action]] = [[] for _ in actions]
    after: list[list[Action]] = [[] for _ in actions]
    passes = [place for place, action in enumerate(actions) if action.kind != "update"]
    early = dict(zip(passes, [*passes[:1], *passes], strict=False))
    for place, action in enumerate(actions):
        source, target = source_of(action, num_stages), _neighbour(action, 1, num_stages)
        if source is not None:
            receive = Action(kind="receive", stage=action.stage, microbatch=action.microbatch, peer=source)
            is_gradient = source > action.stage
            updates = any(between.kind == "update" for between in actions[early[place] : place])
            before[place if is_gradient and updates else early[place]].append(receive)
        if target is not None:
            after[place].append(Action(kind="send", stage=action.stage, microbatch=action.microbatch, peer=target))
    for begin, end, stage in _whole_spells(actions, gathers):
        before[early[begin]].append(Action(kind="gather", stage=stage))
        after[end].append(Action(kind="release", stage=stage))
    if reduces_gradients:
        for place, reduce in _reductions(actions):
            after[place].append(reduce)
    return tuple(
        exchanged for place, action in enumerate(actions) for exchanged in (*before[place], action, *after[place])
    )


def _whole_spells(actions: tuple[Action, ...], gathers: str) -> Iterator[tuple[int, int, int]]:
    """(first place, last place, stage) of each interval in which a stage's parameters are whole."""
    # An update is left out: with ZeRO it works on the rank's own part.
    places = [(place, action.stage) for place, action in enumerate(actions) if action.kind != "update"]
    if gathers == "step":
        places.sort(key=lambda place: place[1])  # stages are in the order of their first actions already
    for stage, spell in groupby(places if gathers != "never" else (), key=lambda place: place[1]):
        run = [place for place, _ in spell]
        yield run[0], run[-1], stage


def _reductions(actions: tuple[Action, ...]) -> Iterator[tuple[int, Action]]:
    """(place, reduce) for the last action on each stage that adds to the gradients of an update."""
    update: Action | None = None
    reduced: set[int] = set()
    for place in reversed(range(len(actions))):
        action = actions[place]
        if action.kind == "update":
            update, reduced = action, set()
        elif action.kind in ("backward", "weight-grad") and update is not None and action.stage not in reduced:
            reduced.add(action.stage)
            yield place, Action(kind="reduce", stage=action.stage, microbatch=update.microbatch)


def _gathers(plan: Plan) -> str:
    return plan.data.reshard if plan.data.shard == "parameters" else "never"
