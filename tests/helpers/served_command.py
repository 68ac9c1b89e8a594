"""The command line in a process of its own, in which plans may ask for servers: `python -m served_command train ...`.

Ranks import the main module of whoever started them, under another name, and so may have such plans, too.
"""

from __future__ import annotations

from contextlib import ExitStack

from served_training import allowing_servers

from weft.cli.main import main

_always = ExitStack()
_always.enter_context(allowing_servers())

if __name__ == "__main__":
    main()
