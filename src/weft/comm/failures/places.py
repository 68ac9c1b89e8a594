"""Where a thread is: the line of the user's code, and the innermost one; and the stacks of all threads as a file."""

from __future__ import annotations

import faulthandler
import functools
import os
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

_DEBUGGERS = ("pdb", "bdb", "ipdb", "IPython.core.debugger", "pydevd", "_pydevd_bundle.pydevd")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a thread is."""

    user: str = ""
    """The innermost line of the user's own code, "script.py:28 (load)"; empty if there is none."""
    inner: str = ""
    """The innermost line of all, if that is another one."""
    in_debugger: bool = False

    @property
    def line(self) -> str:
        """The line of the user's own code, without its function: "script.py:28"."""
        return self.user.partition(" (")[0]


def find_place(thread: int | None = None) -> Place:
    """Where a thread of this process is; by default the main one."""
    frame = sys._current_frames().get(thread or threading.main_thread().ident or 0)
    found = [] if frame is None else [(one, line) for one, line in traceback.walk_stack(frame)]
    return _place(found)


def place_of_error(error: BaseException) -> Place:
    """Where an error was raised."""
    return _place(list(traceback.walk_tb(error.__traceback__))[::-1])


def _place(frames: Sequence[tuple[FrameType, int]]) -> Place:
    """`frames`: and their lines, the innermost first."""
    user = next((one for one in frames if _is_users(one[0].f_code.co_filename)), None)
    return Place(
        user=_text(*user) if user is not None else "",
        inner=_text(*frames[0]) if frames and frames[0] is not user else "",
        in_debugger=any(frame.f_globals.get("__name__") in _DEBUGGERS for frame, _ in frames),
    )


@functools.cache
def _installed() -> tuple[str, ...]:
    """Folders whose code is not the user's."""
    paths = sysconfig.get_paths()
    found = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    found += [str(Path(__file__).parents[2]), str(Path(torch.__file__).parent)]
    return tuple(os.path.realpath(path) + os.sep for path in found)


def _is_users(file: str) -> bool:
    return not file.startswith("<") and not os.path.realpath(file).startswith(_installed())


def _text(frame: FrameType, line: int) -> str:
    file, code = frame.f_code.co_filename, frame.f_code
    short = os.path.relpath(file) if file.startswith(os.getcwd() + os.sep) else "/".join(Path(file).parts[-2:])
    function = "" if code.co_name == "<module>" else f" ({code.co_name})"
    return f"{short}:{line}{function}"


def write_stacks(folder: Path, rank: int, reason: str) -> None:
    """Add the stacks of all threads of this process to a rank's file; OSError where the folder cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"rank-{rank}.txt").open("a") as file:
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} rank {rank}, process {os.getpid()}: {reason}\n\n")
        names = "".join(f"  0x{one.ident or 0:016x} {one.name}\n" for one in threading.enumerate())
        file.write(f"threads:\n{names}\n")
        file.flush()
        faulthandler.dump_traceback(file)
        file.write("\n")
