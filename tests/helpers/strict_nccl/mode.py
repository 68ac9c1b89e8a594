"""Which of NCCL's modes the stand-in emulates: an environment variable chooses it, unless a test does.

WEFT_STRICT_NCCL="eager, one stream, delay 2 ms, seed 7, stall 10 s"
"""

from __future__ import annotations

import os
from dataclasses import dataclass

VARIABLE = "WEFT_STRICT_NCCL"


@dataclass(frozen=True, slots=True, kw_only=True)
class StrictMode:
    """How communicators are made and how their operations run."""

    is_eager: bool = False
    """Unbatched messages share the group's communicator, as in groups made with `device_id`; otherwise every pair of
    ranks makes one of its own at its first message."""
    one_stream: bool = False
    """All communicators of a rank run their operations in one order, as on a device with no room for two at once."""
    delay_ms: float = 0.0
    """Operations begin up to this much later, each by a random time."""
    seed: int = 0
    """Seed of the random delays."""
    stall_s: float = 10.0
    """Seconds without progress after which the referee ends the run."""

    def text(self) -> str:
        """As the environment variable has it."""
        words = ["eager" if self.is_eager else "lazy", *["one stream"] * self.one_stream]
        return ", ".join([*words, f"delay {self.delay_ms:g} ms", f"seed {self.seed}", f"stall {self.stall_s:g} s"])


def read_mode(text: str | None = None) -> StrictMode:
    """The mode that a text names, by default that of the environment."""
    found: dict[str, bool | float | int] = {}
    for words in (os.environ.get(VARIABLE, "") if text is None else text).split(","):
        match words.split():
            case [] | ["lazy"]:
                pass
            case ["eager"]:
                found["is_eager"] = True
            case ["one", "stream"]:
                found["one_stream"] = True
            case ["delay", number, "ms"]:
                found["delay_ms"] = float(number)
            case ["seed", number]:
                found["seed"] = int(number)
            case ["stall", number, "s"]:
                found["stall_s"] = float(number)
            case _:
                raise ValueError(
                    f"{VARIABLE} has {words.strip()!r}; known: lazy, eager, one stream, delay N ms, seed N, stall N s"
                )
    return StrictMode(**found)  # type: ignore[arg-type]
