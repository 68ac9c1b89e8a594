"""How long ranks may wait for each other: until that is reported, and until it ends the run.

    steady step        reported after twice the usual step and 2.5 s; ends after `[comm] timeout_s`
    first steps        reported after 5 minutes: compiling, allocating and measuring take long on some ranks
    saving, loading    reported after 2 minutes, or twice the usual duration
    other calls        reported after twice their usual duration and 2.5 s; the first time after 5 minutes

All but steady steps end at the timeout of the process group, half an hour unless the script made it with another.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.comm.failures.activity import CHECKPOINT_CALLS, STEP, calls


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Seconds of waiting."""

    slack_s: float = 2.5
    """Added to twice the usual duration: with a look every `poll_s` and the answers of all ranks, a wait is
    reported within 5 s more than that. Also the wait after which ranks are asked whether they make the same calls."""
    first_s: float = 300.0
    checkpoint_s: float = 120.0
    poll_s: float = 0.25
    answer_s: float = 1.5
    """For the answers of all ranks."""

    def reported_after_s(self, call: str, *, is_saving: bool = False) -> float:
        """`call`: the public call that a rank waits in; `is_saving`: or a save in the background."""
        name = call or STEP
        usual_s = calls.usual_s("trainer.save" if is_saving else name)
        if is_saving or name in CHECKPOINT_CALLS:
            return max(self.checkpoint_s, 2 * (usual_s or 0.0) + self.slack_s)
        return self.first_s if usual_s is None else 2 * usual_s + self.slack_s


def is_steady_step() -> bool:
    """True if this rank is in a step, or between two, and the first steps are over."""
    return calls.name in ("", STEP) and calls.usual_s(STEP) is not None
