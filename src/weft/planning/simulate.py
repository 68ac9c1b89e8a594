"""The time that a schedule takes: its lists of actions simulated event by event, without running any of them.

Each rank does its list in order. A compute action waits for its message, which arrives `transfer_s` after it was sent;
messages do not queue for the wire. Updates wait for no other rank. Data ranks are taken to be in step, so that a gather
or a reduce costs its own time and no waiting. Nothing is rounded: whole numbers or fractions give exact times.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, fields

from weft.plan.pipeline.actions import Action, Schedule
from weft.plan.pipeline.communication import source_of
from weft.plan.pipeline.timeline import Span, Timeline

Seconds = float | tuple[float, ...]
"""One time for all stages, or one per stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """Seconds that each kind of action keeps its rank; a send, a receive and a release take none."""

    forward_s: Seconds
    backward_s: Seconds
    input_grad_s: Seconds
    weight_grad_s: Seconds
    update_s: Seconds = 0
    gather_s: Seconds = 0
    reduce_s: Seconds = 0

    def of_kinds(self, num_stages: int) -> dict[str, tuple[float, ...]]:
        """One duration per stage, by kind of action."""
        kinds = {}
        for field in fields(self):
            value = getattr(self, field.name)
            each = value if isinstance(value, tuple) else (value,) * num_stages
            if len(each) != num_stages:
                raise ValueError(f"{field.name} has {len(each)} durations for {num_stages} stages; give one for each")
            kinds[field.name.removesuffix("_s").replace("_", "-")] = each
        return kinds


_Message = tuple[int, int, int]
"""Sending stage, receiving stage, microbatch."""


def simulate(schedule: Schedule, durations: Durations, *, transfer_s: float = 0) -> Timeline:
    """The start and end of every action of the schedule, if all ranks begin at 0.

    A send's span is the transfer; a receive's lasts from where it is posted until the message arrives.
    """
    num_stages = 1 + max((action.stage for actions in schedule for action in actions), default=0)
    kinds = durations.of_kinds(num_stages)
    times_s: list[list[list[float]]] = [[] for _ in schedule]
    arrivals: dict[_Message, float] = {}
    sent: list[_Message] = []

    def play(rank: int) -> Iterator[tuple[_Message, str]]:
        """Go through a rank's list; yields each message that has to be sent first, and by what it is needed."""
        now_s: float = 0
        posted: dict[_Message, list[float]] = {}
        for action in schedule[rank]:
            stop_s = now_s
            if action.kind == "send":
                sent.append((action.stage, action.peer, action.microbatch))
                arrivals[sent[-1]] = stop_s = now_s + transfer_s
            elif action.kind in kinds:
                source = source_of(action, num_stages)
                if source is not None:
                    message = (source, action.stage, action.microbatch)
                    if message not in posted:
                        raise ValueError(
                            f"{_named(rank, action)} needs {_said(message)}, but posts no receive for it before"
                        )
                    while message not in arrivals:
                        yield message, _named(rank, action)
                    receive = posted.pop(message)
                    receive[1] = max(receive[0], arrivals[message])
                    now_s = max(now_s, arrivals[message])
                stop_s = now_s + kinds[action.kind][action.stage]
            times_s[rank].append([now_s, stop_s])
            if action.kind == "receive":
                posted[action.peer, action.stage, action.microbatch] = times_s[rank][-1]
            elif action.kind != "send":
                now_s = stop_s

    runnable = deque(play(rank) for rank in range(len(schedule)))
    waiting: dict[_Message, tuple[Iterator[tuple[_Message, str]], str]] = {}
    while runnable:
        rank = runnable.popleft()
        needed = next(rank, None)
        runnable.extend(waiting.pop(message)[0] for message in sent if message in waiting)
        sent.clear()
        if needed is not None:
            waiting[needed[0]] = rank, needed[1]
    if waiting:
        stuck = (f"{who} waits for {_said(message)}, which is never sent" for message, (_, who) in waiting.items())
        raise ValueError("this schedule cannot go on: " + "; ".join(stuck))
    spans = (
        Span(rank=rank, action=action, start_s=start_s, stop_s=stop_s)
        for rank, actions in enumerate(schedule)
        for action, (start_s, stop_s) in zip(actions, times_s[rank], strict=True)
    )
    return Timeline(spans=tuple(spans), num_ranks=len(schedule))


def _named(rank: int, action: Action) -> str:
    return f"rank {rank}, {action.kind} of microbatch {action.microbatch} on stage {action.stage},"


def _said(message: _Message) -> str:
    source, target, microbatch = message
    return f"the message of microbatch {microbatch} from stage {source} to stage {target}"
