"""What a plan costs on NCCL: communicators, their device memory, and NCCL kernels per steady step, counted.

    torchrun --nproc-per-node 2 benchmarks/nccl_costs.py [part of a name]
    WEFT_SHARE_GPUS=1 torchrun --nproc-per-node 2 benchmarks/nccl_costs.py    # ranks that take turns on one GPU

The model is a GPT of 32 narrow blocks, so that the numbers per step are those of a large one. Communicators are counted
in NCCL's own log; memory is what the GPU has less afterwards, beyond torch's, over all ranks that share it; kernels are
those that the profiler sees. The process group is made here, so that older revisions run under the same one.
"""

from __future__ import annotations

import functools
import glob
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import weft
from weft.models.gpt import GPT, GPTConfig
from weft.plan.plan import Axes, Data, Pipeline, Plan, Step, Tensor

LOGS = Path(tempfile.gettempdir()) / "weft-nccl-logs"
CONFIG = GPTConfig(vocab_size=512, context=128, num_layers=32, hidden=256, heads=8, tied=False)
ROUNDS = 3


def all_plans(size: int) -> dict[str, Plan]:
    halves = Axes(pipeline=2, data=size // 2) if size > 2 else Axes(pipeline=2)
    return {
        "data": Plan(axes=Axes(data=size)),
        "zero 1": Plan(axes=Axes(data=size), data=Data(shard="optimizer")),
        "zero 3": Plan(axes=Axes(data=size), data=Data(shard="parameters")),
        "tensor": Plan(axes=Axes(tensor=size)),
        "tensor, split tokens": Plan(axes=Axes(tensor=size), tensor=Tensor(sequence=True)),
        "ring": Plan(axes=Axes(ring=size)),
        "ulysses": Plan(axes=Axes(ulysses=size)),
        "pipeline": Plan(axes=halves, pipeline=Pipeline(schedule="1f1b"), step=Step(microbatches=4)),
    }


def num_communicators() -> int:
    """Communicators that this process has made, by NCCL's log."""
    texts = [Path(path).read_text(errors="replace") for path in glob.glob(f"{LOGS}/{os.getpid()}.log")]
    return sum(text.count("Init COMPLETE") for text in texts)


def taken_bytes(device: torch.device) -> int:
    """Device memory that is taken by anything but torch's tensors, where all ranks share one GPU."""
    torch.cuda.synchronize()
    reserved = torch.tensor([torch.cuda.memory_reserved(device)])
    dist.all_reduce(reserved)
    free, total = torch.cuda.mem_get_info(device)
    dist.all_reduce(torch.zeros(1))
    return total - free - int(reserved)


def measure(plan: Plan, device: torch.device) -> tuple[int, float, float]:
    """(communicators, MiB per rank, NCCL kernels per step)."""
    torch.manual_seed(0)
    communicators, before = num_communicators(), taken_bytes(device)
    tokens = torch.randint(0, CONFIG.vocab_size, (8, 129))
    trainer = weft.parallelize(
        GPT(CONFIG),
        plan,
        loss="cross-entropy",
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-3, fused=True),
        example=tokens[:2, :-1],
    )
    part = len(tokens) // trainer.data_size
    mine = tokens[trainer.data_rank * part : (trainer.data_rank + 1) * part]
    for _ in range(3):
        trainer.step(mine[:, :-1], mine[:, 1:])
    torch.cuda.empty_cache()
    made, taken = num_communicators() - communicators, taken_bytes(device) - before
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(ROUNDS):
            trainer.step(mine[:, :-1], mine[:, 1:])
        torch.cuda.synchronize()
    kernels = sum(event.count for event in profiler.key_averages() if "ncclDevKernel" in event.key)
    trainer.close()
    return made, taken / 2**20 / dist.get_world_size(), kernels / ROUNDS


def main() -> None:
    LOGS.mkdir(exist_ok=True)
    os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT", NCCL_DEBUG_FILE=f"{LOGS}/%p.log")
    if os.environ.get("WEFT_SHARE_GPUS"):
        os.environ.setdefault("NCCL_HOSTID", f"rank{os.environ['RANK']}")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_IB_DISABLE", "1")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    wanted = sys.argv[1:]
    plans = all_plans(dist.get_world_size())
    measure(plans["data"], device)  # libraries that the first step loads take device memory, too
    if dist.get_rank() == 0:
        print(f"{'plan':24} {'communicators':>14} {'MiB per rank':>13} {'NCCL kernels per step':>22}", flush=True)
    for name, plan in plans.items():
        if wanted and name not in wanted:
            continue
        made, mebibytes, kernels = measure(plan, device)
        if dist.get_rank() == 0:
            print(f"{name:24} {made:14d} {mebibytes:13.0f} {kernels:22.1f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
