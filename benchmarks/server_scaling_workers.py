"""The processes of `server_scaling.py`: workers, and what is measured in one of them."""

from __future__ import annotations

import functools
import os
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from emulated_accelerator import Emulated, EmulatedModel, make_batch
from forked_workers import run_workers
from process_memory import PeakPss, read_pss_bytes
from server_processes import Busy, machine_busy_s, server_pids
from torch import nn

import weft
from weft.models.gpt import GPT, GPTConfig
from weft.plan.plan import Axes, Comm, Data, Plan, Server
from weft.sync.served import ServedSync

ALL_REDUCE, GLOO = "all-reduce", "all-reduce, gloo"
CONTEXT, SAMPLES = 64, 6
"""Of the GPT, as in `scaling.py`."""
WARM_UP_STEPS = 3
LIMIT_S = 120.0
"""After which a run counts as hung."""


def side_of(num_servers: int) -> str:
    return f"{num_servers} server{'s' if num_servers > 1 else ''}"


def servers_of(side: str) -> int:
    """The number of a side's servers."""
    return 0 if side in (ALL_REDUCE, GLOO) else int(side.split()[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One run."""

    side: str
    num_workers: int
    work: Emulated | None
    """None: a GPT that is computed on the cores."""
    bucket_mb: float
    blocks: int
    steps: int
    mode: str = "sync"
    peak: bool = False
    """The worker's peak of memory is asked for, not its time."""

    @property
    def plan(self) -> Plan:
        common = {
            "axes": Axes(data=self.num_workers),
            "comm": Comm(bucket_bytes=int(1e6 * self.bucket_mb), transport="c10d" if self.side == GLOO else "auto"),
        }
        if not servers_of(self.side):
            return Plan(**common)
        server = Server(shards=servers_of(self.side), mode=self.mode)
        return Plan(**common, data=Data(sync="server"), server=server)

    def make_model(self) -> nn.Module:
        torch.manual_seed(0)
        if self.work is not None:
            return EmulatedModel(self.work)
        return GPT(GPTConfig(vocab_size=256, context=CONTEXT, num_layers=4, hidden=256, heads=4))

    def make_batch(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.work is not None:
            return make_batch(rank)
        text = torch.randint(256, (SAMPLES, CONTEXT + 1), generator=torch.Generator().manual_seed(rank))
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def measure(rank: int, config: Config) -> dict[str, Any]:
    """What this worker found."""
    before_bytes = read_pss_bytes()
    batch = config.make_batch(rank)
    trainer = weft.parallelize(
        config.make_model(),
        config.plan,
        loss="cross-entropy",
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-4),
        device="cpu",
    )
    with trainer:
        if config.peak:
            with PeakPss(every_s=0.002) as peak:
                for _ in range(config.steps):
                    trainer.step(*batch)
            return {"peak_bytes": peak.peak_bytes - before_bytes}
        for _ in range(WARM_UP_STEPS):
            trainer.step(*batch)
        sync = trainer.sync
        pids = server_pids(os.getpid()) if isinstance(sync, ServedSync) else []
        dist.barrier()
        exchanged = sync.exchanged_bytes if isinstance(sync, ServedSync) else []
        busy, machine_s = [Busy.of(pid) for pid in pids], machine_busy_s()
        step_s = []
        for _ in range(config.blocks):
            dist.barrier()
            started = time.perf_counter()
            for _ in range(config.steps):
                trainer.step(*batch)
            step_s.append((time.perf_counter() - started) / config.steps)
        dist.barrier()
        num_steps = config.blocks * config.steps
        used = [Busy.of(pid).since(one) for pid, one in zip(pids, busy, strict=True)]
        found = {
            "step_s": step_s,
            "busy_s": (machine_busy_s() - machine_s) / num_steps,
            "servers": [{"main_s": one.main_s / num_steps, "all_s": one.all_s / num_steps} for one in used],
            "exchanged": [],
        }
        if isinstance(sync, ServedSync):
            pairs = zip(sync.exchanged_bytes, exchanged, strict=True)
            found["exchanged"] = [[(a - b) / num_steps for a, b in zip(*pair, strict=True)] for pair in pairs]
        dist.barrier()
        return found


def together(config: Config, found: list[dict[str, Any]]) -> dict[str, Any]:
    """What all workers found: the slowest one's time, the servers' bytes from all of them."""
    if config.peak:
        return {"peak_bytes": max(one["peak_bytes"] for one in found)}
    first = found[0]  # it started the servers
    servers = [
        {
            **one,
            "received": sum(of["exchanged"][k][0] for of in found),
            "sent": sum(of["exchanged"][k][1] for of in found),
        }
        for k, one in enumerate(first["servers"])
    ]
    step_s = [max(block) for block in zip(*(one["step_s"] for one in found), strict=True)]
    return {"num_workers": len(found), "step_s": step_s, "busy_s": first["busy_s"], "servers": servers}


def run(config: Config) -> dict[str, Any]:
    """Start the workers of a run, and hear what they found."""
    return together(config, run_workers(config.num_workers, measure, config, limit_s=LIMIT_S))
