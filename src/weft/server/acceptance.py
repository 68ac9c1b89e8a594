"""What a server looks at before it serves a run: the settings of the first hello, or those of its snapshot."""

from __future__ import annotations

from weft.errors import LaunchError
from weft.server.protocol.layout import ServerLayout
from weft.server.protocol.optimizer_spec import try_optimizer
from weft.server.protocol.settings import Settings


def accept(settings: Settings, *, number: int, job: str | None, most_frame_bytes: int | None) -> ServerLayout:
    """What this server holds of a run; raises LaunchError if it cannot serve it. `job`: the run for which it was
    started, where it knows."""
    if job is not None and settings.job != job:
        raise LaunchError("this server was started for another run; start a server of your own, or join this run")
    if not number < settings.num_servers:
        raise LaunchError(f"server {number} is one too many: the plan has [server] shards = {settings.num_servers}")
    needs_norms = try_optimizer(settings.optimizer, [one.name for one in settings.tensors])
    if needs_norms and settings.splits and settings.num_servers > 1:
        raise LaunchError(
            f"{settings.optimizer['class']} needs norms of whole tensors, and these are cut over "
            f"{settings.num_servers} servers; leave them whole"
        )
    layout = ServerLayout.of(settings, number)
    longest = layout.longest_frame
    if most_frame_bytes is not None and longest > most_frame_bytes:
        raise LaunchError(
            f"a message of this plan has {longest} bytes, and this server takes up to {most_frame_bytes}; "
            "start it with the same plan"
        )
    return layout
