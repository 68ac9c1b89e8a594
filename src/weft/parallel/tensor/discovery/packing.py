"""Which candidates to take where they are in each other's way: those that share out most parameters in all.

Each layer has one role, so this is a packing problem. Candidates that are in each other's way form groups, most of
them of two or three; within a group all ways are tried, one candidate at a time, taken or not. Long chains fall apart
as soon as one in their midst is decided. A group that is still too large after `MAX_TRIES` takes the largest first.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.parallel.tensor.discovery.candidates import Candidate
from weft.parallel.tensor.discovery.features import Layout, leaves

MAX_TRIES = 20_000
ACROSS_BLOCKS = 0.5
"""What a parameter counts in a region of several blocks, which would have to stay on one stage of a pipeline."""

Neighbours = dict[int, set[int]]


def take_best(candidates: Sequence[Candidate], layouts: Sequence[Layout], blocks: Sequence[str]) -> list[Candidate]:
    """The candidates that go together best; where several do alike, the earliest."""
    ordered = sorted(candidates, key=lambda one: one.order)
    neighbours = _neighbours(ordered, layouts)
    weights = [_weight(candidate, blocks) for candidate in ordered]
    search = _Search(weights, neighbours)
    return [ordered[place] for place in sorted(search.best(frozenset(range(len(ordered))))[1])]


def _weight(candidate: Candidate, blocks: Sequence[str]) -> float:
    inside = {block for block in blocks for name in candidate.layers if name == block or name.startswith(f"{block}.")}
    return candidate.num_parameters * (ACROSS_BLOCKS if len(inside) > 1 else 1.0)


def _neighbours(candidates: Sequence[Candidate], layouts: Sequence[Layout]) -> Neighbours:
    """Who is in whose way: both want a layer or a parameter, or would share something out in one tensor."""
    wanted: dict[object, set[int]] = {}
    owner: dict[object, set[int]] = {}
    for place, candidate in enumerate(candidates):
        for what in (*(("layer", name) for name in candidate.layers), *candidate.names):
            wanted.setdefault(what, set()).add(place)
        for digit in candidate.digits:
            owner.setdefault(digit, set()).add(place)
    groups = list(wanted.values())
    for layout in layouts:
        groups.append({place for dim in layout for leaf in leaves(dim) for place in owner.get(leaf, ())})
    neighbours: Neighbours = {place: set() for place in range(len(candidates))}
    for group in groups:
        if len(group) > 1:
            for place in group:
                neighbours[place] |= group - {place}
    return neighbours


class _Search:
    """Tries what to take."""

    def __init__(self, weights: Sequence[float], neighbours: Neighbours) -> None:
        self.weights = weights
        self.neighbours = neighbours
        self.known: dict[frozenset[int], tuple[float, frozenset[int]]] = {}
        self.num_tries = 0

    def best(self, left: frozenset[int]) -> tuple[float, frozenset[int]]:
        """The most that can be taken of those that are left, and which."""
        total, taken = 0.0, frozenset[int]()
        for group in self._groups(left):
            weight, some = self._best_of(group)
            total, taken = total + weight, taken | some
        return total, taken

    def _best_of(self, group: frozenset[int]) -> tuple[float, frozenset[int]]:
        if group not in self.known:
            self.num_tries += 1
            first = min(group, key=lambda place: (-self.weights[place], place))
            weight, taken = self.best(group - self.neighbours[first] - {first})
            found = weight + self.weights[first], taken | {first}
            if len(group) > 1 and self.num_tries < MAX_TRIES:
                without = self.best(group - {first})
                found = without if without[0] > found[0] else found
            self.known[group] = found
        return self.known[group]

    def _groups(self, left: frozenset[int]) -> list[frozenset[int]]:
        """Those that have nothing to do with each other."""
        groups, rest = [], set(left)
        while rest:
            waiting, group = [min(rest)], set()
            while waiting:
                place = waiting.pop()
                if place not in group:
                    group.add(place)
                    waiting += self.neighbours[place] & rest
            groups.append(frozenset(group))
            rest -= group
        return groups
