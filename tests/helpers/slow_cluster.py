"""A slow network as data: as `weft profile` measured it in the lab, 4 hosts with links of 100 Mbit/s and 25 ms."""

from __future__ import annotations

import itertools

from weft.profiles.cluster import Cluster, Compression, Device, Link, Timing

NUM_HOSTS = 4


def slow_cluster() -> Cluster:
    speeds = {"copy_bytes_per_s": 8e9, "fp32_flops_per_s": 6e10}
    return Cluster(
        name="slow",
        measured=True,
        devices=tuple(
            Device(rank=host, host=host, kind="cpu", name="AMD EPYC", memory_bytes=24 << 30, **speeds)
            for host in range(NUM_HOSTS)
        ),
        links=tuple(
            Link(kind="network", hosts=hosts, alpha_s=0.0252, bytes_per_s=11.86e6)
            for hosts in itertools.combinations(range(NUM_HOSTS), 2)
        ),
        timings=tuple(
            Timing(collective=name, link="network", num_ranks=NUM_HOSTS, alpha_s=alpha_s, bytes_per_s=bytes_per_s)
            for name, alpha_s, bytes_per_s in (
                ("all-reduce", 0.3033, 9.720e6),
                ("reduce-scatter", 0.0511, 10.295e6),
                ("all-gather", 0.0503, 12.000e6),
            )
        ),
        compressions=tuple(
            Compression(alpha_s=0.0, replica_element_ns=0.0, **fields)
            for fields in (
                {"name": "half", "element_ns": 0.497},
                {"name": "topk", "element_ns": 2.953},
                {"name": "topk", "bits": 2, "element_ns": 2.891},
                {"name": "dgc", "density": 0.001, "element_ns": 1.107},
                {"name": "onebit", "element_ns": 3.661},
                {"name": "sign", "element_ns": 1.211},
                {"name": "qsgd", "element_ns": 0.477},
                {"name": "qsgd", "levels": 4, "element_ns": 0.521},
                {"name": "terngrad", "element_ns": 1.679},
                {"name": "powersgd", "element_ns": 2.519},
            )
        ),
    )
