"""What the codecs of one rank of a worker keep, from a checkpoint to the run that goes on with it, and back.

    load ── values wait here ── join ── the servers are at the checkpoint's step: codecs go on with them
                                     ── the run is further: what was kept then has been sent since, and is dropped

A checkpoint is loaded before a worker joins its run, and only then are there codecs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from weft.server.protocol.settings import Settings
from weft.sync.push_codecs import PushCodecs


class KeptCodecs:
    """Of one rank."""

    def __init__(self) -> None:
        self._codecs: PushCodecs | None = None
        self._read: tuple[dict[str, torch.Tensor], dict[str, Any]] | None = None
        """What a checkpoint has, until this worker joins."""
        self.job = ""
        """Of the run that it has joined."""
        self.come_together = False
        """All workers end each step together, so that each can save what it keeps, beside the first one."""

    def join(self, codecs: PushCodecs | None, settings: Settings, *, goes_on: bool) -> None:
        """The worker has joined. `goes_on`: at the step of what was loaded."""
        self._codecs, self.job = codecs, settings.job
        self.come_together = settings.is_sync and not settings.backups
        if self._read is not None and codecs is not None and goes_on:
            codecs.load_state(*self._read)
        self._read = None

    def load(self, tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any]) -> None:
        """Go on with what `tensors` and `values` gave, once the worker joins."""
        self._read = ({**tensors}, {**values}) if values else None

    def tensors(self) -> dict[str, torch.Tensor]:
        """Not copied; nothing before the worker has joined."""
        return {} if self._codecs is None else self._codecs.tensors()

    def values(self) -> dict[str, Any]:
        """Plain values that belong to them, of a codec that keeps something; else none."""
        return self._codecs.values() if self._codecs is not None and self._codecs.keeps else {}
