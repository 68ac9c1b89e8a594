"""All multi-rank tests on the other transport: `pytest --transport c10d` makes it the default of every plan.

It is set before any plan is made, in the parent and in every rank, which reads an environment variable.
"""

from __future__ import annotations

import os

from weft.plan.plan import Comm

VARIABLE = "WEFT_TEST_TRANSPORT"


def apply_transport() -> None:
    """Make the variable's transport the default of plans, if it is set."""
    chosen = os.environ.get(VARIABLE)
    if chosen:
        defaults = Comm.__init__.__kwdefaults__
        assert defaults is not None and "transport" in defaults
        defaults["transport"] = chosen
