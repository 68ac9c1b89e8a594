"""Streaming DiLoCo: replicas exchange fragments of the model in turn, and merge each some steps later.

    every = 6, fragments = 3, delay = 1        | a fragment is sent,  * it is merged

    step         1  2  3  4  5  6  7  8  9 10 11 12
    fragment 0                  |  *              |
    fragment 1      |  *              |  *
    fragment 2            |  *              |  *

As in local.py replicas make local steps and then an outer step on the weights of the last exchange (the *anchor*), but
each fragment has steps of its own. So an exchange is as many times smaller as there are fragments, and with a delay it
travels while the next steps compute. What arrives is mixed with what the replica has computed meanwhile:

    sent      D_k := anchor - w_k                       of the weights at that moment
    merged    anchor := outer step on the mean of D     the same on all replicas, to the bit
              w_k := mix w_k + (1 - mix) anchor

With a `mix` of 0 the steps since the sending are lost; with more, replicas differ after merges, by a share of them.
One fragment, without delay and mix, is DiLoCo as `LocalSync` makes it.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.plan.late_merges import fragment_after
from weft.sync.exchange.outer import average_, nesterov_
from weft.sync.late_merge import LateMergeSync, Sent


class StreamingSync(LateMergeSync):
    """A replica's own sync, and outer steps of one fragment at a time."""

    def _due_buckets(self) -> Sequence[int] | None:
        fragment = fragment_after(self._plan.data, self.steps_done)
        if fragment is None:
            return None
        return [number for number, bucket in enumerate(self._buckets) if bucket.fragment == fragment]

    def _merge_bucket(self, number: int, sent: Sent) -> None:
        bucket, anchor, data = self._buckets[number], self._anchors[number], self._plan.data
        mean = sent.mean[number][: bucket.numel]
        if data.outer == "nesterov":
            nesterov_(anchor, mean, self._momenta[number], rate=data.outer_lr, beta=data.outer_momentum)
        else:
            average_(anchor, mean)
        own = bucket.read_into(mean)  # its memory is not needed any more
        own.sub_(anchor)
        self._add_norms(own, anchor)
        bucket.write_from(own.mul_(data.mix).add_(anchor))

    def _after_merge(self, sent: Sent) -> None:
        if self._plan.data.fragments > 1:  # else memory for all fragments would be kept, though they take turns
            self._exchanges.forget_exact()
