"""How often the host waits for the GPU in a steady step of every plan, with batches that come from the host.

    torchrun --nproc-per-node 2 benchmarks/host_syncs.py             # all plans of tests/gpu/gpu_cases.py
    torchrun --nproc-per-node 2 benchmarks/host_syncs.py zero ring   # by parts of their names; "compiled" only so
    PYTHONPATH=/path/to/older/src torchrun ... benchmarks/host_syncs.py

Trains a small GPT under every plan, and under the data plans a convnet with BatchNorm too, then counts the warnings of
`torch.cuda.set_sync_debug_mode("warn")` in steps after the first few. One line per plan: waits per step of the rank
with most of them, and the lines of weft that wait, with their counts. A plan that fails is told as failed. If a rank
fails alone, or a plan hangs, ranks cannot get out of their exchange: the run ends, and others go on by their names.
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "gpu"))
from gpu_cases import COMPILED, ON_DATA, all_plans, averaged_plans, local_plans  # noqa: E402

import weft  # noqa: E402
from weft.models.convnet import ConvNet, ConvNetConfig  # noqa: E402
from weft.models.gpt import GPT, GPTConfig  # noqa: E402
from weft.plan.plan import Plan  # noqa: E402

SIZES = GPTConfig(vocab_size=64, context=16, num_layers=4, hidden=32, heads=4, kv_heads=2, tied=False)
WARM_UP_STEPS, COUNTED_STEPS = 4, 5
SECONDS_FOR_THE_OTHERS, SECONDS_PER_PLAN = 60, 240
SOURCE = str(Path(weft.__file__).parent)


class HostWaits:
    """Context that counts synchronising calls, by the innermost line of weft."""

    def __init__(self) -> None:
        self.places: Counter[str] = Counter()

    def _note(self, message: Warning | str, *_: object, **__: object) -> None:
        if "synchronizing CUDA operation" not in str(message):
            return
        frames = [frame for frame in traceback.extract_stack() if frame.filename.startswith(SOURCE)]
        place = f"{Path(frames[-1].filename).relative_to(SOURCE)}:{frames[-1].lineno}" if frames else "outside of weft"
        self.places[place] += 1

    def __enter__(self) -> HostWaits:
        self._catching = warnings.catch_warnings()
        self._catching.__enter__()
        warnings.simplefilter("always")
        warnings.showwarning = self._note
        torch.cuda.set_sync_debug_mode("warn")
        return self

    def __exit__(self, *error: object) -> None:
        torch.cuda.set_sync_debug_mode("default")
        self._catching.__exit__(*error)


def count_waits(model: torch.nn.Module, plan: Plan, batch: tuple[torch.Tensor, torch.Tensor]) -> Counter[str]:
    """Waits of this rank in the counted steps, each with a batch of its own from the host."""
    adamw = functools.partial(torch.optim.AdamW, lr=1e-3, fused=True)
    trainer = weft.parallelize(model, plan, loss="cross-entropy", optimizer=adamw, example=batch[0][:2])
    with trainer:
        for _ in range(WARM_UP_STEPS):
            trainer.step(*(tensor.clone() for tensor in batch))
        with HostWaits() as waits:
            for _ in range(COUNTED_STEPS):
                trainer.step(*(tensor.clone() for tensor in batch))
        torch.cuda.synchronize()
    return waits.places


def gpt_waits(plan: Plan) -> Counter[str]:
    torch.manual_seed(0)
    tokens = torch.randint(0, SIZES.vocab_size, (8, 17))
    return count_waits(GPT(SIZES), plan, (tokens[:, :-1], tokens[:, 1:]))


def convnet_waits(plan: Plan) -> Counter[str]:
    torch.manual_seed(0)
    model = ConvNet(ConvNetConfig(width=8, num_blocks=4))
    return count_waits(model, plan, (torch.rand(8, 1, 8, 8), torch.randint(0, 10, (8,))))


def all_cases(num_ranks: int, wanted: list[str]) -> dict[str, Callable[[], Counter[str]]]:
    plans = all_plans(num_ranks) | averaged_plans(num_ranks) | local_plans(num_ranks)
    cases = {name: functools.partial(gpt_waits, plan) for name, plan in plans.items()}
    cases |= {f"{name}, convnet": functools.partial(convnet_waits, plans[name]) for name in ON_DATA}
    return {
        name: case
        for name, case in cases.items()
        if (not wanted or any(part in name for part in wanted)) and (COMPILED not in name or COMPILED in wanted)
    }


def result_of(case: Callable[[], Counter[str]]) -> str:
    """ "waits per step, where" of a case on this rank; "FAILED: why" if it fails."""
    try:
        places = case()
    except Exception as error:
        print(traceback.format_exc(), file=sys.stderr, flush=True)
        return f"FAILED: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    where = ", ".join(f"{place} ×{count / COUNTED_STEPS:g}" for place, count in places.most_common())
    return f"{places.total() / COUNTED_STEPS:g} {where}".strip()


def give_up(why: str) -> None:
    print(why, flush=True)
    os._exit(1)  # the interpreter itself would wait for the exchange


def join(rank: int) -> None:
    """Make the process group, so that older revisions run over NCCL too where ranks share a GPU."""
    if os.environ.get("WEFT_SHARE_GPUS"):
        os.environ.update(NCCL_HOSTID=f"rank{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("cpu:gloo,cuda:nccl")


def main() -> None:
    rank, num_ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a GPU")
    if num_ranks > 1:
        join(rank)
    # Through a file: groups may be broken after a failure. All ranks of a run are children of one launcher.
    path = Path(tempfile.gettempdir()) / f"host_syncs-{os.getppid()}"
    store = dist.FileStore(str(path), num_ranks)
    store.set_timeout(timedelta(seconds=SECONDS_FOR_THE_OTHERS))
    for name, case in all_cases(num_ranks, sys.argv[1:]).items():
        watchdog = threading.Timer(SECONDS_PER_PLAN, give_up, [f"{name}: HANGS on rank {rank}, so the run ends"])
        watchdog.daemon = True
        watchdog.start()
        store.set(f"{name}/{rank}", mine := result_of(case))
        watchdog.cancel()
        keys = [f"{name}/{other}" for other in range(num_ranks)]
        try:
            store.wait(keys)
        except RuntimeError:  # they wait in an exchange that this rank will not join
            give_up(f"{name}: rank {rank} {mine}; other ranks do not come, so the run ends")
        results = [store.get(key).decode() for key in keys]
        failed = [f"rank {other} {result}" for other, result in enumerate(results) if result.startswith("FAILED")]
        if rank == 0:
            print(f"{name}: {failed[0] if failed else max(results, key=lambda one: float(one.split()[0]))}", flush=True)


if __name__ == "__main__":
    main()
