"""ZeRO 1, 2 and 3: weft's step against torch's FSDP2, ZeroRedundancyOptimizer and DDP, and no exchange, in one run.

    python benchmarks/sharding.py --ranks 2 --model 12m --tokens 128
    python benchmarks/sharding.py --ranks 4 --model 100m --tokens 128 --sides zero3,fsdp-reshard --rounds 10

All sides have the same GPT, batches and fused AdamW; losses are compared before anything is timed. Ranks are gloo
processes of one thread each. Sides run a few steps in turn, in an order drawn anew every round. A barrier precedes
every step, and a step lasts until the slowest rank is done.

All sides are alive at once, so that disturbances of the machine affect all of them. If memory is too small for that,
they run in groups, each with "no exchange" and weft's all-reduce, and a side is compared only with those of its own
group. Ratios are medians over rounds of a side's time divided by the other's in the same round, with the 95 % interval
of that median (order statistics). "Above no exchange" is the median over rounds of the difference; the ratio of two
such has a bootstrap interval over rounds. Linux only.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch._dynamo  # noqa: F401  (FSDP2 needs it; importing it before ranks are forked saves seconds)
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.multiprocessing.spawn import start_processes
from torch.nn.parallel import DistributedDataParallel

import weft
from weft.models.gpt import GPT, GPTConfig
from weft.plan.plan import Axes, Data, Plan
from weft.units import format_bytes

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Times = dict[str, list[float]]
"""Seconds per step by round, for each side of a group."""

CONTEXT = 128
MODELS = {
    "12m": GPTConfig(vocab_size=1024, context=CONTEXT, num_layers=7, hidden=384, heads=6, tied=True),
    "100m": GPTConfig(vocab_size=1024, context=CONTEXT, num_layers=14, hidden=768, heads=12, tied=True),
}
WARMUP_STEPS = 3
TOLERANCE = 1e-4
NUM_RESAMPLES = 4000
LEARNING_RATE = 3e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A training method, and the memory a rank keeps for it between steps, in units of the whole model's parameters."""

    title: str
    whole: float
    """Units that every rank keeps."""
    shared: float = 0.0
    """Units that the ranks keep together."""


SIDES = {
    "none": Side(title="no exchange", whole=3),
    "allreduce": Side(title="weft all-reduce", whole=4),
    "zero1": Side(title="weft ZeRO-1", whole=2, shared=3),
    "zero2": Side(title="weft ZeRO-2", whole=1, shared=4),
    "zero3": Side(title="weft ZeRO-3", whole=0, shared=4),
    "fsdp-keep": Side(title="FSDP2, reshard off", whole=0, shared=4),
    "fsdp-reshard": Side(title="FSDP2, reshard on", whole=0, shared=4),
    "zro": Side(title="ZeroRedundancyOptimizer", whole=2, shared=2),
    "ddp": Side(title="DDP", whole=4),
}
BASELINES = ("none", "allreduce")
SHARD_OF = {"allreduce": "nothing", "zero1": "optimizer", "zero2": "gradients", "zero3": "parameters"}
RIVALS = (("allreduce", "ddp", 0.3), ("zero3", "fsdp-reshard", 0.3), ("zero2", "fsdp-keep", 0.3))
"""Pairs whose times above no exchange are compared, and the goal for weft."""
ALLREDUCE_GOALS = {"zero1": 1.10, "zero2": 1.10}


def make_model(config: GPTConfig) -> GPT:
    torch.manual_seed(0)
    return GPT(config)


def torch_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Step:
    if optimizer is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)  # at the end, so that an idle side takes little memory
        return loss.detach()

    return step


