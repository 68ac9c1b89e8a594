"""What `weft profile --advise` prints: methods ranked for these links and this model, why the first, and its plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from weft.cli.advice_options import AdviceOptions, network_for, samples_per_rank
from weft.cli.compression import ModelOptions, model_of
from weft.cli.terminal import print_table, say
from weft.plan.plan import Precision
from weft.plan.text import format_plan
from weft.planning.extra_steps import UNKNOWN_MARGIN, Confidence, OptimizerKind
from weft.planning.network import Network
from weft.planning.slow_networks import Prediction, Workload, predict
from weft.units import format_bandwidth, format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from weft.profiles.cluster import Cluster

_USUAL_TOKENS = 4096
"""Tokens of a step on one replica, to estimate its time."""
_FLOPS_PER_PARAMETER = 6
"""Operations per parameter and token of a forward and a backward pass."""
_NEARLY = 1.05
"""A synchronous step that is no longer than this, in times of computing, has no bottleneck in the network."""
_ALIKE = 1.2
"""Bandwidth and latency whose ratio is not above this are both the bottleneck."""
_NUM_FINDINGS = 6
"""Methods whose measurements are told."""
_INSIDE_ONE_HOST = (
    "these links are inside one host; for a network start this command with torchrun on every host, or assume links "
    "with --bandwidth and --latency"
)
_MARKS: dict[Confidence, str] = {"measured": "", "between": "~", "unknown": "?"}
_LEGEND: dict[Confidence, str] = {
    "between": "~: between measured settings, or near them",
    "unknown": f"?: not measured; counts {UNKNOWN_MARGIN:g} times in the ranking",
}


def print_advice(
    console: Console,
    cluster: Cluster,
    model: ModelOptions,
    advice: AdviceOptions,
    *,
    measured_s: float | None = None,
    measured_on: str = "per rank",
) -> None:
    """Print the ranking, why its first, and the plan; `measured_s`: a step of the job that was measured."""
    network = network_for(cluster, model, advice)
    known = model_of(model)
    compute_s, origin = compute_time(
        cluster=cluster,
        network=network,
        num_parameters=sum(map(math.prod, known.shapes)),
        job=model.job,
        given_s=advice.step_s,
        measured_s=measured_s,
        measured_on=measured_on,
    )
    optimizer, trained_by = _optimizer_of(model.job)
    workload = Workload(
        shapes=known.shapes,
        num_blocks=known.num_blocks,
        compute_s=compute_s,
        optimizer=optimizer,
        compressions=cluster.compressions,
    )
    ranked = predict(workload, network)
    first, useful = ranked[0], [one for one in ranked if math.isfinite(one.ranked_s)]
    say(
        console,
        f"{known.model_text}, trained by {trained_by} on {network.num_replicas} replicas, links of "
        f"{_rate(network.bytes_per_s)} and {format_seconds(network.latency_s)}:",
    )
    say(console, f"a step takes {format_seconds(compute_s)} of computing ({origin})")
    if advice.bytes_per_s is None and advice.latency_s is None and cluster.num_hosts == 1:
        say(console, _INSIDE_ONE_HOST)
    _print_ranking(console, useful)
    findings = [(one.name, one.extra.finding, one.extra.source) for one in useful[:_NUM_FINDINGS]]
    print_table(console, ("method", "accuracy", "source"), findings)
    if left_out := "; ".join(f"{one.name} ({one.extra.finding})" for one in ranked if one not in useful):
        say(console, f"left out: {left_out}")
    say(console, " ".join(why(ranked)))
    sections = "[data] and [codec]" if first.plan.precision == Precision() else "[data], [codec] and [precision] reduce"
    head = f"the plan of {first.name}, which sets only {sections} beside the number of replicas"
    say(console, f"\n{head}, to be merged into a plan with other axes:\n\n{format_plan(first.plan).rstrip()}")


def _print_ranking(console: Console, useful: Sequence[Prediction]) -> None:
    heads = ("method", "step × steps", "steps", "step", "bandwidth", "latency", "codec", "hidden", "sent", "memory")
    print_table(console, heads, [_row(one) for one in useful])
    found = {one.extra.confidence for one in useful}
    if legend := "; ".join(text for confidence, text in _LEGEND.items() if confidence in found):
        say(console, legend)


def _row(one: Prediction) -> tuple[str, ...]:
    return (
        one.name,
        format_seconds(one.same_loss_s),
        f"× {one.extra.factor:.2f}{_MARKS[one.extra.confidence]}",
        format_seconds(one.step_s),
        *map(format_seconds, (one.bandwidth_s, one.latency_s, one.codec_s, one.hidden_s)),
        format_bytes(one.sent_bytes),
        format_bytes(one.kept_bytes),
    )


def why(ranked: Sequence[Prediction]) -> list[str]:
    """Two to four sentences: what a step waits for, what is advised and what it costs."""
    first, dense = ranked[0], next(one for one in ranked if one.name == "all-reduce")
    sentences = [_bottleneck(dense)]
    if first is dense:
        return [*sentences, "Synchronous training is advised: no other method is enough faster for what it risks."]
    faster = f"{dense.step_s / first.step_s:.1f} times as fast as synchronous"
    sentences.append(f"Advised is {first.name}: {format_seconds(first.step_s)} per step, {faster}. {_reason(first)}")
    source = f" ({first.extra.source})" if first.extra.source else ""
    if first.extra.confidence != "unknown":
        finding = first.extra.finding
        if "the steps" not in finding:
            about = "about " if first.extra.confidence == "between" else ""
            finding = f"{about}{first.extra.factor:.3g} × the steps: {finding}"
        sentences.append(f"It needs {finding}{source}.")
        return sentences
    known = next(one for one in ranked if one.extra.confidence != "unknown")
    sentences.append(
        f"Its accuracy with such an optimizer is open: {first.extra.finding}{source}; compare losses over some hundred "
        f"steps. The best that is known is {known.name}: {format_seconds(known.step_s)} per step, "
        f"{known.extra.factor:.3g} times the steps."
    )
    return sentences


def _bottleneck(dense: Prediction) -> str:
    """What a synchronous step waits for; its parts add up to it."""
    bandwidth_s, latency_s = dense.bandwidth_s, dense.latency_s
    if dense.step_s <= _NEARLY * dense.compute_s:
        told = "Computing is the bottleneck"
    elif max(bandwidth_s, latency_s) <= _ALIKE * min(bandwidth_s, latency_s):
        told = "Bandwidth and latency are the bottleneck"
    else:
        told = f"{'Bandwidth' if bandwidth_s > latency_s else 'Latency'} is the bottleneck"
    parts = (
        f"{format_seconds(dense.compute_s)} of computing, {format_seconds(bandwidth_s)} of bytes and "
        f"{format_seconds(latency_s)} of latency"
    )
    if dense.hidden_s:
        parts += f", of which {format_seconds(dense.hidden_s)} are hidden behind the backward pass"
    return f"{told}: a synchronous step takes {format_seconds(dense.step_s)} ({parts})."


def _reason(one: Prediction) -> str:
    data, sent = one.plan.data, format_bytes(one.sent_bytes)
    match one.method:
        case "all-reduce":
            return f"It sends {sent} per step."
        case "delayed" | "streaming":
            assert isinstance(data.delay, int)
            waits = f"a step still waits {format_seconds(one.waited_s)}" if one.waited_s else "nobody waits"
            steps = "1 step" if data.delay == 1 else f"{data.delay} steps"
            return f"What is sent is merged {steps} later, and {waits}; {sent} per step."
        case _:
            return f"Replicas exchange once in {data.every} steps, {sent} per step."


def compute_time(
    *,
    cluster: Cluster,
    network: Network,
    num_parameters: int,
    job: Path | None,
    given_s: float | None,
    measured_s: float | None,
    measured_on: str,
) -> tuple[float, str]:
    """Seconds that a step computes, and where the number is from: given, measured with the job, or estimated."""
    if given_s is not None:
        return given_s, "--step-time"
    if measured_s is not None and job is not None:
        number = samples_per_rank(job, network)
        return measured_s, f"measured: {number} sample{'s' * (number != 1)} of {job.name} {measured_on}"
    rate = min(device.fp32_flops_per_s for device in cluster.devices) * network.ranks_per_link
    return _FLOPS_PER_PARAMETER * num_parameters * _USUAL_TOKENS / rate, (
        f"estimated: {_FLOPS_PER_PARAMETER} × {format_count(num_parameters)} parameters × {_USUAL_TOKENS} tokens per "
        f"replica at {format_count(rate)}FLOP/s in fp32; --step-time or --job give it better"
    )


def _optimizer_of(job: Path | None) -> tuple[OptimizerKind, str]:
    if job is None:
        return "adaptive", "AdamW"
    from weft.training.run.job import read_job

    name = read_job(job).optimizer.name
    return ("sgd" if name == "sgd" else "adaptive"), name


def _rate(bytes_per_s: float) -> str:
    return "unlimited rate" if math.isinf(bytes_per_s) else format_bandwidth(bytes_per_s)
