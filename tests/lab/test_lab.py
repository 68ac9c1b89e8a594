"""`weft lab` as it is: hosts, packets through the switch, torchrun's variables, exit codes, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest
from emulated import finish_lab, needs_lab, run_script, start_lab

from weft.cli.main import main
from weft.lab.counters import Counters, make_table, read_counters
from weft.lab.namespaces import missing_here
from weft.lab.switch import is_empty_acknowledgement

CONNECT = """
while True:
    try:
        stream = socket.create_connection(("host1", 7000))
        break
    except ConnectionRefusedError:
        time.sleep(0.01)
"""
ECHO = f"""
import json, os, socket, time
from weft.lab.counters import read_counters

rank, address = int(os.environ["RANK"]), os.environ["WEFT_LAB_ADDRESS"]
if rank == 1:
    server = socket.create_server((os.environ["WEFT_LAB_ADDRESS"], 7000))
    stream, _ = server.accept()
    while data := stream.recv(64):
        stream.sendall(data)
    raise SystemExit(0)
{CONNECT}stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
trips = []
for _ in range(10):
    begin = time.monotonic()
    stream.sendall(b"x" * 64)
    assert len(stream.recv(64, socket.MSG_WAITALL)) == 64
    trips.append(time.monotonic() - begin)
before = read_counters()[0, 1].packets
loop = socket.create_server(("127.0.0.1", 0))
inside = socket.create_connection(loop.getsockname())
inside.sendall(bytes(100_000))
crossed = read_counters()[0, 1].packets - before
print(json.dumps(dict(trips=trips, crossed=crossed, name=socket.gethostname())))
"""


@pytest.mark.long
@needs_lab
def test_packets_take_the_delay_and_are_counted(tmp_path: Path) -> None:
    ended = run_script(tmp_path, ECHO, "--delay", "20ms", "--bandwidth", "100Mbit")
    assert (ended.code, ended.stderr) == (0, "")
    told = json.loads(ended.stdout)
    assert told["name"] == "host0"
    assert min(told["trips"]) > 0.038  # there and back; half a millisecond each way may be taken for the switch's own
    assert told["crossed"] == 0  # what stays inside a host is not the switch's
    for pair in ((0, 1), (1, 0)):
        count = ended.pair(*pair)
        assert count["packets"] >= 10 and 10 * 64 < count["bytes"] < 5000
        assert (count["lost"], count["dropped"]) == (0, 0)


ALL_REDUCE = """
import os
import torch, torch.distributed as dist

dist.init_process_group("gloo")
part = torch.full((250_000,), float(dist.get_rank()))
dist.all_reduce(part)
assert part.eq(sum(range(dist.get_world_size()))).all()
if dist.get_rank() == 0:
    print(dist.get_world_size(), os.environ["LOCAL_WORLD_SIZE"], os.environ["MASTER_ADDR"])
dist.destroy_process_group()
"""


@pytest.mark.long
@needs_lab
def test_gloo_all_reduces_over_the_switch(tmp_path: Path) -> None:
    ended = run_script(tmp_path, ALL_REDUCE, "--bandwidth", "100Mbit", "--delay", "1ms")
    assert (ended.code, ended.stdout) == (0, "2 1 10.83.0.1\n"), ended.stderr
    for pair in ((0, 1), (1, 0)):
        assert 1_000_000 < ended.pair(*pair)["bytes"] < 1_300_000  # a megabyte each way, and the store's messages


PLACES = """
import os
import sys
names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "WEFT_LAB_HOST", "WEFT_LAB_HOSTS"]
names += ["GLOO_SOCKET_IFNAME", "MASTER_PORT", "PET_NNODES", "PET_NODE_RANK", "PET_NPROC_PER_NODE"]
sys.stdout.write(" ".join(os.environ.get(name, "-") for name in names) + "\\n")
"""


@pytest.mark.long
@needs_lab
def test_every_rank_is_told_its_place(tmp_path: Path) -> None:
    topology = tmp_path / "net.toml"
    topology.write_text('hosts = 2\nranks = 2\nbandwidth = "10Mbit"\n[[host]]\nnumber = 1\nranks = 1\n')
    ended = run_script(tmp_path, PLACES, "--topology", str(topology))
    assert sorted(ended.stdout.splitlines()) == [
        "0 3 0 2 0 0 2 weft0 29500 - - -",
        "1 3 1 2 0 0 2 weft0 29500 - - -",
        "2 3 0 1 1 1 2 weft0 29500 - - -",
    ]
    ended = run_script(tmp_path, PLACES, "--topology", str(topology), "--per-host")
    assert sorted(ended.stdout.splitlines()) == [
        "- - - - - 0 2 weft0 29500 2 0 2",
        "- - - - - 1 2 weft0 29500 2 1 1",
    ]


VANISHES = f"""
import os, signal, socket, time
if os.environ["RANK"] == "1":
    server = socket.create_server((os.environ["WEFT_LAB_ADDRESS"], 7000))
    stream, _ = server.accept()
    stream.recv(1)
    os.kill(os.getpid(), signal.SIGKILL)
{CONNECT}stream.sendall(b"x")
try:
    assert stream.recv(1) == b""
