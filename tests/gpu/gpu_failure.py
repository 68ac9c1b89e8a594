"""What a failure looks like over NCCL, where the others wait in a kernel: all ways one after the other, or one by hand.

    python tests/gpu/gpu_failure.py                               (WEFT_SHARE_GPUS=1 on one GPU); two minutes
    torchrun --nproc-per-node 2 tests/gpu/gpu_failure.py WAY

    raise   rank 1 raises: its traceback once, and rank 0 ends within 10 s
    kill    rank 1 is killed: rank 0 says so and ends within 10 s
    stuck   rank 1 does not come: after 18 s rank 0 names the exchange, its axis and its ranks, and both end
    late    rank 1 comes after 5 s: nothing is said, and both end in order
    step    rank 1 comes to a trainer's steady step after 12 s: the exchange is named within 8 s, and both end in order

Ranks ignore SIGTERM, as in a run, so torchrun itself would need 30 s. A line per rank says when it began to wait.
"""

from __future__ import annotations

import functools
import os
import re
import signal
import subprocess
import sys
import time

import torch

import weft
from weft.comm.collectives import all_reduce
from weft.mesh import make_mesh
from weft.plan.plan import Axes, Comm, Plan
from weft.world import join_world, leave_world

FOREVER_S = 600.0
STEADY_STEPS, LATE_STEP, LATE_S = 12, 10, 12.0
WAYS = {
    "raise": (False, ["ValueError: planted"], ["has waited"]),
    "stuck": (False, [r"rank 0 has waited \d+ s in all-reduce .*along data/gradients, ranks 0, 1"], []),
    "late": (True, ["rank 0: sum", "rank 1: sum"], ["has waited"]),
    "step": (True, [r"rank 0 has waited [2-8] s in .*along data/gradients", "rank 0: done", "rank 1: done"], []),
    "kill": (False, ["rank 1"], []),
}
"""Whether ranks end in order, what must be said, and what must not. A killed rank comes last: it can spoil MPS."""
WORST_S = 90.0


def fail(way: str) -> None:
    """One rank of the two."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if way == "step":
        come_late_to_a_step()
        return
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


def come_late_to_a_step() -> None:
    plan = Plan(axes=Axes(data=2), comm=Comm(transport="c10d"))
    adamw = functools.partial(torch.optim.AdamW, lr=1e-3, fused=True)
    trainer = weft.parallelize(torch.nn.Linear(64, 10), plan, loss="cross-entropy", optimizer=adamw)
    rank = trainer.mesh.world.rank
    for step in range(STEADY_STEPS):
        if rank == 1 and step == LATE_STEP:
            time.sleep(LATE_S)
        loss = trainer.step(torch.randn(8, 64), torch.randint(10, (8,)))
    trainer.close()
    print(f"rank {rank}: done, loss {float(loss):.3f}", flush=True)
    leave_world()


def judge(way: str) -> str:
    """Run a way, and say what is wrong with it; empty if nothing is."""
    in_order, wanted, unwanted = WAYS[way]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", __file__, way]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=WORST_S)
    except subprocess.TimeoutExpired as late:
        return f"has not ended after {WORST_S:.0f} s; said: {late.stdout!r} {late.stderr!r}"
    said = ended.stdout + ended.stderr
    problems = [f"ended with {ended.returncode}"] if (ended.returncode == 0) != in_order else []
    problems += [f"did not say {text!r}" for text in wanted if not re.search(text, said)]
    problems += [f"said {text!r}" for text in unwanted if re.search(text, said)]
    return f"{'; '.join(problems)}; all that was said:\n{said}" if problems else ""


def main() -> None:
    if len(sys.argv) > 1:
        fail(sys.argv[1])
        return
    found = {}
    for way in WAYS:
        started = time.monotonic()
        found[way] = judge(way)
        print(
            f"{way}: {f'FAILED, {found[way]}' if found[way] else 'ok'} ({time.monotonic() - started:.0f} s)", flush=True
        )
    sys.exit(any(found.values()))


if __name__ == "__main__":
    main()
