"""Whether ranks that failed are started again: once more for any failure, not again for one that came back the same.

A machine that dies, a full disk, a link that drops: a restart from the last checkpoint is what they need. An exception
in the user's code at the same step as before would come a third time, and cost the time of a start each. Every decision
is said where it is made, with the rank and the reason.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weft.errors import STEP_NOTE

_STEP = re.compile(STEP_NOTE.format(step=r"(\d+)"), re.MULTILINE)
_ADDRESS = re.compile(r"0x[0-9a-f]+", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """How a rank ended."""

    rank: int
    how: str
    error: str
    """Type and message of its exception; empty if it had none."""
    traceback: str
    step: int | None

    @property
    def why(self) -> str:
        """In words, after the rank."""
        where = "" if self.step is None else f" in step {self.step}"
        return f"{self.how}{where}{': ' if self.error else ''}{self.error}"

    def is_like(self, other: RankFailure | None) -> bool:
        """True for the same exception at the same step, on whichever rank. Deaths without one are never alike."""
        if other is None or not self.error:
            return False
        heads = (_ADDRESS.sub("", one.error.partition("\n")[0]) for one in (self, other))
        return len(set(heads)) == 1 and self.step == other.step


class Restarts:
    """Decides about the failures of one launch, one after another."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.done = 0
        self.last: RankFailure | None = None
        self.came_again = False
        """The last failure was like the one before, and is the end although restarts were left."""

    def is_worth(self, failure: RankFailure) -> bool:
        """True if all ranks are to be started again after this failure."""
        repeated, self.last = failure.is_like(self.last), failure
        self.came_again = repeated and self.done < self.most
        if repeated or self.done == self.most:
            return False
        self.done += 1
        many = f"restart {self.done} of {self.most}"
        print(f"rank {failure.rank} {failure.why}; all ranks are started again ({many})", file=sys.stderr, flush=True)
        return True


def first_failure(failures: Mapping[int, Any]) -> RankFailure:
    """The earliest of the failures that torch's agent has noticed, by rank."""
    rank, found = min(failures.items(), key=lambda entry: entry[1].timestamp)
    how = f"was killed by {found.signal_name()}" if found.exitcode < 0 else f"ended with code {found.exitcode}"
    message = found.message if isinstance(found.message, dict) else {}
    where = message.get("extraInfo", {}).get("py_callstack", "")
    steps = _STEP.findall(where)
    return RankFailure(
        rank=rank,
        how=how,
        error=message.get("message", ""),
        traceback=where,
        step=int(steps[-1]) if steps else None,
    )
