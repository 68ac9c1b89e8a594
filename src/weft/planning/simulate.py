"""How long a schedule takes: its lists of actions simulated event by event, without running any of them.

Each rank does its list in order. A compute action waits for its message, which arrives `transfer_s` after it was sent;
messages do not queue for the wire. Updates wait for no other rank. Data ranks are taken to be in step, so that a gather
or a reduce costs its own time and no waiting. Nothing is rounded: whole numbers or fractions give exact times.
"""

from __future__ import annotations

from collections import deque
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
    ranks = [_Rank(number, actions, num_stages, kinds) for number, actions in enumerate(schedule)]
    arrivals: dict[_Message, float] = {}
    waiting: dict[_Message, _Rank] = {}
    runnable = deque(ranks)
    while runnable:
        rank = runnable.popleft()
        for message in rank.run(arrivals, transfer_s):
            if message in waiting:
                runnable.append(waiting.pop(message))
        if rank.waits_for is not None:
            waiting[rank.waits_for] = rank
    if waiting:
        stuck = "; ".join(f"{rank.here} waits for {_said(lost)}, which is never sent" for lost, rank in waiting.items())
        raise ValueError(f"this schedule cannot go on: {stuck}")
    return Timeline(spans=tuple(span for rank in ranks for span in rank.spans()), num_ranks=len(schedule))


class _Rank:
    """A rank's progress through its list of actions."""

    def __init__(
        self, number: int, actions: tuple[Action, ...], num_stages: int, kinds: dict[str, tuple[float, ...]]
    ) -> None:
        self.number, self.actions, self.num_stages, self.kinds = number, actions, num_stages, kinds
        self.place = 0
        self.now_s: float = 0
        self.starts_s: list[float] = []
        self.stops_s: list[float] = []
        self.posted: dict[_Message, int] = {}
        self.waits_for: _Message | None = None

    def run(self, arrivals: dict[_Message, float], transfer_s: float) -> list[_Message]:
        """Go on until a message is missing or the list ends; returns the messages that were sent."""
        sent: list[_Message] = []
        self.waits_for = None
        while self.place < len(self.actions):
            action = self.actions[self.place]
            stop_s = self.now_s
            if action.kind == "send":
                message = (action.stage, action.peer, action.microbatch)
                arrivals[message] = stop_s = self.now_s + transfer_s
                sent.append(message)
            elif action.kind == "receive":
                self.posted[action.peer, action.stage, action.microbatch] = self.place
            elif action.kind in self.kinds:
                source = source_of(action, self.num_stages)
                if source is not None and not self._receive((source, action.stage, action.microbatch), arrivals):
                    break
                stop_s = self.now_s + self.kinds[action.kind][action.stage]
            self.starts_s.append(self.now_s)
            self.stops_s.append(stop_s)
            if action.kind != "send":
                self.now_s = stop_s
            self.place += 1
        return sent

    def _receive(self, message: _Message, arrivals: dict[_Message, float]) -> bool:
        """Wait for the message; False if it has not even been sent yet."""
        if message not in self.posted:
            raise ValueError(f"{self.here} needs {_said(message)}, but posts no receive for it before")
        if message not in arrivals:
            self.waits_for = message
            return False
        posted = self.posted.pop(message)
        self.stops_s[posted] = max(self.starts_s[posted], arrivals[message])
        self.now_s = max(self.now_s, arrivals[message])
        return True

    @property
    def here(self) -> str:
        action = self.actions[self.place]
        return f"rank {self.number}, {action.kind} of microbatch {action.microbatch} on stage {action.stage},"

    def spans(self) -> list[Span]:
        return [
            Span(rank=self.number, action=action, start_s=start_s, stop_s=stop_s)
            for action, start_s, stop_s in zip(self.actions, self.starts_s, self.stops_s, strict=True)
        ]


def _said(message: _Message) -> str:
    source, target, microbatch = message
    return f"the message of microbatch {microbatch} from stage {source} to stage {target}"
