"""One process that plays all replicas: what a plan whose replicas differ between exchanges must equal.

Every replica is an ordinary one-process model with its own optimizer, fed its part of the global batch in the plan's
microbatches. Between them stands the rule alone, in plain torch, for steps s = 1, 2, ... of `[data] sync = "local"`:

    exchange after s               s <= switch_step, or (s - switch_step) is a multiple of every
    average, and s <= switch_step  w_k := mean of all w_k
    nesterov                       D := mean of (anchor - w_k);   m := momentum m + D
                                   w_k := anchor - rate (D + momentum m)
    anchor                         the weights after the last exchange, at first those that all replicas begin with
    [codec]                        D := mean of what is sent of (anchor - w_k), by the codec's rule; an average is then
                                   w_k := anchor - D

and of exchanges that are merged some steps after they were sent the rules of `late_merges.py`.

Floating-point buffers (BatchNorm's running statistics) are averaged with every exchange that is merged at once, and
otherwise stay a replica's own; optimizers' states are never averaged. A
replica without targets makes no update in that step. The plan's average of the weights takes one term per exchange.
Nothing here is shared with `sync/`, so a mistake there cannot hide in its own answer.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from weft.blueprint import find_blueprint
from weft.parallel.zero.grouping import describe_parameters
from weft.plan.exchange.fragments import assign_fragments
from weft.plan.late_merges import merges_late, steps_to_verify, uses_delayed_averaging, uses_streaming
from weft.plan.plan import Average, Codec, Plan
from weft.verification.compression.exchanges import CodedExchanges
from weft.verification.compression.parts import CodedPart
from weft.verification.late_merges import DelayedMerges, StreamedMerges, mean_of
from weft.verification.one_process import Key, OneProcess, Recipe, trained_parameters

Weights = dict[str, Tensor]


class LocalReplicas:
    """Replicas that train on their own and exchange now and then, one after the other in one process."""

    rule, is_exact, is_streamed = "one process that plays all replicas", False, False
    instead_of = "synchronous training in one process"

    def __init__(self, model: nn.Module, plan: Plan, recipe: Recipe, coded: Sequence[CodedPart] = ()) -> None:
        """The model itself becomes the first replica. `coded`: what is compressed of the change of weights."""
        self.losses: list[float] = []
        self._data, self._average = plan.data, plan.average
        num_replicas = plan.num_replicas
        # The average is of what replicas exchange, so none of them keeps one of its own.
        alone, each = replace(plan, average=Average()), plan.axes.data_ranks // num_replicas
        models = [model, *(copy.deepcopy(model) for _ in range(num_replicas - 1))]
        self.replicas = [
            OneProcess(one, alone, recipe, data_ranks=range(number * each, (number + 1) * each))
            for number, one in enumerate(models)
        ]
        self._trained = [trained_parameters(one) for one in models]
        self._anchor = self._weights_of(0)
        self._momentum = {name: torch.zeros_like(weight) for name, weight in self._anchor.items()}
        self._exchanges = CodedExchanges(coded, plan.codec, num_replicas, num_turns=_num_under_way(plan))
        self._late: DelayedMerges | StreamedMerges | None = None
        if uses_delayed_averaging(plan):
            self._late = DelayedMerges(self._trained, plan.data, self._exchanges)
        elif uses_streaming(plan):
            parameters = describe_parameters(model, find_blueprint(model).blocks)
            fragment_of = assign_fragments(parameters, plan.data.fragments)
            self._late = StreamedMerges(self._trained, plan.data, self._exchanges, fragment_of)
        self._own: list[Weights] = []
        """The weights of each replica before the last step's exchange; none where there was no exchange."""
        self._before: Weights = {}
        """The weights after the exchange before that one."""
        self._agree = True
        self.means: Weights = {}
        """The averages so far; none where the plan keeps none, or before they begin."""

    def step(self, inputs: Any, targets: Any, *, updates: Sequence[bool] | None = None) -> float:
        """One step of every replica on its part of a global batch, and the exchange that may follow it; returns the
        mean loss over all of them. `updates`: which replicas make theirs, all unless given."""
        number = len(self.losses) + 1
        if self._average.decay and not self.means and number > self._average.start and self._agree:
            self.means = self._weights_of(0)
        for replica, update in zip(self.replicas, updates or [True] * len(self.replicas), strict=True):
            replica.step(inputs, targets, updates=[update])
        known = [(r.losses[-1], r.num_targets[0]) for r in self.replicas if r.num_targets[0]]
        count = sum(targets for _, targets in known)
        self.losses.append(sum(loss * targets for loss, targets in known) / count if count else math.nan)
        self._own, self._agree = [], False
        if self._late is not None and number > self._data.switch_step:
            self._late.after(number)
        elif number <= self._data.switch_step or (number - self._data.switch_step) % self._data.every == 0:
            self._exchange(is_plain=self._data.outer == "average" or number <= self._data.switch_step)
            for name, mean in self.means.items():
                self.means[name] = self._average.decay * mean + (1 - self._average.decay) * self._anchor[name]
            if isinstance(self._late, StreamedMerges):
                self._late.begin_from(self._anchor)
        return self.losses[-1]

    @property
    def returned(self) -> list[float | None]:
        return [one for replica in self.replicas for one in replica.returned]

    @property
    def whole_losses(self) -> list[float | None]:
        return [one for replica in self.replicas for one in replica.whole_losses]

    @property
    def num_targets(self) -> list[float]:
        return [one for replica in self.replicas for one in replica.num_targets]

    @property
    def backward_order(self) -> list[str]:
        return next((one.backward_order for one in self.replicas if one.backward_order), [])

    @property
    def final_weights(self) -> Weights:
        """Those that a run ends with: the mean of the replicas."""
        named = [dict(replica.model.named_parameters()) for replica in self.replicas]
        return {name: mean_of([one[name].detach() for one in named]) for name in named[0]}

    def tensors(self, *, is_drained: bool = True) -> Iterator[tuple[Key, Tensor]]:
        """All that can be compared after a step, of every replica."""
        for number, replica in enumerate(self.replicas):
            for key, tensor in replica.tensors(is_drained=is_drained):
                yield key._replace(replica=number), tensor
            for name, mean in self.means.items():
                yield Key("average", name, replica=number), mean

    def previous(self, key: Key) -> Tensor | None:
        return self.replicas[key.replica].previous(key)

    def at_exchange(self, key: Key) -> dict[str, Tensor]:
        """Of a weight, where the last step ended with an exchange: the replica's "own" before it, and the "anchor",
        what all of them had after the exchange before. Otherwise the "mean", which no replica should have."""
        if key.what != "weight" or key.name not in self._anchor:
            return {}
        if not self._own:
            return {"mean": mean_of([trained[key.name].detach() for trained in self._trained])}
        return {"own": self._own[key.replica][key.name], "anchor": self._before[key.name]}

    @torch.no_grad()
    def _exchange(self, *, is_plain: bool) -> None:
        self._own, self._before = [self._weights_of(number) for number in range(len(self.replicas))], self._anchor
        self._anchor = {}
        for name, old in self._before.items():
            changes = [old - own[name] for own in self._own]
            change = self._exchanges.replace_(
                name, mean_of(changes), changes, len(self.losses) - 1, divisor=len(changes)
            )
            new = old - change
            if not is_plain:
                self._momentum[name] = self._data.outer_momentum * self._momentum[name] + change
                new = old - self._data.outer_lr * (change + self._data.outer_momentum * self._momentum[name])
            self._anchor[name] = new
            for trained in self._trained:
                trained[name].copy_(new)
        for alike in zip(*(replica.model.buffers() for replica in self.replicas), strict=True):
            if alike[0].is_floating_point():
                mean = mean_of(alike)
                for buffer in alike:
                    buffer.copy_(mean)
        self._agree = True

    def _weights_of(self, number: int) -> Weights:
        return {name: parameter.detach().clone() for name, parameter in self._trained[number].items()}


