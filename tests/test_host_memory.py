"""Memory that a process may take: the host's, or what its container has left, from files of both cgroup versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.host_memory import available_bytes, host_memory_bytes

MIB = 1 << 20
V2 = {"limit": "memory.max", "used": "memory.current", "stat": "memory.stat", "cache": "inactive_file"}
V1 = {
    "limit": "memory/memory.limit_in_bytes",
    "used": "memory/memory.usage_in_bytes",
    "stat": "memory/memory.stat",
    "cache": "total_inactive_file",
}


def write(root: Path, files: dict[str, object]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return root


def host(root: Path, available_mib: int) -> Path:
    return write(root, {"proc/meminfo": f"MemTotal: 999999 kB\nMemAvailable:   {available_mib * 1024} kB"})


def container(root: Path, names: dict[str, str], *, limit: object, used: int, cache: int) -> Path:
    found = {"limit": limit, "used": used, "stat": f"anon 1\n{names['cache']} {cache}\nactive_file 2"}
    return write(root, {f"sys/fs/cgroup/{names[name]}": content for name, content in found.items()})


def test_without_a_container_the_kernel_estimates_what_is_free(tmp_path: Path) -> None:
    assert available_bytes(host(tmp_path, 64)) == 64 * MIB


def test_without_an_estimate_all_of_it_counts(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) == host_memory_bytes(tmp_path) == host_memory_bytes(tmp_path / "nowhere")


@pytest.mark.parametrize("names", [V2, V1], ids=["v2", "v1"])
def test_a_container_has_its_limit_less_what_it_cannot_drop(tmp_path: Path, names: dict[str, str]) -> None:
    root = container(host(tmp_path, 64), names, limit=40 * MIB, used=25 * MIB, cache=5 * MIB)
    assert host_memory_bytes(root) == 40 * MIB and available_bytes(root) == 20 * MIB
    container(root, names, limit=40 * MIB, used=45 * MIB, cache=0)
    assert available_bytes(root) == 0  # over its limit, until the kernel has reclaimed something
    container(root, names, limit=400 * MIB, used=25 * MIB, cache=5 * MIB)
    assert available_bytes(root) == 64 * MIB  # other containers have taken what the limit would allow


def test_a_container_without_a_limit_or_a_known_use(tmp_path: Path) -> None:
    root = container(host(tmp_path, 64), V2, limit="max", used=25 * MIB, cache=0)
    assert available_bytes(root) == 64 * MIB
    (root / "sys/fs/cgroup/memory.max").write_text(f"{40 * MIB}\n")
    for name in ("memory.current", "memory.stat"):
        (root / "sys/fs/cgroup" / name).unlink()
    assert available_bytes(root) == 40 * MIB
