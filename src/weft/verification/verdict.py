"""The outcome of `verify`: the largest error of each tensor, the first error, and the deviation of a lossy plan.

Plain values, the same on every rank, without torch: they are sent between processes and written to files.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.errors import VerifyError

LARGEST_LOSS_DEVIATION = 0.05
"""Largest relative deviation of a 16-bit plan's loss from float32 that rounding explains."""

LARGEST_GRADIENT_DEVIATION = 0.4
"""The same for all gradients together, and for the way that all weights went. A factor of 2 deviates by 1, a factor of
0.5 by 0.5, and rounding to bf16 or fp16 by less than 0.01 in the models that were measured."""

KINDS = ("loss", "gradient", "state", "weight", "average", "buffer")
"""Of values that are compared, in the order of a step."""

_MOST_LISTED = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The largest error of one tensor, or of the loss."""

    what: str
    """loss, gradient, state (of the optimizer, on servers), weight, average or buffer."""
    name: str
    error: float
    """The largest difference, relative to the largest entry of the reference tensor (see `compare.relative_error`)."""
    rank: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """The likely cause of an error."""

    kind: str
    """factor, not summed, not exchanged, exchanged, outer, not compressed, codec, stale, missing, extra, not a number,
    swapped, rows, unpublished, random, or unknown."""
    text: str
    """A sentence without a full stop."""
    axes: tuple[str, ...] = ()
    """Axes of the plan that may be responsible, likeliest first; "microbatches" may be among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The first error, in the order of a step."""

    step: int
    phase: str
    """forward, backward, exchange, update or buffers."""
    what: str
    name: str
    error: float
    ranks: tuple[int, ...]
    """Ranks on which it is off."""
    places: str
    """Coordinates of these ranks along the axes, in words."""
    cause: Cause

    def __str__(self) -> str:
        thing = f"{self.what} {self.name}".rstrip()
        return (
            f"the first difference: {thing}, step {self.step}, phase {self.phase}, off by {self.error:.1e} on "
            f"{self.places}. Likely cause: {self.cause.text}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """The difference between a plan that is not exact and what it replaces: measured, and no error by itself."""

    against: str
    """The process it was compared with, as messages name it."""
    loss: float
    """The largest relative difference of a step's loss."""
    gradient: float | None = None
    """The largest relative difference of a step's gradients, all together, in the Euclidean norm."""
    movement: float | None = None
    """Distance between the two final weights, relative to the distance that the other's moved."""
    limit: float | None = None
    """The largest difference of the loss that passes; None: any finite one."""
    num_skipped: int = 0
    """Steps that changed nothing, because a gradient was not finite."""
    num_steps: int = 0
    """Steps of the plan as it stands."""

    @property
    def problem(self) -> str | None:
        if not self.loss < float("inf"):
            return f"the plan as it stands gives a loss that is not finite, where {self.against} does not"
        if self.limit is not None and self.loss > self.limit:
            return (
                f"the plan as it stands gives a loss that is {self.loss:.1%} from {self.against}, and {self.limit:.0%} "
                "is allowed; no rounding explains that"
            )
        if self.num_steps and self.num_skipped == self.num_steps:
            return (
                f"all {self.num_steps} steps of the plan as it stands were skipped, because a gradient was not finite, "
                "so its gradients were not compared; give more steps, or a smaller [precision] loss_scale"
            )
        for what, found in (("gradients", self.gradient), ("weights", self.movement)):
            if self.limit is not None and found is not None and not found <= LARGEST_GRADIENT_DEVIATION:
                return (
                    f"the plan as it stands gives {what} that are {found:.1%} from {self.against}, and "
                    f"{LARGEST_GRADIENT_DEVIATION:.0%} is allowed; no rounding explains that"
                )
        return None

    def __str__(self) -> str:
        parts = [f"loss {self.loss:.1e}"]
        if self.gradient is not None:
            parts.append(f"gradients {self.gradient:.1e}")
        if self.movement is not None:
            parts.append(f"weights {self.movement:.1e} of the distance they moved")
        skipped = f" ({self.num_skipped} steps skipped)" if self.num_skipped else ""
        return f"deviation from {self.against}: {', '.join(parts)}{skipped}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The outcome, the same on every rank: the worst difference of each tensor, worst first."""

    num_steps: int
    tolerance: float
    differences: tuple[Difference, ...]
    rule: str = "one process"
    """The process that the plan was compared with."""
    first: Finding | None = None
    """The first error; None where everything is equal."""
    deviation: Deviation | None = None
    """The deviation of a lossy plan."""
    notes: tuple[str, ...] = ()
    """What was computed otherwise than in training, on both sides, so that it could be compared; sentences."""

    @property
    def is_equal(self) -> bool:
        """True if the plan obeys its rule, whatever its deviation."""
        return all(difference.error <= self.tolerance for difference in self.differences)

    @property
    def ok(self) -> bool:
        return self.is_equal and (self.deviation is None or self.deviation.problem is None)

    def worst(self, what: str) -> Difference:
        return next(difference for difference in self.differences if difference.what == what)

    def require(self) -> Verification:
        """Raise VerifyError with the first difference and the worst ones; returns itself where there is none."""
        if not self.ok:
            raise VerifyError(self.problems())
        return self

    def problems(self) -> list[str]:
        """The first error, then the largest ones, each a sentence."""
        problems = [] if self.first is None else [str(self.first)]
        if self.deviation is not None and self.deviation.problem is not None:
            problems.append(self.deviation.problem)
        wrong = [difference for difference in self.differences if not difference.error <= self.tolerance]
        return problems + [
            f"{d.what} {d.name} is off by {d.error:.1e} on rank {d.rank} after step {d.step}, "
            f"{self.tolerance:.0e} is allowed; this plan does not give the answer of {self.rule} for this model"
            for d in wrong[: _MOST_LISTED - len(problems)]
        ]