def _num_under_way(plan: Plan) -> int:
    if not uses_delayed_averaging(plan):
        return 1
    assert isinstance(plan.data.delay, int)
    return math.ceil(plan.data.delay / plan.data.every)


def with_an_exchange(plan: Plan, *, num_steps: int) -> tuple[Plan, list[str]]:
    """A plan whose replicas exchange by their outer rule within so few steps, and a note if that is another plan."""
    data = plan.data
    if merges_late(plan):
        return _with_a_merge(plan, num_steps=num_steps)
    if plan.replica_axis is None or data.switch_step + data.every <= num_steps:
        return plan, []
    switch_step = min(data.switch_step, 1 if num_steps > 2 else 0)
    every = min(data.every, 2, num_steps - switch_step)
    after = f" after step {switch_step} instead of {data.switch_step}" if data.switch_step else ""
    note = f"replicas exchanged every {every} steps instead of {data.every}{after}, to be seen in {num_steps} steps"
    return replace(plan, data=replace(data, every=every, switch_step=switch_step)), [note]


def _with_a_merge(plan: Plan, *, num_steps: int) -> tuple[Plan, list[str]]:
    data = plan.data
    if isinstance(data.delay, int) and data.switch_step + data.every + data.delay <= num_steps:
        needed = steps_to_verify(plan)
        if needed <= num_steps:
            return plan, []
        return plan, [f"nothing that was sent after a merge is merged in {num_steps} steps; {needed} show that, too"]
    # What is sent after a merge must be merged too; in very few steps a first merge must do.
    switch_step = min(data.switch_step, 1 if num_steps > 5 else 0)
    left = num_steps - switch_step
    if uses_delayed_averaging(plan):
        every = min(data.every, max(1, left // 6))
        delay = min(data.delay if isinstance(data.delay, int) else left, max(1, (left + 1) // 2 - every))
        seen = replace(data, every=every, delay=delay)
    else:
        assert isinstance(data.delay, int)
        every = min(data.every, max(1, 2 * left // (5 if left >= 5 else 3)))
        delay = min(data.delay, every - 1, left - (2 if left >= 5 else 1) * every)
        seen = replace(data, every=every, delay=delay, switch_step=switch_step, fragments=min(data.fragments, every))
    changed = [
        f"{name} = {getattr(seen, name)} instead of {getattr(data, name)}"
        for name in ("every", "delay", "fragments", "switch_step")
        if getattr(seen, name) != getattr(data, name)
    ]
    notes = [f"replicas exchanged with {', '.join(changed)}, to be seen in {num_steps} steps"]
    needed = steps_to_verify(replace(plan, data=seen))
    if needed > num_steps:
        is_merged = seen.switch_step + seen.every + delay <= num_steps
        what = "that was sent after a merge is merged" if is_merged else "is merged"
        notes.append(f"nothing {what} in {num_steps} steps; {needed} show that, too")
    return replace(plan, data=seen), notes


def comparable(plan: Plan) -> Plan:
    """The plan as it is compared in float64: its codec left out where the sum depends on its order, in 16 bits. The
    change since the last exchange travels all the same, as it does for an outer step of rate 1 without momentum, which
    is the average."""
    if plan.codec.name != "half":
        return plan
    keeps_anchor = merges_late(plan) or plan.data.outer == "nesterov"
    data = plan.data if keeps_anchor else replace(plan.data, outer="nesterov")
    return replace(plan, codec=Codec(), data=data)
