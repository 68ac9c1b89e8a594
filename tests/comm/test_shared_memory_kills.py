"""Hundreds of starts and kills: ranks that share memory are killed at random moments, one or all of them, and nothing
of them stays: no memory, no name, no semaphore, no process.

Memory without a name cannot stay, whatever happens. A name can, if the rank that made it is killed before the others
have opened it; so these are counted. Run as a script (way, starts, seed) it says what stayed:

    python tests/comm/test_shared_memory_kills.py named 300 0
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest

for helpers in ("helpers", "helpers/oracles"):  # as a script
    sys.path.insert(0, str(Path(__file__).parents[1] / helpers))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from exchanges import new_group  # noqa: E402

from weft.comm import collectives  # noqa: E402
from weft.comm.exchange_buffers import BufferAllocator, common_empty  # noqa: E402
from weft.comm.p2p import receive, send  # noqa: E402
from weft.comm.shared_memory.native import find_kernels  # noqa: E402

NAMES = Path("/dev/shm")
NUM_RANKS = 2
GRACE_S = 1.5
pytestmark = [pytest.mark.long, pytest.mark.skipif(not NAMES.is_dir(), reason="looks into /proc and /dev/shm")]


def live_as_rank(rank: int, folder: Path, way: str) -> None:
    """Connect groups, fill arenas and a mailbox, and exchange for ever, as each rank of a run does."""
    store = dist.FileStore(str(folder / "store"), NUM_RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS, timeout=timedelta(seconds=5))
    (folder / f"joined {rank}").touch()
    cpu, other = torch.device("cpu"), 1 - rank
    for number in range(1000):
        group = new_group("shared", f"kills {number}", ways=(way,))  # type: ignore[arg-type]
        room = BufferAllocator(group, cpu, num_bytes=2**20)
        common = common_empty(group, cpu, 1000 * NUM_RANKS, torch.float32)
        assert common is not None
        bucket, got = room.zeros(100_000, torch.float32), torch.empty(100_000)
        for _ in range(30):
            pending = collectives.all_reduce(bucket, group, wait=False)
            send(bucket, group, to=other)
            receive(got, group, source=other).wait()
            pending.wait()
            collectives.all_gather(common, common.view(NUM_RANKS, -1)[rank], group)


def fork_rank(rank: int, folder: Path, way: str) -> int:
    child = os.fork()
    if not child:
        with suppress(BaseException):
            live_as_rank(rank, folder, way)
        os._exit(0)
    return child


def start_and_kill(choose: random.Random, way: str) -> bool:
    """One run, killed at a moment drawn by lot. Whether whoever was left ended by itself.

    A rank that is connecting a group over gloo notices nothing until that times out; a launcher ends it, and so does
    this.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ranks = [fork_rank(rank, folder, way) for rank in range(NUM_RANKS)]
        is_early = choose.random() < 0.05
        while not is_early and len(list(folder.glob("joined *"))) < NUM_RANKS:
            time.sleep(0.001)
        time.sleep(choose.random() * 0.15)
        victims = choose.choice([[0], [1], [0, 1]])
        for victim in victims:
            os.kill(ranks[victim], signal.SIGKILL)
        deadline, left = time.monotonic() + GRACE_S, set(ranks)
        while left and time.monotonic() < deadline:
            left -= {process for process in left if os.waitpid(process, os.WNOHANG)[0]}
            time.sleep(0.002)
        for process in left:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
        return not left


def own_processes() -> list[str]:
    """Processes of this one's group, besides itself."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.getpgid(int(process.name)) == os.getpgrp() and int(process.name) != os.getpid():
                found.append(process.name)
    return found


def hide_names_of_others() -> bool:
    """Give this process and its children a /dev/shm of their own, if it may: what is there then is theirs."""
    library, private_and_below = ctypes.CDLL(None), ctypes.c_ulong((1 << 18) | (1 << 14))
    if library.unshare(0x00020000) or library.mount(b"none", b"/", None, private_and_below, None):
        return False
    return not library.mount(b"tmpfs", b"/dev/shm", b"tmpfs", ctypes.c_ulong(0), b"size=4g")


def kill_many(way: str, num_starts: int, seed: int) -> None:
    """Say, one a line, what stayed, and how many runs ended by themselves."""
    torch.set_num_threads(1)
    find_kernels()
    is_alone, choose = hide_names_of_others(), random.Random(seed)
    before = set(NAMES.iterdir())
    held_by_maker = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if os.path.lexists(path)]
    num_ended = sum(start_and_kill(choose, way) for _ in range(num_starts))
    stayed = {path for path in NAMES.iterdir() if is_alone or path.name.startswith("weft-")} - before
    for path in sorted(stayed):
        print("name", path.name, path.stat().st_size)
    for process in own_processes():
        print("process", process)
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if "memfd" in os.readlink(path) and os.readlink(path) not in held_by_maker:
                print("memory", os.readlink(path))
    print("ended", num_ended)


def run(way: str, num_starts: int, seed: int) -> list[list[str]]:
    command = [sys.executable, __file__, way, str(num_starts), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1700, start_new_session=True)
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines()]


@pytest.mark.timeout(1800)
def test_kills_leave_nothing() -> None:
    told = run("anonymous", 100, seed=1)
    assert [line[0] for line in told] == ["ended"], told
    assert int(told[0][1]) > 70, "survivors must notice, but for those that gloo keeps"


@pytest.mark.timeout(1800)
def test_names_stay_only_where_they_were_being_made() -> None:
    """Most kills here strike while memory is being made, and still most leave no name; none leaves anything else."""
    *stayed, ended = run("named", 60, seed=2)
    assert all(kind == "name" and name.startswith("weft-") for kind, name, _ in stayed) and ended[0] == "ended"
    assert len(stayed) < 30, stayed


if __name__ == "__main__":
    kill_many(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
