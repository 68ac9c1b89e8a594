"""What a failure looks like over NCCL, where the others wait in a kernel: to be started by hand, one way at a time.

    torchrun --nproc-per-node 2 tests/gpu/gpu_failure.py WAY      (WEFT_SHARE_GPUS=1 on one GPU)

    raise   rank 1 raises: its traceback once, and rank 0 ends within 10 s
    kill    rank 1 is killed: rank 0 says so and ends within 10 s
    stuck   rank 1 does not come: after 18 s rank 0 names the exchange, its axis and its ranks, and both end
    late    rank 1 comes after 5 s: nothing is said, and both end in order

Ranks ignore SIGTERM, as in a run, so torchrun itself would need 30 s. A line per rank says when it began to wait.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch

from weft.comm.collectives import all_reduce
from weft.mesh import join_world, leave_world, make_mesh
from weft.plan.plan import Axes, Comm, Plan

FOREVER_S = 600.0


def main(way: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    world = join_world(timeout_s=20.0)
    plan = Plan(axes=Axes(data=world.size), comm=Comm(transport="c10d"))
    mesh = make_mesh(plan, world, groups=[("data", "gradients")])
    tensor, group = torch.ones(1 << 20, device=world.device), mesh.group("data", "gradients")
    all_reduce(tensor, group)
    print(f"rank {world.rank} on {world.device} over {world.backend}: {time.strftime('%X')}", flush=True)
    if world.rank == 1 and way == "raise":
        raise ValueError("planted")
    if world.rank == 1 and way == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if world.rank == 1:
        time.sleep(FOREVER_S if way == "stuck" else 5.0)
    all_reduce(tensor, group)
    print(f"rank {world.rank}: sum {tensor[0].item():g}", flush=True)  # NCCL: here the host waits for the kernel
    mesh.close()
    leave_world()


if __name__ == "__main__":
    main(sys.argv[1])
