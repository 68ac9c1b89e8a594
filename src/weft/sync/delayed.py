"""Delayed averaging: replicas exchange what they changed, and go on training while it travels.

    replica 0   step 1  step 2  step 3  step 4  ...
                  │ change of step 1, under way │
    replica 1   step 1  step 2  step 3  step 4  ...      after step 1 + delay: own change out, mean change in

Every `every` steps a replica sends its change since the last time. `delay` steps later it puts the mean of all
replicas' changes in the place of its own:

    w := w + own change - mean change         (changes are old minus new, as a gradient is)

For SGD in every step this is Delayed Gradient Averaging: w - lr (g_i - g_{i-D} + mean g_{i-D}). Because updates are
delayed and not gradients, it holds for any optimizer. Replicas differ by what is under way and by nothing else: their
mean is the model that they would have if training stopped until all had arrived.

With a codec, what was not sent stays in the codec's residual, on the replica that computed it. PowerSGD learns from
what comes back, so there are as many of it as exchanges under way, and each serves in its turn.

What is kept, sharded as the weights are: the weights at the last sending (the *anchor*, to which every correction is
applied too), and for each exchange under way the own change and the mean or its message.

`delay = "auto"` begins with a short delay and changes it as exchanges turn out to take more or fewer steps
(`exchange/auto_delay.py`): in one step on all ranks, by a decision that all of them make from the same reports.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from weft.comm.objects import gather_values
from weft.plan.exchange.weight_exchange import REPORT_WORDS
from weft.plan.late_merges import FIRST_DELAY, exchanges_after
from weft.sync.exchange.auto_delay import AutoDelay, Report
from weft.sync.exchange.compressed_exchange import CompressedExchange
from weft.sync.late_merge import LateMergeSync, Sent

log = logging.getLogger("weft")


class DelayedSync(LateMergeSync):
    """A replica's own sync, and exchanges of which each puts the mean change in the place of the own one."""

    keeps_own = True

    def __init__(self, *given: Any, is_first_rank: bool = False, **named: Any) -> None:
        """As `LateMergeSync`; the first rank tells changes of a delay that is measured."""
        self.auto: AutoDelay | None = None
        self._is_first_rank = is_first_rank
        super().__init__(*given, **named)

    def _make_buffers(self) -> None:
        super()._make_buffers()
        learns = any(codec.learns_from_decoding for codec in self._compressed.codecs)
        self._turns: list[CompressedExchange] = [self._compressed] if learns else []
        """Codecs that learn from what comes back, one of them for each exchange under way."""
        self._free_turns: deque[int] = deque(range(len(self._turns)))
        """The places of those that no exchange under way uses, the longest free first."""
        self._last_end_s = 0.0
        """When the last step ended, where it matters."""
        self._exchanges.is_measured = self.auto is not None

    def _first_delay(self) -> int:
        if self._plan.data.delay != "auto":
            return super()._first_delay()
        self.auto = AutoDelay(FIRST_DELAY, every=self._plan.data.every)
        return self.auto.delay

    # The exchange.

    def _exchange_if_due(self) -> bool:
        if self.auto is None:
            return super()._exchange_if_due()
        waited_before_s, self._exchanges.step_s = self._exchanges.waited_s, self.auto.step_s
        is_merged = super()._exchange_if_due()
        now, waited_s = time.perf_counter(), self._exchanges.waited_s - waited_before_s
        self.auto.add_wait(waited_s)
        if self._last_end_s:
            self.auto.add_step(now - self._last_end_s - waited_s)
        self._last_end_s = now
        return is_merged

    def _due_buckets(self) -> Sequence[int] | None:
        return range(self.num_buckets) if exchanges_after(self._plan.data, self.steps_done) else None

    def _codecs_of_next(self) -> CompressedExchange:
        if not self._turns:
            return self._compressed
        if not self._free_turns:
            self._free_turns.append(len(self._turns))
            self._turns.append(self._make_compressed(self._kept_on))
        return self._turns[self._free_turns.popleft()]

    @property
    def further_compressed(self) -> Sequence[CompressedExchange]:
        return self._turns[1:]

    def _read_change(self, number: int, weights: torch.Tensor) -> None:
        anchor, change = self._anchors[number], weights
        torch.sub(anchor, weights, out=change)
        anchor.sub_(change)  # the weights just sent, but for a rounding that the merge takes back

    def _merge_bucket(self, number: int, sent: Sent) -> None:
        bucket, anchor = self._buckets[number], self._anchors[number]
        correction = sent.own[number][: bucket.numel].sub_(sent.mean[number][: bucket.numel])
        anchor.add_(correction)
        bucket.add(correction)
        self._add_norms(correction, anchor)

    def _after_merge(self, sent: Sent) -> None:
        if self._turns:
            self._free_turns.append(self._turns.index(sent.codecs))
        if self.auto is not None and sent.tail is not None:  # those read from a checkpoint tell nothing, on all ranks
            self.auto.add_exchange(sent.flight.needed_delay, sent.flight.num_phases)
            if self.auto.is_due(sent.step):
                self._decide(self.auto, sent.tail)

    # The delay that is measured.

    def _report(self, words: torch.Tensor) -> None:
        if self.auto is not None:
            longest_delay = self.delay + self.further_delay_that_fits()
            for word, value in zip(words, (*self.auto.findings(), longest_delay), strict=True):
                word.fill_(value)

    def _decide(self, auto: AutoDelay, tail: torch.Tensor) -> None:
        """Change the delay, if it should be another: all ranks come here in the same step, and know the same."""
        words = tail.view(self.num_replicas, -1)
        times_s, told = words[:, 0], words[:, REPORT_WORDS:]
        mine = [*told[:, :-1].amax(dim=0).tolist(), -float(told[:, -1].min())]
        mine.append(float(times_s.max() / times_s.min()) if bool((times_s > 0).all()) else 1.0)
        found = gather_values(mine, self._replica)
        needed_delay, waited, num_phases, least, slowest = (max(values) for values in zip(*found, strict=True))
        report = Report(
            needed_delay=int(needed_delay),
            waited=waited,
            num_phases=int(num_phases),
            longest_delay=-int(least),
            slowest=slowest,
        )
        before, text = self.delay, auto.decide(report, step=self.steps_done)
        self.delay = auto.delay
        if self.delay < before:
            self._exchanges.trim()
        if text and self._is_first_rank:
            log.warning("%s", text)

    # Between exchanges.

    def restart(self, *, steps_done: int) -> None:
        super().restart(steps_done=steps_done)
        if self.auto is not None:
            self.auto.restart(steps_done)
        for further in self._turns[1:]:
            further.restart()
        self._free_turns = deque(range(len(self._turns)))

    def own_tensors(self) -> dict[str, torch.Tensor]:
        found = super().own_tensors()
        for turn, further in enumerate(self._turns[1:], start=1):
            for name, tensor in further.tensors().items():
                kind, _, of = name.partition("/")
                found[f"{kind}-{turn}/{of}"] = tensor
        return found

    def state(self) -> dict[str, Any]:
        used = [self._turns.index(sent.codecs) for sent in self._queue] if self._turns else []
        turns = {"num_turns": len(self._turns), "free_turns": list(self._free_turns), "used_turns": used}
        return super().state() | turns | ({} if self.auto is None else {"auto": self.auto.state()})

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        del self._turns[max(state["num_turns"], 1) :]
        while len(self._turns) < state["num_turns"]:
            self._turns.append(self._make_compressed(self._kept_on))
        self._free_turns = deque(state["free_turns"])
        for sent, turn in zip(self._queue, state["used_turns"], strict=bool(self._turns)):
            sent.codecs = self._turns[turn]
        if self.auto is not None and "auto" in state:
            self.auto.load_state(state["auto"])
            self.delay = self.auto.delay
