"""`python -m served_often train ...`: as `served_command`, with servers that save all the time."""

from __future__ import annotations

import served_command  # noqa: F401  plans may have servers

from weft.cli.main import main
from weft.server.local_servers import LocalServers

defaults = LocalServers.__init__.__kwdefaults__
assert defaults is not None
defaults["snapshot_every_s"] = 0.0

if __name__ == "__main__":
    main()
