"""The rule of each codec, written a second time: one tensor on all replicas at once, in plain torch and float64.

What a plan with a codec must compute follows from formulas alone, for replica k's values g_k of a tensor, flattened:

    feedback     x = g + memory e;   sent = C(x);   e := x - sent                 (topk, onebit, powersgd)
    dgc          u := momentum u + g,  v := memory v + u                          (Nesterov: u := momentum (u + g),
                 sent = C(v);  v := v - sent;  u := 0 where something was sent     v := memory v + u + g)
    C of topk    the k entries of largest |x|, the first of equal ones, and no zeros
    C of dgc     the same, of entries that reach a threshold, which is that of a strided sample
    C of onebit  the mean of the entries of the same sign in the same column
    C of qsgd, C of terngrad   by chance one of two neighbouring values, such that the mean is x; without feedback
    powersgd     P := orthonormal(sum of M_k Q);  Q := sum of M_k^T P;   sum = P Q^T;   e_k := M_k - P Q^T / replicas
                 a column of Q that is nothing but rounding stays as it was before
    sign         the sign that at least half of the replicas have

and the exchange gives the sum over replicas of what was sent. Nothing is packed here and nothing is shared with
`codecs/`, not even the random numbers, so a mistake there cannot hide in its own answer. Shapes, densities and
thresholds of size are the plan's (`plan/exchange`).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from weft.plan.exchange.warm_up import density, is_dense
from weft.plan.plan import Codec
from weft.verification.compression.random_words import random_key, random_words

_QSGD_BLOCK = 512
_MIN_SAMPLED = 4096
_SAMPLED_SHARE = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A tensor as replicas exchange it, or the range of its elements that one rank of each of them has."""

    name: str
    num_columns: int
    """Elements of the tensor per index of its first dim."""
    momentum: float = 0.0
    """dgc: the optimizer's momentum of this tensor."""
    is_nesterov: bool = False
    first_replica: int = 0
    """Number of the first replica that the rule is for, from which its random numbers are drawn: workers of servers
    have a rule each."""


class Rule:
    """One tensor's exchanges, on all replicas, with all that they keep."""

    def __init__(self, codec: Codec, part: Part, num_replicas: int) -> None:
        self.codec, self.part, self.num_replicas = codec, part, num_replicas

    def exchange(self, step: int, given: Sequence[Tensor]) -> Tensor:
        """The sum over replicas of what is sent in a step, counted from 0, of their flat values."""
        assert len(given) == self.num_replicas
        if is_dense(self.codec, step):
            return torch.stack(list(given)).sum(dim=0)
        return self.compress(step, given)

    def num_bits(self, step: int, x: Tensor) -> int:
        """Of an entry that topk or dgc sends: the plan's, but all where so many are sent that they travel as a sum."""
        size, bits = x.element_size(), self.codec.bits
        entry_bytes = 2 + (size if bits == 32 else bits / 8)
        return 32 if self.num_replicas * density(self.codec, step) * entry_bytes >= 2 * size else bits

    @abstractmethod
    def compress(self, step: int, given: Sequence[Tensor]) -> Tensor:
        """The same, where the compression has set in."""

    def random_numbers(self, step: int, replica: int, numel: int) -> Tensor:
        """One number per element, uniform in [0, 1)."""
        words = random_words(self.part.name, step, self.part.first_replica + replica, numel)
        return torch.from_numpy((words >> 8).astype(np.float64)) / 2.0**24


class Unbiased(Rule):
    """qsgd and terngrad: replicas are independent, and nothing is kept."""

    def compress(self, step: int, given: Sequence[Tensor]) -> Tensor:
        draw = _qsgd if self.codec.name == "qsgd" else _terngrad
        rounded = [
            draw(x, self.random_numbers(step, replica, x.numel()).to(x), self.codec) for replica, x in enumerate(given)
        ]
        return torch.stack(rounded).sum(dim=0)


class Sign(Rule):
    """A vote: +1 where at least half of the replicas have a value that is not negative, else -1."""

    def compress(self, step: int, given: Sequence[Tensor]) -> Tensor:
        votes = sum((x >= 0).long() for x in given)
        return torch.where(2 * torch.as_tensor(votes) >= self.num_replicas, 1.0, -1.0).to(given[0])


