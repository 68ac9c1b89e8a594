"""Peak memory of a rank (proportional set size) against the prediction, per ZeRO stage and number of ranks.

    python benchmarks/memory.py [--ranks 2 4] [--shard nothing optimizer gradients parameters] [--tokens 256]
                                [--sync all-reduce local diloco diloco-half topk onebit powersgd qsgd local-topk]
                                [--malloc trimmed | default]

A GPT of about 200 M parameters in float32 with AdamW, gloo ranks on one host. A thread of each rank reads its
proportional set size from /proc/self/smaps_rollup every 20 ms. The measured value is the peak over a few steps minus
the size of the process before the model was built and after a step of a tiny one, so that libraries and the transport
are not counted. Every line is a run in new processes. Linux and glibc only.

With --sync local or diloco replicas exchange after every second step: all ranks are replicas, or, where something is
sharded, there are two. With the name of a codec gradients are all-reduced through it; two replicas where something is
sharded.

The prediction covers live memory. glibc keeps much of the memory that torch frees, in pieces between live blocks;
"trimmed" makes it return every larger block at once, "default" shows glibc's own behaviour.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import functools
import gc
import itertools
import multiprocessing
import statistics
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from process_memory import PeakPss, read_pss_bytes

import weft
from weft.measure.model import profile_model
from weft.models.gpt import GPT, GPTConfig
from weft.plan.plan import Axes, Codec, Data, Plan, Precision, Recompute, Step
from weft.planning.memory import Memory, predict_memory
from weft.units import format_bytes

SHARDS = ("nothing", "optimizer", "gradients", "parameters")
DILOCO = Data(sync="local", every=2, outer="nesterov", outer_lr=0.7, outer_momentum=0.9)
SYNCS = {
    "all-reduce": Plan(),
    "local": Plan(data=Data(sync="local", every=2)),
    "diloco": Plan(data=DILOCO),
    "diloco-half": Plan(data=DILOCO, codec=Codec(name="half")),
    **{name: Plan(codec=Codec(name=name)) for name in ("topk", "onebit", "powersgd", "qsgd")},
    "local-topk": Plan(data=Data(sync="local", every=2), codec=Codec(name="topk")),
}
LARGE = GPTConfig(vocab_size=32000, context=256, num_layers=13, hidden=1024, heads=16)
TINY = GPTConfig(vocab_size=64, context=256, num_layers=2, hidden=64, heads=2)


def trim_malloc() -> None:
    """Make glibc map every block above 64 KiB separately, so that freed memory returns to the system."""
    m_mmap_threshold = -3
    if ctypes.CDLL(None).mallopt(m_mmap_threshold, 1 << 16) != 1:
        raise RuntimeError("this C library has no mallopt; use --malloc default")


def train(config: GPTConfig, plan: Plan, *, samples: int, tokens: int, num_steps: int, meta: bool) -> weft.Trainer:
    with torch.device("meta" if meta else "cpu"):
        model = GPT(config)
    optimizer = functools.partial(torch.optim.AdamW, lr=1e-4)
    trainer = weft.parallelize(model, plan, loss="cross-entropy", optimizer=optimizer, device="cpu")
    for step in range(num_steps):
        generator = torch.Generator().manual_seed(1000 * step + trainer.data_rank)
        shape = (plan.step.microbatches * samples, tokens + 1)
        text = torch.randint(config.vocab_size, shape, generator=generator)
        float(trainer.step(text[:, :-1].contiguous(), text[:, 1:].contiguous()))
    return trainer


def measure_peak_bytes(plan: Plan, *, samples: int, tokens: int, meta: bool = False, trims: bool = True) -> int:
    """This rank's peak in two steps of the large model. Needs a default process group."""
    if trims:
        trim_malloc()
    train(TINY, plan, samples=1, tokens=tokens, num_steps=1, meta=False)
    gc.collect()
    before = read_pss_bytes()
    dist.barrier()
    with PeakPss() as watched:
        train(LARGE, plan, samples=samples, tokens=tokens, num_steps=2, meta=meta)
        dist.barrier()
    return watched.peak_bytes - before


