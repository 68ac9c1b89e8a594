"""Typical clusters to plan for: figures of well-known hardware, none of them measured here.

Rates are those that applications usually see: about 94 % of an Ethernet link's nominal rate, and three quarters of
NVLink's. A profile of the real cluster (`weft profile`) replaces them.
"""

from __future__ import annotations

import itertools
from typing import Any

from weft.errors import ClusterError, nearest
from weft.profiles.cluster import Cluster, Device, Link

_CPU: dict[str, Any] = {
    "kind": "cpu",
    "name": "typical 8-core CPU",
    "memory_bytes": 8 << 30,
    "copy_bytes_per_s": 8e9,
    "fp32_flops_per_s": 2e11,
}
_GPU: dict[str, Any] = {
    "kind": "cuda",
    "name": "typical 80 GB GPU",
    "memory_bytes": 80 << 30,
    "copy_bytes_per_s": 1.2e12,
    "fp32_flops_per_s": 5e13,
    "bf16_flops_per_s": 6e14,
    "fp16_flops_per_s": 6e14,
}
_SHARED = {"kind": "shared-memory", "transport": "shared", "alpha_s": 20e-6, "bytes_per_s": 6e9}
_LOOPBACK = {"kind": "loopback", "transport": "c10d", "alpha_s": 60e-6, "bytes_per_s": 2e9}
_NVLINK = {"kind": "device", "transport": "c10d", "alpha_s": 10e-6, "bytes_per_s": 3.4e11}
_ETHERNET_1G = {"alpha_s": 100e-6, "bytes_per_s": 1.17e8}
_ETHERNET_10G = {"alpha_s": 30e-6, "bytes_per_s": 1.17e9}
_INFINIBAND_100G = {"alpha_s": 5e-6, "bytes_per_s": 1.15e10}
_GPU_HOSTS = {"num_hosts": 4, "ranks_per_host": 8, "device": _GPU, "inside": [_NVLINK]}
_CPU_HOSTS = {"num_hosts": 4, "ranks_per_host": 2, "device": _CPU, "inside": [_SHARED, _LOOPBACK]}

PRESETS: dict[str, dict[str, Any]] = {
    "laptop": {**_CPU_HOSTS, "num_hosts": 1},
    "1gbe": {**_CPU_HOSTS, "between": _ETHERNET_1G},
    "10gbe": {**_CPU_HOSTS, "between": _ETHERNET_10G},
    "infiniband-100g": {**_GPU_HOSTS, "between": _INFINIBAND_100G},
    "nvlink-8": {**_GPU_HOSTS, "num_hosts": 1},
}


def preset(name: str) -> Cluster:
    """A typical cluster by name."""
    if name not in PRESETS:
        raise ClusterError(f'there is no preset "{name}"; {nearest(name, PRESETS)}')
    made = PRESETS[name]
    hosts, per_host = range(made["num_hosts"]), made["ranks_per_host"]
    links = [Link(hosts=(host, host), **link) for host in hosts for link in made["inside"]]
    if "between" in made:
        links += [Link(kind="network", hosts=pair, **made["between"]) for pair in itertools.combinations(hosts, 2)]
    ranks = range(len(hosts) * per_host)
    devices = (Device(rank=rank, host=rank // per_host, **made["device"]) for rank in ranks)
    return Cluster(name=name, measured=False, devices=tuple(devices), links=tuple(links))