class Feedback(Rule):
    """What is not sent is added to the next exchange."""

    def __init__(self, codec: Codec, part: Part, num_replicas: int) -> None:
        super().__init__(codec, part, num_replicas)
        self.kept: list[Tensor] | None = None
        """Of each replica; None before the first exchange."""

    def compress(self, step: int, given: Sequence[Tensor]) -> Tensor:
        kept = self.kept or [torch.zeros_like(x) for x in given]
        wanted = [x + self.codec.memory * e for x, e in zip(given, kept, strict=True)]
        total, self.kept = self.send(step, wanted)
        return total

    def send(self, step: int, wanted: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """The sum of what is sent, and what each replica keeps."""
        sent = [self.send_one(step, x) for x in wanted]
        return torch.stack(sent).sum(dim=0), [x - s for x, s in zip(wanted, sent, strict=True)]

    def send_one(self, step: int, x: Tensor) -> Tensor:
        raise NotImplementedError


class TopK(Feedback):
    def send_one(self, step: int, x: Tensor) -> Tensor:
        chosen = _largest(x, num_sent(self.codec, x.numel(), step))
        return _rounded(x, chosen, self.num_bits(step, x))


class OneBit(Feedback):
    def send_one(self, step: int, x: Tensor) -> Tensor:
        columns = self.part.num_columns
        num_rows = x.numel() // columns
        num_full = num_rows * columns if num_rows > 2 else 0  # two means per column are no less than two rows
        matrix, sent = x[:num_full].view(-1, columns), torch.zeros_like(x[:num_full]).view(-1, columns)
        for group in (matrix >= 0, matrix < 0):
            means = (matrix * group).sum(dim=0) / group.sum(dim=0).clamp(min=1)
            sent += group * means
        return torch.cat([sent.flatten(), x[num_full:]])


class PowerSgd(Feedback):
    """The sum of all replicas is approximated by one product of two thin factors."""

    def __init__(self, codec: Codec, part: Part, num_replicas: int) -> None:
        super().__init__(codec, part, num_replicas)
        self.start: Tensor | None = None

    def send(self, step: int, wanted: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        total, columns = torch.stack(list(wanted)).sum(dim=0), self.part.num_columns
        rows = total.numel() // columns
        if not rows:
            return total, [torch.zeros_like(x) for x in wanted]
        full = rows * columns
        matrix = total[:full].view(rows, columns)
        rank = min(self.codec.rank, rows, columns)
        start = self._first_start(columns, rank).to(total) if self.start is None else self.start
        left = _orthonormal(matrix @ start)
        right = matrix.T @ left
        product = (left @ right.T).flatten()
        sizes = right.abs().amax(dim=0)
        self.start = torch.where(sizes <= _rounding(sizes) * sizes.max(), start, right)
        rest = [torch.cat([x[:full] - product / self.num_replicas, torch.zeros_like(x[full:])]) for x in wanted]
        return torch.cat([product, total[full:]]), rest

    def _first_start(self, columns: int, rank: int) -> Tensor:
        """Numbers of mean 0 and variance 1, the same on all replicas: sums of four random bytes."""
        words = random_words(self.part.name, 0, 0, columns * rank)
        sums = torch.from_numpy(words.view(np.uint8).reshape(-1, 4).sum(axis=1, dtype=np.float64))
        return ((sums - 4 * 127.5) / math.sqrt(4 * (256**2 - 1) / 12)).view(columns, rank)


class Dgc(Rule):
    """Momentum and accumulation before the choice of what is sent."""

    def __init__(self, codec: Codec, part: Part, num_replicas: int) -> None:
        super().__init__(codec, part, num_replicas)
        self.momenta: list[Tensor] = []
        self.kept: list[Tensor] = []

    def compress(self, step: int, given: Sequence[Tensor]) -> Tensor:
        if not self.kept:
            self.momenta, self.kept = ([torch.zeros_like(g) for g in given] for _ in range(2))
        return torch.stack([self._send(step, replica, g) for replica, g in enumerate(given)]).sum(dim=0)

    def _send(self, step: int, replica: int, g: Tensor) -> Tensor:
        u, v = self.momenta[replica], self.codec.memory * self.kept[replica]
        if self.part.is_nesterov:
            u = self.part.momentum * (u + g)
            v = v + u + g
        else:
            u = self.part.momentum * u + g
            v = v + u
        chosen = self._chosen(step, replica, v)
        sent = _rounded(v, chosen, self.num_bits(step, v))
        self.momenta[replica] = u.masked_fill(chosen, 0.0) if self.codec.masking else u
        self.kept[replica] = v - sent
        return sent

    def _chosen(self, step: int, replica: int, v: Tensor) -> Tensor:
        """The entries that reach the threshold of the sample, at most k of them."""
        numel = v.numel()
        k = num_sent(self.codec, numel, step)
        num_sampled = min(numel, max(_MIN_SAMPLED, numel // _SAMPLED_SHARE))
        stride = numel // num_sampled
        first = random_key(self.part.name, step, self.part.first_replica + replica) % stride
        sample = v.abs()[first::stride][:num_sampled].sort(descending=True).values
        place = -(-5 * num_sampled * k // (4 * numel))  # a quarter more than needed
        threshold = 0.0 if k >= numel else float(sample[min(place, num_sampled) - 1])
        return _largest(v.masked_fill(v.abs() < threshold, 0.0), k)


RULES: dict[str, Callable[[Codec, Part, int], Rule]] = {
    "topk": TopK,
    "dgc": Dgc,
    "onebit": OneBit,
    "sign": Sign,
    "qsgd": Unbiased,
    "terngrad": Unbiased,
    "powersgd": PowerSgd,
}
"""All codecs but "half", whose sums in 16 bits depend on their order."""


def num_sent(codec: Codec, numel: int, step: int) -> int:
    """Entries that topk and dgc send of a tensor."""
    return max(1, min(numel, int(density(codec, step) * numel + 0.5)))


def _largest(x: Tensor, number: int) -> Tensor:
    """Where the entries of largest size are, of equal ones the first; zeros are not among them."""
    order = x.abs().sort(descending=True, stable=True).indices
    return torch.zeros_like(x, dtype=torch.bool).index_fill_(0, order[:number], True) & (x != 0)


def _rounded(x: Tensor, chosen: Tensor, bits: int) -> Tensor:
    """The chosen entries in as many bits, zero elsewhere."""
    values, sent = x[chosen], torch.zeros_like(x)
    if not values.numel():
        return sent
    if bits == 8:
        unit = values.abs().max() / 127
        values = (values / unit).round() * unit
    elif bits == 2:
        sizes = values.abs()
        is_large = sizes > sizes.mean()
        for group in (is_large, ~is_large):
            if group.any():
                sizes = torch.where(group, values[group].abs().mean(), sizes)
        values = torch.where(values < 0, -sizes, sizes)
    sent[chosen] = values
    return sent


def _orthonormal(columns: Tensor) -> Tensor:
    """Each column without what it has of those before it, of length 1; zero if that is nothing but rounding."""
    made: list[Tensor] = []
    for column in columns.unbind(dim=1):
        left = column
        for _ in range(2):  # the second time removes what rounding left
            for other in made:
                left = left - (other @ left) * other
        size = left.norm()
        made.append(left / size if size > _rounding(column) * column.norm() else torch.zeros_like(left))
    return torch.stack(made, dim=1)


def _rounding(values: Tensor) -> float:
    """What is at most this part of the largest is rounding."""
    return 64 * torch.finfo(values.dtype).eps


def _qsgd(x: Tensor, chance: Tensor, codec: Codec) -> Tensor:
    num_steps = codec.levels // 2 - 1
    sent = []
    for one, r in zip(x.split(_QSGD_BLOCK), chance.split(_QSGD_BLOCK), strict=True):
        norm = one.norm()
        levels = (num_steps * one.abs() / norm + r).floor() if norm > 0 else torch.zeros_like(one)
        sent.append(norm * one.sign() * levels / num_steps)
    return torch.cat(sent)


def _terngrad(x: Tensor, chance: Tensor, codec: Codec) -> Tensor:
    del codec
    largest = x.abs().max()
    return largest * x.sign() * (chance * largest < x.abs())


def make_rule(codec: Codec, part: Part, num_replicas: int) -> Rule:
    return RULES[codec.name](codec, part, num_replicas)