def predict(plan: Plan, *, samples: int, tokens: int) -> Memory:
    with torch.device("meta"):
        model, batch = GPT(LARGE), torch.empty(samples, tokens, dtype=torch.long)
    return predict_memory(plan, profile_model(model, batch, batch, compute=plan.precision.compute))


def run_rank(rank: int, num_ranks: int, folder: str, plan: Plan, settings: dict[str, Any], results: Any) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    results.put(measure_peak_bytes(plan, **settings))
    dist.barrier()
    dist.destroy_process_group()


def run(num_ranks: int, plan: Plan, settings: dict[str, Any]) -> list[int]:
    """Peaks of all ranks, each in its own process."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        results = context.Queue()
        arguments = [(rank, num_ranks, folder, plan, settings, results) for rank in range(num_ranks)]
        ranks = [context.Process(target=run_rank, args=each, daemon=True) for each in arguments]
        for process in ranks:
            process.start()
        peaks = [results.get(timeout=1200) for _ in ranks]
        for process in ranks:
            process.join()
    return peaks


def make_plan(num_ranks: int, shard: str, sync: str, args: argparse.Namespace) -> Plan:
    plan = SYNCS[sync]
    is_apart = plan.replica_axis is not None or plan.codec.name != "none"
    replicas = 2 if is_apart and shard != "nothing" else 1
    return dataclasses.replace(
        plan,
        axes=Axes(replicate=replicas, data=num_ranks // replicas),
        step=Step(microbatches=args.microbatches),
        data=dataclasses.replace(plan.data, shard=shard),
        precision=Precision(compute=args.compute),
        recompute=Recompute(policy=args.recompute),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--shard", nargs="+", choices=SHARDS, default=SHARDS)
    parser.add_argument("--sync", nargs="+", choices=SYNCS, default=["all-reduce"])
    parser.add_argument("--samples", type=int, default=1, help="of a microbatch")
    parser.add_argument("--tokens", type=int, default=256, help="of a sample")
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--compute", choices=("model", "bf16"), default="model")
    parser.add_argument("--recompute", choices=("none", "selective", "full"), default="none")
    parser.add_argument("--meta", action="store_true", help="build the model on the meta device")
    parser.add_argument("--malloc", choices=("trimmed", "default"), default="trimmed")
    parser.add_argument("--table", action="store_true", help="print the predicted categories too")
    args = parser.parse_args()
    with torch.device("meta"):
        numel = sum(parameter.numel() for parameter in GPT(LARGE).parameters())
    print(f"GPT of {numel / 1e6:.1f} M parameters, AdamW, gloo on the CPU, torch {torch.__version__}; peak per rank")
    heads = f"{'ranks':>5s} {'shard':>10s} {'sync':>11s} {'predicted':>10s} {'measured':>10s} {'ratio':>6s}"
    print(f"{heads}   fullest moment")
    for num_ranks, shard, sync in itertools.product(args.ranks, args.shard, args.sync):
        plan = make_plan(num_ranks, shard, sync, args)
        predicted = predict(plan, samples=args.samples, tokens=args.tokens)
        settings = {
            "samples": args.samples,
            "tokens": args.tokens,
            "meta": args.meta,
            "trims": args.malloc == "trimmed",
        }
        measured = statistics.mean(run(num_ranks, plan, settings))
        print(
            f"{num_ranks:5d} {shard:>10s} {sync:>11s} {format_bytes(predicted.total):>10s} "
            f"{format_bytes(measured):>10s} {predicted.total / measured:6.3f}   {predicted.moment}",
            flush=True,
        )
        if args.table:
            print(predicted.table(), flush=True)


if __name__ == "__main__":
    main()
