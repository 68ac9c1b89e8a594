"""Time devices, links and collectives on the ranks that are running, and describe them as a `Cluster`.

    1 every rank measures its device and the codecs on it, all at once
    2 one pair of ranks at a time: the first ranks of each two hosts, then two ranks of each host
    3 one shape of group (`shapes.py`) and transport at a time, each collective at growing sizes: inside hosts first

Time is bounded: each part has a share of the time that is left, a slow link is measured at fewer sizes, and parts
without time are left out and named. Collectives between hosts come last because they take longest, and can be computed
from links.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
import torch.distributed as dist

from weft.comm.group import Group
from weft.comm.objects import gather_values
from weft.measure.codecs import MEASURED, measure_codec
from weft.measure.device import describe, measure_speeds
from weft.measure.exchanges import TIMED, UNCHAINED, buffer_bytes, make_collective, make_ping_pong
from weft.measure.fit import fit_line
from weft.measure.shapes import Shape, group_shapes, host_pairs
from weft.measure.timing import Agreement, agree_as_pair, agree_in_group, time_sizes
from weft.mesh import make_mesh
from weft.plan.plan import Axes, Comm, Plan
from weft.profiles.cluster import Cluster, Compression, Device, Link, Timing
from weft.world import World

POOR_MISS = 1.0
"""Largest relative miss of a good fit: a size took twice, or half, as long as its line says."""

_COMPARED_BYTES = 1 << 20
_COMPARED_NUMEL = 1 << 20
_CPU = torch.device("cpu")
_USUAL_PARTS = 12

Groups = dict[tuple[Shape, str], tuple[Group, Group]]
"""By shape and transport: the group to time, and a control group of the same ranks."""

Progress = Callable[[int, int, str], None]
"""Called on every rank with parts done, parts in all, and the name of the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """Sizes to measure, and limits of time."""

    sizes: tuple[int, ...]
    total_s: float
    """Time after which no link or collective is begun, if there are `_USUAL_PARTS` of them; more parts have more."""
    part_s: float
    """Time limit of one link or collective that is not slow."""
    device_s: float
    codec_s: float = 0.0
    """Time limit of one codec; 0 measures none."""

    def limit_s(self, kinds: Sequence[str]) -> float:
        """Time limit of parts over these kinds of links; one between hosts counts as three."""
        num_parts = sum(3 if kind == "network" else 1 for kind in kinds)
        return self.total_s * min(max(1.0, num_parts / _USUAL_PARTS), 10)


