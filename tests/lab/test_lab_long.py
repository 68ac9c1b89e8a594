"""The lab's long promises: nothing stays behind after a kill, presets do what they say, torchrun runs across hosts."""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import time
import uuid
from pathlib import Path

import pytest
from emulated import finish_lab, needs_lab, run_script, start_lab

from weft.lab.topology import presets

pytestmark = [pytest.mark.long, needs_lab]

MARK = "WEFT_TEST_MARK"
ESCAPES = """
import os, time
print("up", flush=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal = __import__("signal")
        for number in (1, 2, 15):
            signal.signal(number, signal.SIG_IGN)
time.sleep(600)
"""


def environment_of(pid: int) -> bytes | None:
    """What a process was started with: empty for one that is ending, None for one that has ended."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None


def all_processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def marked(mark: str) -> list[int]:
    """Processes that were started with this mark, whoever their parent is now."""
    return [pid for pid in all_processes() if f"{MARK}={mark}".encode() in (environment_of(pid) or b"").split(b"\0")]


def namespaces_of(pid: int) -> set[str]:
    found = set()
    for kind in ("net", "pid", "mnt", "uts"):
        try:
            found.add(os.readlink(f"/proc/{pid}/ns/{kind}"))
        except OSError:
            continue
    return found


def still_used(namespaces: set[str]) -> set[str]:
    """Those that an ending process is still in. Numbers are given out again: a live one may be in another lab."""
    ending = [pid for pid in all_processes() if environment_of(pid) == b""]
    return namespaces & set().union(*map(namespaces_of, ending))


@pytest.mark.timeout(400)
def test_a_lab_killed_at_any_moment_leaves_nothing_behind(tmp_path: Path) -> None:
    """Thirty labs; one of user's process, keeper and init is killed, ten times in each phase of a start."""
    (tmp_path / "escapes.py").write_text(ESCAPES)
    rng = random.Random(0)
    devices = set(os.listdir("/sys/class/net"))
    mounts = Path("/proc/self/mountinfo").read_text().count("nsfs")
    for number in range(30):
        mark = uuid.uuid4().hex
        command = ("--hosts", "3", "--bandwidth", "10Mbit", "--", sys.executable, tmp_path / "escapes.py")
        process = start_lab(*command, env={MARK: mark})
        phase = number % 3  # before any namespace, with namespaces, with ranks
        used: set[str] = set()
        started = time.monotonic()
        while True:
            alive = marked(mark)
            used = set().union(*map(namespaces_of, alive)) - namespaces_of(os.getpid())
            # user's process, keeper, init and switch; what is more is a rank
            if phase == 0 or (phase == 1 and used) or len(alive) > 4:
                break
            assert time.monotonic() < started + 30 and process.poll() is None, f"phase {phase} never came: {alive}"
        time.sleep(rng.uniform(0.0, (0.3, 0.05, 1.0)[phase]))
        alive = marked(mark)
        used |= set().union(*map(namespaces_of, alive)) - namespaces_of(os.getpid())
        os.kill(rng.choice([process.pid, *sorted(alive)[:3]]), signal.SIGKILL)
        process.communicate(timeout=30)  # its end of the pipe is held by every process of the lab
        deadline = time.monotonic() + 10
        while (left := (marked(mark), still_used(used))) != ([], set()):
            assert time.monotonic() < deadline, f"{left} are still there"
            time.sleep(0.01)
    assert set(os.listdir("/sys/class/net")) == devices
    assert Path("/proc/self/mountinfo").read_text().count("nsfs") == mounts


@pytest.mark.timing
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", presets())
def test_a_preset_is_what_it_says(name: str) -> None:
    """Rate and delay within 5 %, or a refusal that names what the switch can do.

    Three times at most: where a hypervisor takes the cores away for a while, nothing can keep time.
    """
    for _ in range(3):
        ended = finish_lab(start_lab("--preset", name, "--check", env={"COLUMNS": "120"}), timeout_s=90)
        if ended.code == 0:
            break
    if ended.code == 2:
        assert "the switch moves" in ended.stderr, ended.stderr
        return
    assert ended.code == 0 and "too much" not in ended.stdout, f"{ended.stdout}\n{ended.stderr}"
    assert ended.stdout.count("rate") >= 2


