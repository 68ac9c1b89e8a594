"""The traceback of an error as the user of a script needs it: their own frames, with those of weft and torch folded.

Between a user's training loop and their model's forward lie a dozen frames that say nothing about the mistake. Each run
of them becomes one line that says how many they are and where the last one is; WEFT_TRACEBACK=all shows every frame.
"""

from __future__ import annotations

import os
import sys
import traceback
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

_PACKAGES = {str(Path(__file__).parents[2]) + os.sep: "weft", str(Path(torch.__file__).parent) + os.sep: "torch"}
ALL_FRAMES = "WEFT_TRACEBACK"


def print_user_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error to standard errors, as Python would, with its inner frames folded."""
    shown = traceback.TracebackException(kind, error, trace)
    if os.environ.get(ALL_FRAMES) != "all":
        _fold(shown)
    print("".join(shown.format()), end="", file=sys.stderr, flush=True)


def package_of(file: str) -> str | None:
    """ "weft" or "torch" for a file of theirs."""
    return next((name for folder, name in _PACKAGES.items() if file.startswith(folder)), None)


def place_in_user_code(error: BaseException) -> str:
    """Where an error arose, by its innermost frame outside of weft and torch: ", at model.py:31, in forward", or
    nothing."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if package_of(frame.filename) is None]
    if not frames:
        return ""
    parts = Path(frames[-1].filename).parts
    below = parts[parts.index("site-packages") + 1 :] if "site-packages" in parts else parts[-1:]
    return f", at {'/'.join(below)}:{frames[-1].lineno}, in {frames[-1].name}"


def _fold(shown: traceback.TracebackException) -> None:
    for linked in (shown.__cause__, shown.__context__):
        if linked is not None:
            _fold(linked)
    folded = _FoldedStack()
    for is_inner, run in groupby(shown.stack, key=lambda frame: package_of(frame.filename) is not None):
        frames = list(run)
        folded += [_Fold(frames)] if is_inner else frames
    shown.stack = folded


class _Fold(traceback.FrameSummary):
    """A run of frames, shown as one line."""

    def __init__(self, frames: list[traceback.FrameSummary]) -> None:
        last = frames[-1]
        super().__init__(last.filename, last.lineno, last.name, lookup_line=False, line="")
        self.packages = sorted({str(package_of(frame.filename)) for frame in frames}, reverse=True)
        self.num_frames = len(frames)


class _FoldedStack(traceback.StackSummary):
    def format_frame_summary(self, frame_summary: traceback.FrameSummary, **others: Any) -> str:  # since 3.13: colorize
        frame = frame_summary
        if not isinstance(frame, _Fold):
            return super().format_frame_summary(frame, **others)
        many = "1 frame" if frame.num_frames == 1 else f"{frame.num_frames} frames"
        where = f"{_below_package(frame.filename)}:{frame.lineno}, in {frame.name}"
        return f"  … {many} of {' and '.join(frame.packages)}, to {where} ({ALL_FRAMES}=all shows them)\n"


def _below_package(file: str) -> str:
    folder = next(folder for folder in _PACKAGES if file.startswith(folder))
    return str(Path(file).relative_to(Path(folder).parent))
