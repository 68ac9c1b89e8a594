"""Steps to a loss times seconds per step, for every way to train on slow networks: which is best where.

    python benchmarks/slow_networks.py --phase loss --folder F --jobs 12 --minutes 9    # a GPU, or --tiny
    python benchmarks/slow_networks.py --phase lab --folder F --minutes 180             # two cores and root
    python benchmarks/slow_networks.py --phase lab --folder F --conditions 100Mbit:50ms --methods ddp local10-onebit
    python benchmarks/slow_networks.py --phase presets --folder F --advised wifi=delayed1-4-onebit
    python benchmarks/slow_networks.py --phase confirm --folder F --cells dense@1Gbit:50ms local10@1Gbit:50ms
    python benchmarks/slow_networks.py --phase report --folder F                        # tables, CSV, and the map
    python benchmarks/slow_networks.py --phase loss --folder /tmp/try --tiny            # a minute on a CPU

Four replicas train a byte GPT of 12.7 M parameters (4 layers of 512) on the source of Python's standard library, with
2 windows of 64 bytes per replica and step, so that a step computes for some tenths of a second and the exchange
decides. All methods have AdamW with the same rate, constant after a warm-up, but dgc, which needs SGD's momentum;
`--list` names them. What a method costs is found in two phases, because one machine cannot show both:

- **loss**: replicas in one process, which equal real ranks, over several seeds; the held-out loss of the average of the
  replicas every 25 steps. DDP without a hook computes what one process with whole batches does, and is not trained
  again; its fp16 and PowerSGD hooks run as four ranks. Runs are processes beside each other; one whose file is there is
  not made again, and none begins that would end after the minutes given.
- **lab**: seconds per step between four emulated hosts of one rank of one thread (docs/lab.md), one method after the
  other, because periodic and delayed exchanges need their own consecutive steps. Ranks begin together and are waited
  for through shared memory, which takes no time on the network. What is under way at the end is not waited for: as much
  was when the time began, after 3 to 12 steps of warm-up. 20 steps, or those that begin in 40 s, in whole periods.
  Bytes are those the switch counted, headers included. "No exchange" is measured before and after the methods of a
  condition, because a machine is not equally fast all day. A method that hangs or crashes is recorded as failed.
- **confirm**: some cells from end to end, trained in the lab without a pause. Weights are kept along the way, and their
  losses found afterwards: during an evaluation, exchanges would arrive that steps have not hidden.
- **presets**: the dense exchange against an advised method in the lab's presets, timed as in the lab phase.

The loss to reach is what the dense runs have after 60 % of their steps; steps to it are interpolated between
evaluations, of which two in a row must be below it. Rates are not tuned for each method (`--lr` with another folder
shows what that changes), learning is short, and two cores that compute for four hosts, the kernel and the switch make
codecs dearer than on real hosts.
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

import slow_networks_lab as lab
import slow_networks_loss as loss
import slow_networks_report as report
import torch
from slow_networks_methods import METHODS, TINY, Size

CONDITIONS = ["unshaped", *(f"{rate}:{delay}ms" for rate in ("1Gbit", "100Mbit") for delay in (0, 10, 50, 150))]


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--phase", choices=("loss", "lab", "confirm", "presets", "report"), default="report")
    parser.add_argument("--folder", type=Path, default=Path("slow-networks"), help="of results (slow-networks)")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), metavar="NAME", default=list(METHODS))
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="no run or method begins later, and no loss run ends later (60)"
    )
    parser.add_argument("--tiny", action="store_true", help="a small model and few steps, to try it")
    parser.add_argument("--list", action="store_true", help="name the methods and their settings")

    sizes = parser.add_argument_group("the model and its training, the same in all phases")
    sizes.add_argument("--hidden", type=int, help="width (512)")
    sizes.add_argument("--num-layers", type=int, help="(4)")
    sizes.add_argument("--context", type=int, help="bytes of a window (64)")
    sizes.add_argument("--windows", type=int, help="of a replica in a step (2)")
    sizes.add_argument("--steps", type=int, help="of a run (1500)")
    sizes.add_argument("--warm-up-steps", type=int, help="of the learning rate (50)")
    sizes.add_argument("--lr", type=float, help="of AdamW (1e-3); dgc has 100 times as much")
    sizes.add_argument("--evaluate-every", type=int, help="steps (25)")

    losses = parser.add_argument_group("loss")
    losses.add_argument("--seeds", type=int, default=3, help="runs of each method (3)")
    losses.add_argument("--jobs", type=int, help="runs beside each other (12 on a GPU, else one per core)")
    losses.add_argument(
        "--until-loss", type=float, default=-math.inf, help="end a run that is below it in two evaluations in a row"
    )

    labs = parser.add_argument_group("lab, presets and confirm")
    labs.add_argument("--conditions", nargs="+", default=CONDITIONS, metavar="RATE:DELAY", help="or unshaped (all)")
    labs.add_argument("--timed-steps", type=int, default=20, help="of a method, in whole periods (20)")
    labs.add_argument("--seconds", type=float, default=40.0, help="after which no period begins (40)")
    labs.add_argument("--limit-s", type=float, default=600.0, help="after which a method counts as hung (600)")
    labs.add_argument("--retry", action="store_true", help="time methods again that failed before")
    labs.add_argument("--presets", nargs="+", default=list(lab.ADVISED), help=f"({' '.join(lab.ADVISED)})")
    labs.add_argument("--advised", nargs="+", default=[], metavar="PRESET=NAME", help="the method against dense")
    labs.add_argument("--cells", nargs="+", default=[], metavar="NAME@RATE:DELAY", help="of confirm (four)")
    labs.add_argument(
        "--confirm-loss", type=float, help="to reach (dense's after 20 %% of its steps, or that of --losses-of)"
    )

    reports = parser.add_argument_group("report")
    reports.add_argument("--target-loss", type=float, help="(dense's after 60 %% of its steps)")
    reports.add_argument(
        "--losses-of", type=Path, help="the report.json of an earlier study, whose steps to its loss are taken"
    )
    reports.add_argument("--picture", type=Path, default=Path("docs/slow-networks.svg"), help="of the map")
    args = parser.parse_args()
    args.jobs = args.jobs or (12 if torch.cuda.is_available() else os.cpu_count() or 1)
    if args.tiny:
        args.timed_steps, args.seconds = min(args.timed_steps, 10), min(args.seconds, 5.0)
    return args


def size_of(args: argparse.Namespace) -> Size:
    names = ("hidden", "num_layers", "context", "windows", "steps", "warm_up_steps", "lr", "evaluate_every")
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    return Size(**{**(TINY if args.tiny else {}), **given})


def main() -> None:
    args = read_arguments()
    if args.list:
        for name, method in METHODS.items():
            how = f"hook {method.hook!r}" if method.is_torch else f"{method.data} {method.codec}"
            print(f"{name:22s} {method.title:32s} {method.optimizer} × {method.lr_scale:g}  {how}")
        return
    phases = {
        "loss": loss.run_all,
        "lab": lab.run_conditions,
        "presets": lab.run_presets,
        "confirm": lab.run_cells,
        "report": report.report,
    }
    phases[args.phase](args, size_of(args))


if __name__ == "__main__":
    main()
