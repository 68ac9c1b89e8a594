"""A small sample of all combinations that covers every feasible pair of values, found greedily.

Most faults of combinations need only two values, and pairwise coverage needs tens of rows where all combinations are
millions. A row is a choice of one value for every field; `settle` turns it into what would really run (a field that has
no effect is reset to its default) or rejects it. Coverage is counted on settled rows.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence

Row = dict[str, object]
Pair = tuple[tuple[str, object], tuple[str, object]]
Settle = Callable[[Row], Row | None]

_CANDIDATES = 60
_ATTEMPTS = 1000
_FREE_ATTEMPTS = 400
"""After this many, half of the fields get their first value: a pair that combines with few values needs plain rows."""


def sample(
    fields: Mapping[str, Sequence[object]],
    settle: Settle,
    *,
    together: Sequence[Row] = ({},),
    cost: Callable[[Row], float] = lambda row: 1.0,
    begun: Sequence[Row] = (),
    seed: int = 0,
) -> tuple[list[Row], list[Pair]]:
    """Rows that cover every feasible pair of values, and the pairs for which no row was found.

    `together` lists the allowed joint values of some fields, such as sizes with a given product.
    Rows are chosen by the number of new pairs they cover divided by their `cost`; `begun` are there already.
    """
    generator = random.Random(seed)
    wanted = [
        ((one, left), (other, right))
        for one, other in itertools.combinations(fields, 2)
        for left in fields[one]
        for right in fields[other]
    ]
    left_over = dict.fromkeys(wanted)  # ordered, unlike a set: the sample must be the same in every process
    rows = list(begun)
    for pair in (pair for row in rows for pair in pairs_of(row)):
        left_over.pop(pair, None)
    impossible: list[Pair] = []
    while left_over:
        pair = next(iter(left_over))
        found = _candidates(fields, settle, together, pair, generator)
        if not found:
            impossible.append(pair)
            del left_over[pair]
            continue
        best = max(found, key=lambda row: sum(p in left_over for p in pairs_of(row)) / cost(row))
        rows.append(best)
        for covered in pairs_of(best):
            left_over.pop(covered, None)
    met = {pair for row in rows for pair in pairs_of(row)}
    return rows, [pair for pair in impossible if pair not in met]  # found later in another row


def pairs_of(row: Row) -> list[Pair]:
    return list(itertools.combinations(row.items(), 2))


def _candidates(
    fields: Mapping[str, Sequence[object]],
    settle: Settle,
    together: Sequence[Row],
    pair: Pair,
    generator: random.Random,
) -> list[Row]:
    """Random settled rows that contain a pair, in the order of the fields."""
    fixed = dict(pair)
    choices = [choice for choice in together if all(choice.get(name, value) == value for name, value in pair)]
    found: list[Row] = []
    for attempt in range(_ATTEMPTS if choices else 0):
        if attempt >= _FREE_ATTEMPTS and found:
            break
        plain = 0.5 if attempt >= _FREE_ATTEMPTS else 0.0
        drawn = {
            name: values[0] if generator.random() < plain else generator.choice(values)
            for name, values in fields.items()
        }
        settled = settle(drawn | generator.choice(choices) | fixed)
        if settled is not None and all(settled[name] == value for name, value in pair):
            found.append({name: settled[name] for name in fields})
            if len(found) == _CANDIDATES:
                break
    return found