@pytest.mark.timing
@pytest.mark.timeout(300)
def test_sites_with_a_line_of_their_own_between_them(tmp_path: Path) -> None:
    file = tmp_path / "net.toml"
    file.write_text(
        'hosts = 4\nbandwidth = "200Mbit"\ndelay = "2ms"\n'
        '[[host]]\nnumber = 3\nupload = "20Mbit"\ncompute = 0.2\n'
        '[[link]]\nfrom = [0, 1]\nto = [2, 3]\nbandwidth = "50Mbit"\ndelay = "20ms"\n'
    )
    ended = finish_lab(start_lab("--topology", file, "--check", env={"COLUMNS": "120"}), timeout_s=200)
    assert ended.code == 0, ended.stdout + ended.stderr
    for asked in ("200 Mbit/s", "20 Mbit/s", "50 Mbit/s", "20.0 ms", "2.0 ms", "0.2 cores"):
        assert asked in ended.stdout


WORLD = """
import os
import torch, torch.distributed as dist

dist.init_process_group("gloo")
part = torch.tensor([float(dist.get_rank())])
dist.all_reduce(part)
print(f"{dist.get_rank()} of {dist.get_world_size()} on {os.uname().nodename}: {part.item():g}\\n", end="", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("how", ["static", "c10d"])
def test_torchrun_across_hosts(tmp_path: Path, how: str) -> None:
    (tmp_path / "world.py").write_text(WORLD)
    rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "host0:29400", "--rdzv-id", "1") if how == "c10d" else ()
    torchrun = (sys.executable, "-m", "torch.distributed.run", *rendezvous, tmp_path / "world.py")
    flags = ("--hosts", "2", "--ranks-per-host", "2", "--bandwidth", "100Mbit", "--delay", "1ms", "--per-host")
    ended = finish_lab(start_lab(*flags, "--", *torchrun))
    assert ended.code == 0, ended.stderr
    # with c10d, nodes get their numbers in the order in which they come
    assert sorted(re.sub(r"host\d", "host", line) for line in ended.stdout.splitlines()) == [
        f"{rank} of 4 on host: 6" for rank in range(4)
    ]
    assert {line.split()[4] for line in ended.stdout.splitlines()} == {"host0:", "host1:"}


def test_weft_verify_across_hosts(tmp_path: Path) -> None:
    counters = tmp_path / "counters.json"
    flags = ("--hosts", "2", "--ranks-per-host", "2", "--delay", "1ms", "--counters", counters)
    command = (sys.executable, "-m", "weft", "verify", "--steps", "1", "--batch", "4")
    ended = finish_lab(start_lab(*flags, "--", *command))
    assert ended.code == 0 and "equal to one process" in ended.stdout, ended.stderr
    assert '"from": 0' in counters.read_text() and '"from": 1' in counters.read_text()


BUSY = """
import os, time
if os.environ["RANK"] == "0":
    child = os.fork()  # both together have the share
begin, used = time.monotonic(), sum(os.times()[:2])
while time.monotonic() < begin + 3:
    pass
print(f"{os.environ['RANK']} {sum(os.times()[:2]) - used}\\n", end="", flush=True)
if os.environ["RANK"] == "0" and child:
    os.wait()
"""


@pytest.mark.timing
def test_slow_hosts_are_slow_with_all_their_processes(tmp_path: Path) -> None:
    topology = tmp_path / "net.toml"
    topology.write_text('hosts = 2\nbandwidth = "10Mbit"\ncompute = 0.2\n')
    ended = run_script(tmp_path, BUSY, "--topology", str(topology))
    assert ended.code == 0, ended.stderr
    used = {"0": 0.0, "1": 0.0}
    for line in ended.stdout.splitlines():
        rank, seconds = line.split()
        used[rank] += float(seconds)
    # 3 s at a share of 0.2, and a start before the throttle
    assert all(0.2 < seconds < 0.75 for seconds in used.values()), used


def test_a_dozen_hosts(tmp_path: Path) -> None:
    ended = finish_lab(start_lab("--hosts", "12", "--bandwidth", "10Mbit", "--", "hostname"))
    assert sorted(ended.stdout.split()) == sorted(f"host{number}" for number in range(12)), ended.stderr


def test_ctrl_c_ends_a_check_and_a_second_one_ends_deaf_ranks() -> None:
    process = start_lab("--preset", "world", "--check")
    time.sleep(3)
    os.kill(process.pid, signal.SIGINT)
    assert finish_lab(process, timeout_s=10).code == 130
    code = "import signal, time; signal.signal(2, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    process = start_lab("--hosts", "1", "--", sys.executable, "-c", code)
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    for _ in range(2):
        os.kill(process.pid, signal.SIGINT)
        time.sleep(0.5)
    assert finish_lab(process, timeout_s=10).code == 130
