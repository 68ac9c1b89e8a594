"""Server processes of a run, as the kernel sees them: which they are, and how long they were busy. Linux only."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

COMMAND = b"weft.server.process"
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def server_pids(parent: int) -> list[int]:
    """The servers that a process has started."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            is_child = int(_fields(folder / "stat")[1]) == parent
            if is_child and COMMAND in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:  # it has ended meanwhile
            continue
    return sorted(found)


def _fields(path: Path) -> list[str]:
    """Of a process's stat, from its state on; its name before may have blanks."""
    return path.read_text().rpartition(")")[2].split()


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy:
    """Seconds for which a process had a core so far."""

    main_s: float
    """Its first thread, which receives, adds, updates and answers."""
    all_s: float
    """With ZeroMQ's own threads, which move bytes."""

    @classmethod
    def of(cls, pid: int) -> Self:
        user, system = _fields(Path(f"/proc/{pid}/stat"))[11:13]
        main_ns = int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0])
        return cls(main_s=main_ns / 1e9, all_s=(int(user) + int(system)) * _TICK_S)

    def since(self, earlier: Busy) -> Busy:
        return Busy(main_s=self.main_s - earlier.main_s, all_s=self.all_s - earlier.all_s)


def machine_busy_s() -> float:
    """Seconds for which all cores together were busy so far."""
    user, nice, system, _idle, _wait, interrupts, soft, *_ = (
        Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    )
    return sum(map(int, (user, nice, system, interrupts, soft))) * _TICK_S
