"""All tests of many ranks on the other transport: `pytest --transport c10d` makes it every plan's default.

Set before any plan is made, in the parent and in every rank, which hears of it by an environment variable.
"""

from __future__ import annotations

import os

from weft.plan.plan import Comm

VARIABLE = "WEFT_TEST_TRANSPORT"


def apply_transport() -> None:
    """Let plans that do not say how ranks exchange say what the variable says, if it says anything."""
    chosen = os.environ.get(VARIABLE)
    if chosen:
        defaults = Comm.__init__.__kwdefaults__
        assert defaults is not None and "transport" in defaults
        defaults["transport"] = chosen
