"""`weft profile`: measure ranks, links, collectives and codecs, and write them to cluster.toml for the planner."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli.advice import print_advice
from weft.cli.advice_options import (
    AdviceOptions,
    network_for,
    read_advice_options,
    refuse_beside_cluster,
    require_links,
    samples_per_rank,
)
from weft.cli.compression import ModelOptions, print_codecs, read_count
from weft.cli.terminal import SECONDS_BETWEEN_LINES, Traceback, is_first_rank, print_table, refuse_ranks, say
from weft.errors import LaunchError
from weft.launch import default_num_ranks, is_launched, launch
from weft.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from weft.measure.preflight import Preflight
    from weft.profiles.cluster import Cluster, Link, Timing
    from weft.world import World

_DEFAULT_OUTPUT = Path("cluster.toml")
_JOIN_TIMEOUT_S = 300.0


def command(
    output: Annotated[Path | None, typer.Option(help="File to write; default: cluster.toml.")] = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="Ranks to start here; default: one per GPU, or 2.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes and repetitions: seconds, not a minute.")] = False,
    preflight: Annotated[bool, typer.Option("--preflight", help="Only compare ranks; measure nothing.")] = False,
    job: Annotated[
        Path | None,
        typer.Option(metavar="JOB.toml", help="Compare this job's files and data on all ranks, and take its model."),
    ] = None,
    parameters: Annotated[
        str | None, typer.Option(metavar="N", help="Model size to compare codecs and methods for; default: 25M.")
    ] = None,
    replicas: Annotated[
        int | None, typer.Option(min=2, help="Number of replicas; default: hosts, or ranks of one host.")
    ] = None,
    advise: Annotated[
        bool,
        typer.Option(
            "--advise", help="Rank methods for these links by predicted time to the same loss, and print the best plan."
        ),
    ] = False,
    cluster: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Advise from this cluster.toml, and measure no links.")
    ] = None,
    step_time: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help='Computing time of one step, like "250ms"; default: measured with --job, otherwise estimated.',
        ),
    ] = None,
    bandwidth: Annotated[
        str | None,
        typer.Option(metavar="RATE", help='Assume links of this rate instead of the measured ones, like "100Mbit".'),
    ] = None,
    latency: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help='Assume links of this latency, one way, instead of the measured ones, like "50ms".'
        ),
    ] = None,
    traceback: Traceback = False,
) -> None:
    """Measure devices, links, collectives and codecs, and write them to cluster.toml.

    Example:  weft profile --quick

    It also times every codec, and prints the bandwidth below which each pays:  weft profile --parameters 124M

    What to set on a network, on every host:  torchrun --nnodes 4 ... -m weft profile --advise --job run.toml

    The same from a file, for other links:  weft profile --advise --cluster cluster.toml --bandwidth 100Mbit

    Alone it measures this host and the links inside it; --advise is then about these, unless --bandwidth and --latency
    give those of a network. Under torchrun every host takes part: ranks are first compared (versions, code, data,
    clocks), links between hosts are measured pair by pair, and a slow one is named. Differences that would break a run
    end it with exit code 1.

    torchrun --nnodes 2 --nproc-per-node 4 ... -m weft profile
    """
    del traceback  # read by main()
    if preflight and (quick or output is not None or parameters is not None or replicas is not None):
        raise LaunchError(
            "--preflight measures nothing and writes nothing; leave out --quick, --output, --parameters and --replicas"
        )
    if job is not None and parameters is not None:
        raise LaunchError("--job and --parameters both give the size of the model; leave one out")
    model = ModelOptions(num_parameters=read_count(parameters), job=job, num_replicas=replicas)
    options = {"--step-time": step_time, "--bandwidth": bandwidth, "--latency": latency}
    advice = read_advice_options(advise, {**options, "--cluster": None if cluster is None else str(cluster)})
    if cluster is not None and advice is not None:
        refuse_beside_cluster(quick=quick, preflight=preflight, output=output, ranks=ranks)
        _advise_from(cluster, model, advice)
        return
    if advice is not None and preflight:
        raise LaunchError("--advise needs measured links, and --preflight measures nothing; leave one out")
    if advice is not None and ranks is not None:
        require_links(ranks, model, advice)
    target = None if preflight else output or _DEFAULT_OUTPUT
    # Hosts of other ranks need not have the directory.
    if target is not None and is_first_rank() and not target.parent.is_dir():
        raise LaunchError(
            f"{target} cannot be written: there is no directory {target.parent}; make that directory first"
        )
    arguments: dict[str, Any] = {"target": target, "quick": quick, "model": model}
    arguments |= {"compares": preflight or job is not None, "advice": advice}
    if is_launched():
        refuse_ranks(ranks, LaunchError)
        is_ok = _run_rank(folder=None, attempt=0, **{**arguments, "compares": True})
    else:
        is_ok = all(launch(_run_rank, arguments, num_ranks=ranks or default_num_ranks(), max_restarts=0))
    if not is_ok:
        raise typer.Exit(1)


def _advise_from(path: Path, model: ModelOptions, advice: AdviceOptions) -> None:
    """Advice from a cluster that was measured before."""
    from rich.console import Console

    from weft.profiles.cluster_text import read_cluster

    cluster = read_cluster(path)
    measured_s = _measured_step_s(cluster, model, advice)
    print_advice(Console(), cluster, model, advice, measured_s=measured_s, measured_on="on one rank here, alone")


def _measured_step_s(
    cluster: Cluster, model: ModelOptions, advice: AdviceOptions, world: World | None = None
) -> float | None:
    """Seconds that a step of the job computes; None if there is no job, or the time is given. Collective over `world`,
    by default this process alone."""
    if model.job is None or advice.step_s is not None:
        return None
    from weft.measure.step_time import measure_step
    from weft.training.run.job import read_job

    num_samples = samples_per_rank(model.job, network_for(cluster, model, advice))
    return measure_step(read_job(model.job), world or _join(), num_samples=num_samples)


def _run_rank(
    *,
    folder: Path | None,
    attempt: int,
    target: Path | None,
    quick: bool,
    model: ModelOptions,
    compares: bool,
    advice: AdviceOptions | None = None,
) -> bool:
    """The work of every rank; returns False if something was found that would break a run."""
    del folder, attempt
    from weft.measure.cluster import FULL, QUICK, measure_cluster
    from weft.measure.preflight import run_preflight
    from weft.mesh import make_mesh
    from weft.plan.plan import Axes, Comm, Plan
    from weft.profiles.cluster_text import write_cluster
    from weft.world import leave_world

    world = _join()
    if advice is not None:
        require_links(world.size, model, advice)
    view = _View() if world.rank == 0 else None
    if compares:
        plan = Plan(axes=Axes(data=world.size), comm=Comm(transport="c10d"))
        with make_mesh(plan, world, groups=[("world", "control")]) as mesh:
            found = run_preflight(world, mesh.everyone("control"), job=model.job)
        if view is not None:
            view.compared(found)
        if not found.ok:
            leave_world()
            return False
    if target is not None:
        effort, progress = QUICK if quick else FULL, view.progress if view is not None else lambda *_: None
        try:
            cluster, notes = measure_cluster(world, effort=effort, progress=progress, name=target.stem)
        finally:
            if view is not None:
                view.close()
        if view is not None:  # before a step is tried, which may not fit on a rank
            write_cluster(cluster, target)
        measured_s = None if advice is None else _measured_step_s(cluster, model, advice, world)
        if view is not None:
            view.measured(cluster, notes, target, model)
            if advice is not None:
                view.advised(cluster, model, advice, measured_s)
    leave_world()
    return True


def _join() -> World:
    from weft.measure.interfaces import advice
    from weft.world import join_world

    try:
        return join_world(timeout_s=_JOIN_TIMEOUT_S)
    except RuntimeError as error:
        rank, first = os.environ.get("RANK", "0"), str(error).splitlines()[0]
        raise LaunchError(f"rank {rank} cannot reach the others ({first}); {advice()}") from error


class _View:
    """Output of rank 0: a bar while it measures (lines where there is no terminal), tables at the end."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console: Console = Console()
        self._bar: Any = None
        self._last_line_s = 0.0

    def progress(self, done: int, total: int, label: str) -> None:
        if not self._console.is_terminal:
            if time.monotonic() - self._last_line_s >= SECONDS_BETWEEN_LINES:
                self._last_line_s = time.monotonic()
                say(self._console, f"measuring {label} ({done}/{total})")
            return
        if self._bar is None:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

            columns = (TextColumn("measuring"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"))
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._bar.start()
            self._task = self._bar.add_task(label, total=total)
        self._bar.update(self._task, completed=done, total=total, description=label)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def compared(self, found: Preflight) -> None:
        """Print the preflight: what rank 0 has, then all differences."""
        first = found.facts[0]
        told = {**first["same"], **first["alike"], "address": first["address"]}
        told |= {name: format_bytes(amount) for name, amount in first["amounts"].items()}
        print_table(self._console, ("compared", "rank 0 has"), [(name, str(value)) for name, value in told.items()])
        for finding in found.findings:
            say(self._console, f"{'problem' if finding.breaks else 'note'}: {finding.text}")
        bad, good = "a run would break; mend the problems above first", "nothing differs that would break a run"
        say(self._console, f"{len(found.facts)} ranks compared: {good if found.ok else bad}")

    def measured(self, cluster: Cluster, notes: list[str], target: Path, model: ModelOptions) -> None:
        """Print devices, links, collectives and codecs, the slow links, and the file."""
        from weft.measure.preflight import say_ranks
        from weft.profiles.slow import slow_links

        for name in dict.fromkeys(device.name for device in cluster.devices):
            ranks = [device.rank for device in cluster.devices if device.name == name]
            say(self._console, f"{say_ranks(ranks)}: {name} (products of matrices in FLOP/s)")
        devices = [
            (
                str(one.rank),
                str(one.host),
                format_bytes(one.memory_bytes),
                f"{format_bytes(one.copy_bytes_per_s)}/s",
                *map(_speed, (one.fp32_flops_per_s, one.bf16_flops_per_s, one.fp16_flops_per_s)),
            )
            for one in cluster.devices
        ]
        print_table(self._console, ("rank", "host", "memory", "copy", "fp32", "bf16", "fp16"), devices)
        rows = [(_place(link), "2", link.kind, *_figures(link)) for link in cluster.links]
        rows += [(one.collective, str(one.num_ranks), one.link, *_figures(one)) for one in cluster.timings]
        print_table(self._console, ("exchange", "ranks", "link", "latency", "rate", "miss"), rows)
        print_codecs(self._console, cluster, model)
        for slow in slow_links(cluster.links):
            say(self._console, str(slow))
        for note in notes:
            say(self._console, f"note: {note}")
        say(self._console, f"wrote {target}")

    def advised(self, cluster: Cluster, model: ModelOptions, advice: AdviceOptions, measured_s: float | None) -> None:
        print_advice(self._console, cluster, model, advice, measured_s=measured_s)


def _figures(fitted: Link | Timing) -> tuple[str, str, str]:
    return format_seconds(fitted.alpha_s), f"{format_bytes(fitted.bytes_per_s)}/s", f"{fitted.miss:.0%}"


def _speed(flops_per_s: float) -> str:
    return format_count(flops_per_s) if flops_per_s else "-"


def _place(link: Link) -> str:
    first, second = link.hosts
    return f"message, host {first}" if first == second else f"message, hosts {first}, {second}"
