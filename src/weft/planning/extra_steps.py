"""How many times as many steps a method needs as synchronous training to the same loss: measurements, as data.

A relaxed method makes a step shorter and a step's progress smaller. `factor` is steps of the method over steps of
synchronous dense training, both to the same loss; a method whose accuracy at equal steps was no worse has 1. Infinite:
it did not come near in such a study, is refused, or lies beyond all that was run.

Each entry says how far it is known: measured, between measured points, or unknown. An unknown one gets the factor of
the method without its codec, or 1, and is ranked as if it needed 1.5 times as many steps.

Delayed averaging gets worse with what replicas differ by: its delay and the steps that travel together. Its factor is
read off a line through the runs. Streaming was run with one delay and one number of
fragments, whose factor is taken for shorter and similar delays, and for fewer fragments.

Small studies, of hundreds of steps: they tell methods apart, and their size shrinks in longer runs. To add a
measurement, replace an entry, with its source.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

OptimizerKind = Literal["adaptive", "sgd"]
"""Which optimizer trains: AdamW and others that divide by the size of gradients, or SGD with momentum."""

Method = Literal["all-reduce", "local", "diloco", "streaming", "delayed"]

Confidence = Literal["measured", "between", "unknown"]
"""Run with these settings; between settings that were run, or near them; not run."""

LOCAL_EVERY, OUTER_EVERY = 10, 20
"""Intervals of local steps, and of outer steps, that stand for these methods: those that were run."""

FRAGMENTS = 4
"""The number of fragments in which streaming sends the model: as it was run."""

UNKNOWN_MARGIN = 1.5
"""A method whose steps are unknown must be this many times as fast to be advised instead of a known one."""

STREAMING_DELAY, LONGEST_STREAMING_DELAY = 4, 8
"""The delay with which streaming was run, and the longest that is taken to be near it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraSteps:
    """What is known of a method's steps."""

    factor: float
    finding: str
    """The measurement in a few words."""
    source: str = ""
    """The file it is in."""
    confidence: Confidence = "measured"

    @property
    def ranking_factor(self) -> float:
        """The factor that counts for the ranking."""
        return self.factor * (UNKNOWN_MARGIN if self.confidence == "unknown" else 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayedRuns:
    """The runs of delayed averaging with one kind of optimizer."""

    study: str
    source: str
    factors: tuple[tuple[int, float], ...]
    """Factor by the steps that replicas differ by, which are `delay` + `every` - 1; 0: synchronous training."""
    pairs: Mapping[str, tuple[tuple[int, int], ...]]
    """(every, delay) of the runs, by codec; what is between was not run."""
    findings: Mapping[int, str] = field(default_factory=dict)
    """By the steps that replicas differ by, where more is to be said than the factor."""

    @property
    def longest_every(self) -> int:
        return max(every for pairs in self.pairs.values() for every, _ in pairs)

    @property
    def most_steps_apart(self) -> int:
        return self.factors[-1][0]

    def most_steps_apart_with(self, codec: str) -> int:
        return max(every - 1 + delay for every, delay in self.pairs[codec])


_DIGITS = "benchmarks/results/2026-11-16-compression.md"
_GPT = "benchmarks/results/2026-11-18-slow-networks.md"
_LOCAL = "docs/methods/local-sgd.md"
_DELAYED = "benchmarks/results/2026-11-18-delayed.md"
_EXACT = ExtraSteps(factor=1.0, finding="synchronous: the results of one process", source="docs/design.md")


def _digits(points: str, factor: float = 1.0) -> ExtraSteps:
    return ExtraSteps(factor=factor, finding=f"{points} points (digits, SGD)", source=_DIGITS)


def _gpt(factor: float, settings: str = "") -> ExtraSteps:
    steps = "not reached in 1.7 ×" if math.isinf(factor) else f"{factor:g} ×"
    finding = f"{steps} the steps to a loss{settings and ', '}{settings} (byte GPT, AdamW)"
    return ExtraSteps(factor=factor, finding=finding, source=_GPT)


def _no_use(finding: str, source: str = "docs/methods/compression.md") -> ExtraSteps:
    """Never advised, for a reason that needs no run."""
    return ExtraSteps(factor=math.inf, finding=finding, source=source, confidence="unknown")


KNOWN: dict[tuple[OptimizerKind, Method, str], ExtraSteps] = {
    ("sgd", "all-reduce", ""): _EXACT,
    ("sgd", "all-reduce", "topk 0.01"): _digits("+0.1 ± 0.6"),
    ("sgd", "all-reduce", "dgc 0.001"): _digits("−1.6 ± 1.1", math.inf),
    ("sgd", "all-reduce", "onebit"): _digits("+1.0 ± 0.7"),
    ("sgd", "all-reduce", "sign"): _digits("−5.9 ± 0.9", math.inf),
    ("sgd", "all-reduce", "qsgd, 256 levels"): _digits("+0.1 ± 0.5"),
    ("sgd", "all-reduce", "qsgd, 4 levels"): _digits("−80", math.inf),
    ("sgd", "all-reduce", "terngrad"): _digits("+1.2 ± 0.8"),
    ("sgd", "all-reduce", "powersgd, rank 4"): _digits("+0.3 ± 0.6"),
    ("sgd", "local", ""): ExtraSteps(
        factor=1.0, finding="loss as synchronous, every 8 (digits, SGD)", source=_LOCAL, confidence="between"
    ),
    ("adaptive", "all-reduce", ""): _EXACT,
    ("adaptive", "all-reduce", "bf16"): ExtraSteps(
        factor=1.0, finding="0.99 × the steps in fp16 (byte GPT, AdamW)", source=_GPT, confidence="between"
    ),
    ("adaptive", "all-reduce", "topk 0.01"): ExtraSteps(
        factor=math.inf, finding="only run with 2 bits: not reached in 1.7 ×", source=_GPT, confidence="unknown"
    ),
    ("adaptive", "all-reduce", "topk 0.01, 2 bits"): _gpt(math.inf),
    ("adaptive", "all-reduce", "dgc 0.001"): _no_use("refused: for SGD with momentum", "docs/refusals.md"),
    ("adaptive", "all-reduce", "sign"): _no_use("no use: Adam of ±1"),
    ("adaptive", "all-reduce", "terngrad"): _no_use("no: noise as large as the largest entry"),
    ("adaptive", "all-reduce", "qsgd, 4 levels"): _no_use("no: noise enters the second moment"),
    ("adaptive", "all-reduce", "onebit"): _gpt(math.inf),
    ("adaptive", "all-reduce", "powersgd, rank 4"): _gpt(1.44),
    ("adaptive", "local", ""): _gpt(1.18, "every 10"),
    ("adaptive", "local", "half"): _gpt(1.21, "every 10"),
    ("adaptive", "local", "onebit"): _gpt(1.12, "every 10"),
    ("adaptive", "diloco", ""): _gpt(1.41, "every 20"),
    ("adaptive", "diloco", "onebit"): _gpt(1.51, "every 20"),
    ("adaptive", "streaming", ""): _gpt(1.32, "every 20, delay 4"),
    ("adaptive", "streaming", "onebit"): _gpt(1.38, "every 20, delay 4"),
}

DELAYED: dict[OptimizerKind, DelayedRuns] = {
    "sgd": DelayedRuns(
        study="digits, SGD",
        source=_DELAYED,
        factors=((0, 1.0), (20, 1.0)),
        pairs={"": ((1, 5), (1, 10), (1, 20))},
        findings={5: "+1.3 ± 1.4 points", 10: "+1.2 ± 0.3 points", 20: "+0.7 ± 0.5 points"},
    ),
    "adaptive": DelayedRuns(
        study="byte GPT, AdamW",
        source=_GPT,
        factors=((0, 1.0), (4, 1.09), (5, 1.11), (9, 1.34), (10, 1.65), (19, 2.3)),
        pairs={
            "": ((1, 4), (1, 10), (10, 10)),
            "onebit": ((1, 4), (2, 4), (5, 5), (10, 10)),
            "topk 0.03, 2 bits": ((1, 4),),
        },
        findings={
            4: "1.06 to 1.11 × the steps to a loss",
            10: "1.65 × the steps to a loss, or more: not all seeds reached it",
            19: "not reached in 1.7 ×; 2.3 × the steps to a higher loss",
        },
    ),
}

_UNKNOWN = ExtraSteps(factor=1.0, finding="not measured", confidence="unknown")


def extra_steps(
    optimizer: OptimizerKind,
    method: Method,
    codec: str,
    *,
    every: int = 1,
    delay: int = 0,
    fragments: int = FRAGMENTS,
) -> ExtraSteps:
    """What is known of a method with a codec, which is given in words; "" for none. `every`: of delayed averaging;
    `delay`: of that and of streaming; `fragments`: of streaming."""
    if method == "delayed":
        return _of_delayed(DELAYED[optimizer], codec, every=every, delay=delay)
    found = KNOWN.get((optimizer, method, codec))
    if found is None:
        alone = KNOWN.get((optimizer, method, ""))
        if alone is None or method == "all-reduce":
            return _UNKNOWN
        found = _without_codec(alone)
    return _of_streaming(found, delay, fragments) if method == "streaming" else found


def _without_codec(alone: ExtraSteps) -> ExtraSteps:
    return replace(alone, finding=f"not measured; without the codec {alone.finding}", confidence="unknown")


def _of_streaming(run: ExtraSteps, delay: int, fragments: int) -> ExtraSteps:
    if run.confidence != "measured" or (delay, fragments) == (STREAMING_DELAY, FRAGMENTS):
        return run
    if delay <= LONGEST_STREAMING_DELAY:
        run_in = "" if fragments == FRAGMENTS else f", in {FRAGMENTS} fragments"
        return replace(run, finding=f"about {run.finding}{run_in}", confidence="between")
    return replace(run, finding=f"not measured with delay {delay}; {run.finding}", confidence="unknown")


def _of_delayed(runs: DelayedRuns, codec: str, *, every: int, delay: int) -> ExtraSteps:
    steps_apart = every - 1 + delay
    if steps_apart > runs.most_steps_apart:
        beyond = f"not measured where replicas differ by more than {runs.most_steps_apart} steps"
        return ExtraSteps(factor=math.inf, finding=beyond, source=runs.source, confidence="unknown")
    factor = _on_line(runs.factors, steps_apart)
    if (every, delay) in runs.pairs.get(codec, ()):
        settings = f"delay {delay}" + (f", every {every}" if every > 1 else "")
        steps = runs.findings.get(steps_apart, f"{factor:g} × the steps to a loss")
        return ExtraSteps(factor=factor, finding=f"{steps}, {settings} ({runs.study})", source=runs.source)
    about = f"about {factor:.3g} × the steps (between measured points; {runs.study})"
    between = ExtraSteps(factor=factor, finding=about, source=runs.source, confidence="between")
    if codec not in runs.pairs:
        return _without_codec(between)
    if every > runs.longest_every:
        return replace(between, finding=f"not measured with every {every}; {about}", confidence="unknown")
    if steps_apart > (most := runs.most_steps_apart_with(codec)):
        beyond = f"not measured with the codec where replicas differ by more than {most} steps; {about}"
        return replace(between, finding=beyond, confidence="unknown")
    return between


def _on_line(points: tuple[tuple[int, float], ...], place: int) -> float:
    (left, low), (right, high) = next(pair for pair in itertools.pairwise(points) if place <= pair[1][0])
    return low + (high - low) * (place - left) / (right - left)