except ConnectionResetError:
    pass
print("the other host has closed the connection", flush=True)
time.sleep(600)
"""


@pytest.mark.long
@needs_lab
def test_a_host_that_vanishes_is_noticed_and_the_others_are_ended(tmp_path: Path) -> None:
    ended = run_script(tmp_path, VANISHES, "--bandwidth", "10Mbit")
    assert ended.code == 128 + signal.SIGKILL
    assert ended.stdout == "the other host has closed the connection\n"
    assert ended.stderr == "weft: rank 1 on host1 was killed by SIGKILL; that ended the lab\n"


@needs_lab
def test_ctrl_c_is_passed_on(tmp_path: Path) -> None:
    # Written at once: two ranks that print may come between each other's word and its end of line.
    code = "import os, signal, sys, time; signal.signal(2, lambda *_: (os.write(1, b'asked\\n'), sys.exit(0)))"
    code += "; os.write(1, b'ready\\n'); time.sleep(600)"
    process = start_lab("--bandwidth", "10Mbit", "--", sys.executable, "-c", code)
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    os.kill(process.pid, signal.SIGINT)
    ended = finish_lab(process)
    assert (ended.code, ended.stdout) == (130, "asked\nasked\n")


def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What `weft lab` says when it refuses, in this process, which has imported already what messages need."""
    monkeypatch.setattr(sys, "argv", ["weft", "lab", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr()
    assert (ended.value.code, told.out) == (2, "") and "Traceback" not in told.err
    return told.err


@pytest.mark.long
@needs_lab
def test_what_the_machine_cannot_do_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = refused(monkeypatch, capsys, "--hosts", "3", "--bandwidth", "9000Gbit", "--", "true")
    assert (
        told.startswith("weft: 3 hosts sending at once make 2.7e+04 Gbit/s; the switch moves") and told.count("\n") == 1
    )
    told = refused(monkeypatch, capsys, "--", "no-such-program")
    assert told == "weft: no-such-program is not a program that can be found here; give its path\n"


def test_bad_flags_come_at_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--hosts", "0", "--delay", "5", "--preset", "wify", "--counters", "/nowhere/x")
    told = refused(monkeypatch, capsys, *flags)
    for words in ("give a command after --", "hosts = 0", 'delay = "5"', 'did you mean "wifi"?', "no folder /nowhere"):
        assert told.count(words) == 1, words


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("weft.lab.namespaces._TUN", tmp_path / "tun")
    monkeypatch.setattr("weft.lab.namespaces._CAPABILITIES", {"CAP_OF_NOBODY": 63})
    monkeypatch.setattr(sys, "platform", "linux")
    root, tun = missing_here()
    assert "needs root" in root and "CAP_OF_NOBODY" in root and "sudo" in root
    assert "modprobe tun" in tun and str(tmp_path / "tun") in tun
    monkeypatch.setattr(sys, "platform", "darwin")
    assert missing_here() == [
        "the lab needs Linux's network namespaces, this is darwin; run it on Linux or in a virtual machine"
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="memfd is Linux's")
def test_counters_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    fd = make_table(3)
    writer = Counters(fd, num_hosts=3, writable=True)
    writer.table[writer.place(2, 1) + 1] += 1500
    writer.table[writer.place(2, 1)] += 1
    monkeypatch.setenv("WEFT_LAB_COUNTERS", f"/proc/{os.getpid()}/fd/{fd} 3")
    counts = read_counters()
    assert len(counts) == 6 and (counts[2, 1].packets, counts[2, 1].bytes) == (1, 1500)
    assert sum(count.packets for count in counts.values()) == 1
    told = json.loads(writer.to_json())
    assert told["pairs"] == [{"from": 2, "to": 1, "packets": 1, "bytes": 1500, "lost": 0, "dropped": 0}]
    os.close(fd)


def test_an_empty_acknowledgement_is_known() -> None:
    def packet(*, protocol: int = 6, flags: int = 0x10, data: bytes = b"", options: int = 12) -> bytes:
        tcp = bytes(12) + bytes([(20 + options) // 4 << 4, flags]) + bytes(6 + options) + data
        return bytes([0x45]) + bytes(8) + bytes([protocol]) + bytes(10) + tcp

    assert is_empty_acknowledgement(packet()) and is_empty_acknowledgement(packet(options=0))
    for other in ({"data": b"x"}, {"flags": 0x12}, {"flags": 0x11}, {"flags": 0x14}, {"protocol": 17}):
        assert not is_empty_acknowledgement(packet(**other))
    assert not is_empty_acknowledgement(packet()[:30])