QUICK = Effort(sizes=(4 << 10, 64 << 10, 1 << 20, 8 << 20), total_s=6.0, part_s=0.3, device_s=0.8, codec_s=0.2)
FULL = Effort(
    sizes=(4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20),
    total_s=60.0,
    part_s=2.5,
    device_s=4.0,
    codec_s=0.8,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One link or one collective to time."""

    label: str
    kind: str
    """Kind of the link it uses."""
    make: Callable[[int], Callable[[], None]]
    sizes: tuple[int, ...]
    agreement: Agreement | None
    """None on a rank that takes no part."""
    chained: bool
    num_messages: int
    """Consecutive exchanges in one call."""
    record: Callable[..., Link | Timing]
    """Makes the record, given alpha_s, bytes_per_s and miss."""

    def measure(self, budget_s: float) -> list[float] | None:
        """alpha_s, bytes_per_s and miss, as measured on this rank."""
        if self.agreement is None:
            return None
        points = time_sizes(self.make, self.sizes, self.agreement, budget_s=budget_s, chained=self.chained)
        line = fit_line([(size, seconds / self.num_messages) for size, seconds in points])
        return [line.alpha_s, line.bytes_per_s, line.miss]


def measure_cluster(
    world: World, *, effort: Effort, progress: Progress, name: str = "cluster"
) -> tuple[Cluster, list[str]]:
    """The cluster these ranks run on, and notes on what was measured badly or not at all. Collective; alike on all."""
    with ExitStack() as stack:
        plan = Plan(axes=Axes(data=world.size), comm=Comm(transport="c10d"))
        everyone, control = _groups(plan, "world", world, stack)
        progress(0, 1, "devices")
        devices = _devices(world, control, effort)
        compressions = _compressions(world, control, effort, progress)
        groups = {
            (shape, transport): _groups(shape.plan(transport), shape.axis, world, stack)
            for shape in group_shapes(world.hosts)
            for transport in transports_of(shape, world)
        }
        parts = [*_links(world, everyone, control, groups, effort), *_timings(world, groups, effort)]
        measured, notes = _measure(parts, control, effort, progress)
    links = tuple(each for each in measured if isinstance(each, Link))
    timings = tuple(each for each in measured if isinstance(each, Timing))
    found = Cluster(name=name, measured=True, devices=devices, links=links, timings=timings, compressions=compressions)
    return found, notes


def _measure(
    parts: Sequence[_Part], control: Group, effort: Effort, progress: Progress
) -> tuple[list[Link | Timing], list[str]]:
    """One part after the other, as long as there is time; and notes."""
    measured: list[Link | Timing] = []
    skipped, poor = [], []
    limit_s = effort.limit_s([part.kind for part in parts])
    left_s, began = limit_s, time.monotonic()
    for place, part in enumerate(parts):
        if left_s <= 0:
            skipped.append(part.label)
            continue
        progress(place, len(parts), part.label)
        found = part.measure(min(effort.part_s, left_s / (len(parts) - place)))
        # All ranks meet here, also those that take no part: one part at a time, and one clock for all.
        told = gather_values([time.monotonic() - began, found], control)
        left_s = limit_s - max(spent_s for spent_s, _ in told)
        alpha_s, bytes_per_s, miss = max(
            (figures for _, figures in told if figures is not None),
            key=lambda figures: figures[0] + _COMPARED_BYTES / figures[1],
        )
        measured.append(part.record(alpha_s=alpha_s, bytes_per_s=bytes_per_s, miss=miss))
        if miss > POOR_MISS:
            poor.append(f"{part.label} ({miss:.0%})")
    progress(len(parts), len(parts), "done")
    notes = []
    if poor:
        notes.append(f"no line fits these times well; was a host busy? Worst misses: {'; '.join(poor)}")
    if skipped:
        notes.append(f"the {limit_s:g} s of a profile were used up before these were measured: {'; '.join(skipped)}")
    return measured, notes


def transports_of(shape: Shape, world: World) -> tuple[str, ...]:
    """Transports of groups of a shape: CPU ranks on the same host can share its memory, also in two levels."""
    is_together = not shape.between_hosts or shape.num_ranks > len(set(world.hosts))
    is_shared = world.device.type == "cpu" and is_together
    return ("c10d", "shared") if is_shared else ("c10d",)


def link_kind(world: World, transport: str, *, between_hosts: bool) -> str:
    """The kind of link that a transport uses."""
    if between_hosts:
        return "network"
    if transport == "shared":
        return "shared-memory"
    return "device" if world.device.type == "cuda" and dist.get_backend() != "gloo" else "loopback"


def _devices(world: World, control: Group, effort: Effort) -> tuple[Device, ...]:
    facts = describe(world.device, num_sharing=world.ranks_on_device)
    facts |= measure_speeds(world.device, budget_s=effort.device_s, meet=lambda: agree_in_group(control)([0.0]))
    rows = gather_values(facts, control)
    return tuple(Device(rank=rank, host=world.hosts[rank], **row) for rank, row in enumerate(rows))


def _compressions(world: World, control: Group, effort: Effort, progress: Progress) -> tuple[Compression, ...]:
    """Every codec on the device where it is slowest."""
    found = []
    for place, section in enumerate(MEASURED if effort.codec_s else ()):
        progress(place, len(MEASURED), f"the codec {section.name}")
        rows = gather_values(measure_codec(section, world.device, budget_s=effort.codec_s), control)
        settings = {name: getattr(section, name) for name in ("name", "density", "bits", "rank", "levels")}
        made = [Compression(**settings, **row) for row in rows]
        found.append(max(made, key=lambda one: one.time_s(_COMPARED_NUMEL, num_replicas=world.size)))
    return tuple(found)


def _groups(plan: Plan, axes: str, world: World, stack: ExitStack) -> tuple[Group, Group]:
    keys = [(axes, purpose) for purpose in ("profile", "control")]
    mesh = stack.enter_context(make_mesh(plan, world, groups=keys))
    return mesh.group(*keys[0]), mesh.group(*keys[1])


def _links(world: World, everyone: Group, control: Group, groups: Groups, effort: Effort) -> Iterator[_Part]:
    """Pairs of ranks. Sockets connect any two; shared memory needs a group inside the host."""
    inside = {way: group for (shape, way), (group, _) in groups.items() if not shape.between_hosts}
    inside["c10d"] = everyone
    for first, second in host_pairs(world.hosts):
        hosts = (world.hosts[first], world.hosts[second])
        is_between = hosts[0] != hosts[1]
        for transport, group in {"c10d": everyone}.items() if is_between else inside.items():
            kind = link_kind(world, transport, between_hosts=is_between)
            other = {first: second, second: first}.get(world.rank)
            where = f"hosts {hosts[0]} and {hosts[1]}" if is_between else f"ranks of host {hosts[0]}"
            yield _Part(
                label=f"{kind} between {where}",
                kind=kind,
                make=make_ping_pong(first, second, group, world.device),
                sizes=effort.sizes,
                agreement=None if other is None else agree_as_pair(control, other),
                chained=True,
                num_messages=2,
                record=functools.partial(Link, kind=kind, transport=transport, hosts=hosts),
            )


def _timings(world: World, groups: Groups, effort: Effort) -> Iterator[_Part]:
    for (shape, transport), (group, control) in groups.items():
        kind = link_kind(world, transport, between_hosts=shape.between_hosts)
        for collective in TIMED:
            yield _Part(
                label=f"{collective} of {shape.num_ranks} ranks, {kind}",
                kind=kind,
                make=make_collective(collective, group, world.device),
                sizes=tuple(buffer_bytes(size, shape.num_ranks) for size in effort.sizes),
                agreement=agree_in_group(control),
                chained=collective not in UNCHAINED,
                num_messages=1,
                record=functools.partial(
                    Timing, collective=collective, link=kind, transport=transport, num_ranks=shape.num_ranks
                ),
            )
