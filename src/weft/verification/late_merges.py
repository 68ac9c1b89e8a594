"""The rules of exchanges that are merged steps after they were sent, in plain torch, for replicas of one process.

Delayed averaging, where each replica k has an anchor a_k of its own:

    sent after s                   s is a multiple of every:  D_k := a_k - w_k;   a_k := w_k
    merged after s + delay         w_k := w_k + D_k - mean of all D_k;   a_k := a_k + D_k - mean of all D_k

Streaming, where fragment q of F has an anchor A that all replicas share, and s counts from `switch_step`:

    sent after s                   s > 0 and s - floor(q every / F) is a multiple of every:  D_k := A - w_k
    merged after s + delay         average: A := A - D;  nesterov: m := momentum m + D;  A := A - rate (D + momentum m)
                                   w_k := mix w_k + (1 - mix) A,  with D the mean of all D_k

With a codec the mean is of what is sent of D_k, by the codec's rule.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from weft.plan.plan import Data
from weft.verification.compression.exchanges import CodedExchanges

Weights = dict[str, Tensor]


class DelayedMerges:
    """Delayed averaging between replicas."""

    def __init__(self, trained: Sequence[Mapping[str, Tensor]], data: Data, exchanges: CodedExchanges) -> None:
        """`trained`: the weights of every replica, which are changed in place."""
        self._trained, self._data, self._exchanges = trained, data, exchanges
        self._anchors = [{name: one.detach().clone() for name, one in each.items()} for each in trained]
        self._under_way: deque[tuple[int, list[Weights], Weights]] = deque()
        """After which step it is merged, every replica's change, and the mean change, of each exchange."""

    @torch.no_grad()
    def after(self, step: int) -> None:
        """Merge what was sent so many steps ago, and send what is due."""
        if self._under_way and self._under_way[0][0] == step:
            _, changes, mean = self._under_way.popleft()
            for replica, own in enumerate(changes):
                for name, change in own.items():
                    self._trained[replica][name].add_(change - mean[name])
                    self._anchors[replica][name].add_(change - mean[name])
        if step % self._data.every:
            return
        assert isinstance(self._data.delay, int)
        changes, mean, turn = [{} for _ in self._trained], {}, step // self._data.every - 1
        for name in self._anchors[0]:
            for replica, trained in enumerate(self._trained):
                changes[replica][name] = self._anchors[replica][name] - trained[name]
                self._anchors[replica][name] = trained[name].detach().clone()
            given = [own[name] for own in changes]
            mean[name] = self._exchanges.replace_(name, mean_of(given), given, step - 1, divisor=len(given), turn=turn)
        self._under_way.append((step + self._data.delay, changes, mean))


class StreamedMerges:
    """Outer steps of one fragment of the model at a time."""

    def __init__(
        self,
        trained: Sequence[Mapping[str, Tensor]],
        data: Data,
        exchanges: CodedExchanges,
        fragment_of: Mapping[str, int],
    ) -> None:
        """`trained`: the weights of every replica, which are changed in place. `fragment_of`: by name."""
        self._trained, self._data, self._exchanges, self._fragment_of = trained, data, exchanges, fragment_of
        self._momentum = {name: torch.zeros_like(one) for name, one in trained[0].items()}
        self.begin_from(trained[0])
        self._under_way: deque[tuple[int, Weights]] = deque()
        """After which step it is merged, and the mean change, of each fragment that was sent."""

    def begin_from(self, weights: Mapping[str, Tensor]) -> None:
        """All replicas have these weights now."""
        self._anchor = {name: one.detach().clone() for name, one in weights.items()}

    @torch.no_grad()
    def after(self, step: int) -> None:
        """Merge what was sent so many steps ago, and send the fragment that is due; what has no delay is merged too."""
        self._merge(step)
        data, since = self._data, step - self._data.switch_step
        assert isinstance(data.delay, int)
        for fragment in range(data.fragments):
            if since <= 0 or (since - math.floor(fragment * data.every / data.fragments)) % data.every:
                continue
            mean = {}
            for name, anchor in self._anchor.items():
                if self._fragment_of.get(name, 0) == fragment:
                    given = [anchor - trained[name] for trained in self._trained]
                    mean[name] = self._exchanges.replace_(name, mean_of(given), given, step - 1, divisor=len(given))
            self._under_way.append((step + data.delay, mean))
        self._merge(step)

    def _merge(self, step: int) -> None:
        data = self._data
        while self._under_way and self._under_way[0][0] == step:
            for name, change in self._under_way.popleft()[1].items():
                if data.outer == "nesterov":
                    self._momentum[name] = data.outer_momentum * self._momentum[name] + change
                    change = data.outer_lr * (change + data.outer_momentum * self._momentum[name])
                self._anchor[name] = self._anchor[name] - change
                for trained in self._trained:
                    trained[name].copy_(data.mix * trained[name] + (1 - data.mix) * self._anchor[name])


def mean_of(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(tensors)).mean(dim=0)
