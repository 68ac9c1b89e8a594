"""`python -m served_often train ...`: the command line, with servers that save all the time."""

from __future__ import annotations

from weft.cli.main import main
from weft.server.local_servers import LocalServers

defaults = LocalServers.__init__.__kwdefaults__
assert defaults is not None
defaults["snapshot_every_s"] = 0.0

if __name__ == "__main__":
    main()
