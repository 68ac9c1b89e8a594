"""The choice among conflicting candidates: those that split most parameters in all.

Each layer has one role, so this is a maximum-weight independent set. Its connected components mostly have two or three
candidates; all subsets of a component are tried, one candidate at a time. Long chains fall apart as soon as one in
their middle is decided. After `MAX_TRIES` the largest candidate is taken first.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.parallel.tensor.discovery.candidates import Candidate
from weft.parallel.tensor.discovery.features import Layout, leaves

MAX_TRIES = 20_000
ACROSS_BLOCKS = 0.5
"""Weight of a parameter in a region of several blocks, which would have to stay on one pipeline stage."""

Neighbours = dict[int, set[int]]


def take_best(candidates: Sequence[Candidate], layouts: Sequence[Layout], blocks: Sequence[str]) -> list[Candidate]:
    """The compatible candidates of the largest weight; among equals, the earliest."""
    ordered = sorted(candidates, key=lambda one: one.order)
    search = _Search([_weight(candidate, blocks) for candidate in ordered], _neighbours(ordered, layouts))
    return [ordered[place] for place in sorted(search.best(frozenset(range(len(ordered))))[1])]


def _weight(candidate: Candidate, blocks: Sequence[str]) -> float:
    inside = {block for block in blocks for name in candidate.layers if name == block or name.startswith(f"{block}.")}
    return candidate.num_parameters * (ACROSS_BLOCKS if len(inside) > 1 else 1.0)


def _neighbours(candidates: Sequence[Candidate], layouts: Sequence[Layout]) -> Neighbours:
    """Conflicts between candidates: both want a layer or a parameter, or would split the same tensor."""
    wanted: dict[object, set[int]] = {}
    owner: dict[object, set[int]] = {}
    for place, candidate in enumerate(candidates):
        for wish in (*(("layer", name) for name in candidate.layers), *candidate.names):
            wanted.setdefault(wish, set()).add(place)
        for digit in candidate.digits:
            owner.setdefault(digit, set()).add(place)
    groups = list(wanted.values())
    groups += [{place for dim in one for leaf in leaves(dim) for place in owner.get(leaf, ())} for one in layouts]
    neighbours: Neighbours = {place: set() for place in range(len(candidates))}
    for group in groups:
        for place in group:
            neighbours[place] |= group - {place}
    return neighbours


class _Search:
    """A memoised search over sets of candidates."""

    def __init__(self, weights: Sequence[float], neighbours: Neighbours) -> None:
        self.weights = weights
        self.neighbours = neighbours
        self.known: dict[frozenset[int], tuple[float, frozenset[int]]] = {}
        self.num_tries = 0

    def best(self, left: frozenset[int]) -> tuple[float, frozenset[int]]:
        """The largest weight among the candidates left, and its candidates."""
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
        """Connected components."""
        groups, rest = [], set(left)
        while rest:
            group, border = set[int](), {min(rest)}
            while border:
                group |= border
                border = set().union(*(self.neighbours[place] for place in border)) & rest - group
            groups.append(frozenset(group))
            rest -= group
        return groups
