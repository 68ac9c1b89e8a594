"""What `weft profile --advise` is asked: its options as they are written, and the links that they assume."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from weft.cli.compression import ModelOptions
from weft.errors import LaunchError
from weft.lab.quantities import parse_rate, parse_time
from weft.launch import is_launched
from weft.planning.network import Network, network_of, uniform_network

if TYPE_CHECKING:
    from weft.profiles.cluster import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviceOptions:
    """What is to be advised on, beside the model and the replicas."""

    step_s: float | None = None
    """Seconds that a step computes; None: measured, or estimated."""
    bytes_per_s: float | None = None
    """Rate of the links to assume; None: as measured."""
    latency_s: float | None = None
    """Their latency, one way; None: as measured."""


def read_advice_options(advise: bool, options: Mapping[str, str | None]) -> AdviceOptions | None:
    """The options by name, as they were written; None where no advice is asked for. All that are wrong are told at
    once."""
    given = [name for name, value in options.items() if value is not None]
    if not advise:
        if given:
            raise LaunchError(f"{', '.join(given)}: without --advise this has no effect; add --advise")
        return None
    problems: list[str] = []

    def read(name: str, parse: Callable[[object], float]) -> float | None:
        text = options.get(name)
        try:
            return None if text is None else parse(text)
        except ValueError as error:
            problems.append(f"{name} {text} {error}")
            return None

    step_s, latency_s = read("--step-time", parse_time), read("--latency", parse_time)
    bits_per_s = read("--bandwidth", parse_rate)
    if step_s == 0:
        text = options["--step-time"]
        problems.append(f'--step-time {text} leaves nothing to compute; give a time above 0, like "250ms"')
    if problems:
        raise LaunchError(problems)
    return AdviceOptions(step_s=step_s, bytes_per_s=None if bits_per_s is None else bits_per_s / 8, latency_s=latency_s)


def refuse_beside_cluster(**options: object) -> None:
    """Refuse what has no effect beside --cluster."""
    if given := [f"--{name}" for name, value in options.items() if value]:
        raise LaunchError(f"--cluster reads a file and measures no links; leave out {' and '.join(given)}")
    if is_launched():
        raise LaunchError("--cluster needs one process, and a launcher started this one; run it without torchrun")


def network_for(cluster: Cluster, model: ModelOptions, advice: AdviceOptions) -> Network:
    """What is between the replicas that are asked for."""
    require_links(cluster.num_ranks, model, advice)
    if cluster.num_ranks > 1:
        measured = network_of(cluster, model.num_replicas)
        return measured.with_links(bytes_per_s=advice.bytes_per_s, latency_s=advice.latency_s)
    assert model.num_replicas and advice.bytes_per_s is not None and advice.latency_s is not None
    return uniform_network(num_replicas=model.num_replicas, bytes_per_s=advice.bytes_per_s, latency_s=advice.latency_s)


def require_links(num_ranks: int, model: ModelOptions, advice: AdviceOptions) -> None:
    """Refuse advice on replicas between which nothing is known."""
    if num_ranks < 2 and None in (model.num_replicas, advice.bytes_per_s, advice.latency_s):
        raise LaunchError(
            f"--advise compares exchanges, and there is {num_ranks} rank, so no link to measure; profile 2 ranks or "
            "more, or assume links with --replicas, --bandwidth and --latency"
        )


def samples_per_rank(job: Path, network: Network) -> int:
    """A rank's share of the job's batch."""
    from weft.training.run.job import read_job

    return max(1, read_job(job).steps.global_batch // (network.num_replicas * network.ranks_per_link))