def fsdp_step(config: GPTConfig, num_ranks: int, *, reshard: bool) -> Step:
    model, mesh = make_model(config), init_device_mesh("cpu", (num_ranks,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    # torch's own choice for the root: it stays whole, because its backward starts at once. weft does the same.
    fully_shard(model, mesh=mesh)
    return torch_step(model)


def make_side(name: str, config: GPTConfig, num_ranks: int) -> Step:
    match name:
        case "none":
            return torch_step(make_model(config))
        case "ddp":
            return torch_step(DistributedDataParallel(make_model(config), gradient_as_bucket_view=True))
        case "zro":
            model = DistributedDataParallel(make_model(config), gradient_as_bucket_view=True)
            sharded = ZeroRedundancyOptimizer(
                model.parameters(),
                torch.optim.AdamW,
                parameters_as_bucket_view=True,
                lr=LEARNING_RATE,
                fused=True,
            )
            return torch_step(model, sharded)
        case "fsdp-keep" | "fsdp-reshard":
            return fsdp_step(config, num_ranks, reshard=name == "fsdp-reshard")
    trainer = weft.parallelize(
        make_model(config),
        Plan(axes=Axes(data=num_ranks), data=Data(shard=SHARD_OF[name])),
        loss="cross-entropy",
        optimizer=functools.partial(torch.optim.AdamW, lr=LEARNING_RATE, fused=True),
        device="cpu",
    )
    return trainer.step


def warm_up(sides: dict[str, Step], batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Run a few steps of every side, and check that all compute the same losses, before and after updates."""
    losses: dict[str, list[float]] = {}
    for name, step in sides.items():
        mean = torch.stack([step(*batch).double() for _ in range(WARMUP_STEPS)])
        dist.all_reduce(mean)  # weft's loss is the mean over ranks, torch's is this rank's own
        losses[name] = (mean / dist.get_world_size()).tolist()
    for name, got in losses.items():
        # Ranks that exchange nothing diverge after the first update.
        first, later = losses["none"][:1], losses["allreduce"][1:]
        wanted = first if name == "none" else first + later
        if not all(math.isclose(a, b, rel_tol=TOLERANCE) for a, b in zip(got, wanted, strict=False)):
            raise RuntimeError(f"{SIDES[name].title} has losses {got}, others {wanted}; it does not compute the same")


def run_rank(rank: int, folder: str, names: tuple[str, ...], args: argparse.Namespace, limit_s: float) -> None:
    """Time one group of sides; the first rank writes the slowest rank's times to the folder."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", args.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=args.ranks)
    config = MODELS[args.model]
    sides = {name: make_side(name, config, args.ranks) for name in names}
    text = torch.randint(
        config.vocab_size,
        (args.tokens // CONTEXT, CONTEXT + 1),
        generator=torch.Generator().manual_seed(rank),
    )
    batch = (text[:, :-1].contiguous(), text[:, 1:].contiguous())
    warm_up(sides, batch)
    times: Times = {name: [] for name in names}
    started = time.perf_counter()
    for number in range(args.rounds):
        for name in random.Random(number).sample(names, len(names)):
            for _ in range(args.steps):
                dist.barrier()
                before = time.perf_counter()
                sides[name](*batch)
                times[name].append(time.perf_counter() - before)
        go_on = torch.tensor([number + 1 < args.min_rounds or time.perf_counter() - started < limit_s])
        dist.broadcast(go_on, src=0)  # rank 0's clock decides, so that ranks stop together
        if not go_on:
            break
    slowest = torch.tensor([times[name] for name in names], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    if rank == 0:
        by_round = slowest.view(len(names), -1, args.steps).mean(2).tolist()
        Path(folder, "times").write_text(json.dumps(dict(zip(names, by_round, strict=True))))
    dist.destroy_process_group()


def group_bytes(names: tuple[str, ...], config: GPTConfig, args: argparse.Namespace) -> int:
    """Bytes of all ranks together: memory that sides keep, and the peak of the side that runs."""
    with torch.device("meta"):
        model_bytes = 4 * sum(parameter.numel() for parameter in GPT(config).parameters())
    kept = sum(SIDES[name].whole * args.ranks + SIDES[name].shared for name in names)
    # A block saves 20 float32 values per token and channel and needs some more temporarily; logits exist three times.
    activation_bytes = 4 * args.tokens * (24 * config.num_layers * config.hidden + 3 * config.vocab_size)
    process_bytes = 150 << 20
    # The temporary need is at most a whole set of gradients or of gathered parameters, and a few blocks or buckets.
    return int(model_bytes * (kept + 1.25 * args.ranks) + args.ranks * (activation_bytes + process_bytes))


def make_groups(wanted: list[str], args: argparse.Namespace) -> list[tuple[str, ...]]:
    """Sides in as few groups as memory allows, rivals in one group; sides too large for any are reported."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    order = ("zero3", "fsdp-reshard", "zero2", "fsdp-keep", "zero1", "zro", "ddp")
    groups: list[tuple[str, ...]] = [BASELINES]
    for name in (name for name in order if name in wanted):
        needed = group_bytes((*BASELINES, name), MODELS[args.model], args)
        if needed > 0.75 * available:
            print(
                f"left out: {SIDES[name].title}, which together with the baselines needs {format_bytes(needed)}; "
                f"{format_bytes(available)} are available. Use fewer ranks or tokens, or a smaller model."
            )
        elif group_bytes((*groups[-1], name), MODELS[args.model], args) > 0.75 * available:
            groups.append((*BASELINES, name))
        else:
            groups[-1] = (*groups[-1], name)
    return [tuple(name for name in SIDES if name in group) for group in groups]


def interval(values: list[float]) -> tuple[float, float]:
    """The 95 % interval of a median, from order statistics."""
    ordered, count = sorted(values), len(values)
    half = math.ceil(0.98 * math.sqrt(count))
    return ordered[max(count // 2 - half, 0)], ordered[min(count // 2 + half, count - 1)]


def ratios(times: Times, name: str, other: str) -> list[float]:
    return [mine / theirs for mine, theirs in zip(times[name], times[other], strict=True)]


def above_none(times: Times, name: str, rounds: Iterable[int]) -> float:
    """Seconds by which a side is slower than no exchange in the same round."""
    return statistics.median(times[name][number] - times["none"][number] for number in rounds)


def report_group(times: Times) -> None:
    print(f"{'side':>24s} {'ms':>9s} {'/ no exchange':>14s} {'/ weft all-reduce (95 %)':>26s}  goal")
    for name in times:
        to_none = statistics.median(ratios(times, name, "none"))
        to_allreduce = ratios(times, name, "allreduce")
        low, high = interval(to_allreduce)
        compared = f"{statistics.median(to_allreduce):.3f} ({low:.3f} to {high:.3f})"
        goal = f"at most {ALLREDUCE_GOALS[name]:.2f}" if name in ALLREDUCE_GOALS else ""
        line = f"{SIDES[name].title:>24s} {1e3 * statistics.median(times[name]):9.1f} {to_none:14.3f} {compared:>26s}"
        print(f"{line}  {goal}".rstrip(), flush=True)


def resampled_ratio(times: tuple[Times, Times], pair: tuple[str, str]) -> tuple[float, float, float]:
    """The first side's time above no exchange divided by the second's, and its 95 % bootstrap interval.

    Two sides of one group share their rounds; those of different groups are drawn independently.
    """
    chance = random.Random(0)
    all_rounds = [list(range(len(group["none"]))) for group in times]

    def ratio(first: list[int], second: list[int]) -> float:
        below = above_none(times[1], pair[1], second)
        return above_none(times[0], pair[0], first) / below if below > 0 else math.inf

    found = []
    for _ in range(NUM_RESAMPLES):
        first, second = (chance.choices(rounds, k=len(rounds)) for rounds in all_rounds)
        found.append(ratio(first, first if times[0] is times[1] else second))
    found.sort()
    return ratio(*all_rounds), found[int(0.025 * NUM_RESAMPLES)], found[int(0.975 * NUM_RESAMPLES)]


def report_rivals(groups: list[Times]) -> None:
    group_of = {name: times for times in groups for name in times}
    for mine, theirs, goal in RIVALS:
        if mine not in group_of or theirs not in group_of:
            continue
        ratio, low, high = resampled_ratio((group_of[mine], group_of[theirs]), (mine, theirs))
        above_ms = [
            f"{SIDES[name].title} {1e3 * above_none(group_of[name], name, range(len(group_of[name]['none']))):.1f} ms"
            for name in (mine, theirs)
        ]
        said_goal = f"; goal: at most {goal:.2f}" if goal else ""
        print(f"above no exchange: {'; '.join(above_ms)}; ratio {ratio:.3f} ({low:.3f} to {high:.3f}){said_goal}")


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="gloo processes (2)")
    parser.add_argument("--model", choices=MODELS, default="12m", help="about 12 or 100 million parameters (12m)")
    parser.add_argument("--tokens", type=int, default=128, help=f"tokens per rank, a multiple of {CONTEXT} (128)")
    parser.add_argument("--sides", default=",".join(SIDES), help="some of %(default)s; the first two always run")
    parser.add_argument("--rounds", type=int, default=30, help="maximum rounds per group (30)")
    parser.add_argument("--steps", type=int, default=2, help="steps per turn of a side (2)")
    parser.add_argument("--limit-s", type=float, default=150, help="seconds for the rounds of all groups (150)")
    parser.add_argument("--min-rounds", type=int, default=5, help="rounds run even if the time is up (5)")
    args = parser.parse_args()
    problems = [
        f"--sides {name} is not one of {', '.join(SIDES)}" for name in args.sides.split(",") if name not in SIDES
    ]
    if args.ranks < 2:
        problems.append(f"--ranks {args.ranks} exchange nothing; give 2 or more")
    if args.tokens < CONTEXT or args.tokens % CONTEXT:
        problems.append(f"--tokens {args.tokens} is not a multiple of {CONTEXT}")
    if min(args.rounds, args.steps) < 1:
        problems.append(f"--rounds {args.rounds} and --steps {args.steps} must be 1 or more")
    if problems:
        parser.error("; ".join(problems))
    return args


def main() -> None:
    args = read_arguments()
    with torch.device("meta"):
        numel = sum(parameter.numel() for parameter in GPT(MODELS[args.model]).parameters())
    print(
        f"GPT of {numel / 1e6:.1f} M parameters, {args.ranks} ranks (gloo, CPU, 1 thread each), "
        f"{args.tokens} tokens per rank, AdamW (fused), torch {torch.__version__}; medians"
    )
    groups = make_groups(args.sides.split(","), args)
    measured: list[Times] = []
    for names in groups:
        with tempfile.TemporaryDirectory() as folder:
            settings = (folder, names, args, args.limit_s / len(groups))
            # Forked ranks start fast; this process has run no kernel, so it has no threads that a fork would lose.
            start_processes(run_rank, settings, nprocs=args.ranks, start_method="fork")
            measured.append(json.loads(Path(folder, "times").read_text()))
        if len(groups) > 1:
            print(f"group {len(measured)} of {len(groups)}, {len(measured[-1]['none'])} rounds")
        report_group(measured[-1])
    report_rivals(measured)


if __name__ == "__main__":
    main()
