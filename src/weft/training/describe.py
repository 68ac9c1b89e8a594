"""`trainer.describe()`: what was done to a model on this rank, as text.

Everything is read where it is kept: changes of modules on the modules (`parallel/wrapping/wrap.py`), process groups on
the mesh, placements in the layouts. Neighbours in a list of modules whose lines are equal are printed once.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import nn

from weft.comm.group import Group
from weft.mesh import Mesh
from weft.parallel.apply import steps
from weft.parallel.tracing.placeholder import PlaceholderModule
from weft.parallel.wrapping.replacements import Replacements
from weft.parallel.wrapping.wrap import changes_of
from weft.plan.exchange.compression import between_replicas
from weft.plan.exchange.weight_exchange import exchange_bytes, outer_bytes
from weft.plan.late_merges import exchanges_after, uses_delayed_averaging, uses_streaming
from weft.plan.partition.one_worker import is_served
from weft.plan.plan import Plan
from weft.server.worker_mesh import WorkerMesh
from weft.training.exchanged_bytes import sent_bytes_of_step, weight_buckets_of
from weft.training.step.parallel_model import ParallelModel
from weft.units import format_bytes

_ZERO_STAGES = {"optimizer": "ZeRO-1", "gradients": "ZeRO-2", "parameters": "ZeRO-3"}
_MOST_RANKS = 8


def describe(parts: ParallelModel, replacements: Replacements) -> str:
    """A text of this rank's wrapped modules, parameter placements, process groups and replaced functions."""
    mesh = parts.mesh
    axes = " × ".join(f"{axis} {size}" for axis, size in _used(mesh).items()) or "one rank"
    places = ", ".join(f"{axis} {mesh.index(axis)}" for axis in _used(mesh)) or "alone"
    done = [f"{step.what} ({step.condition})" for step in steps() if step.is_for(mesh.plan)]
    replaced = [f"{one.what}: {one.why}" for one in replacements.all()]
    sections = {
        f"plan: {axes} ({mesh.world.size} ranks)": [
            f"rank {mesh.world.rank} on {mesh.world.device}: {places}",
            *_average_lines(parts),
            *_server_lines(mesh),
            *_replica_lines(parts),
            *_codec_lines(parts),
        ],
        "done to the model, in order": [f"{number}. {what}" for number, what in enumerate(done, 1)],
        f"model: {type(parts.model).__name__}": _Tree(parts).lines(),
        "process groups of this rank": _group_lines(mesh),
        "replaced while a step runs": replaced or ["nothing"],
    }
    return "\n\n".join("\n".join([title, *(f"  {line}" for line in lines)]) for title, lines in sections.items())


def _average_lines(parts: ParallelModel) -> list[str]:
    average = parts.mesh.plan.average
    if not average.decay:
        return []
    pieces = [piece.tensor for piece in parts.sync.pieces]
    num_bytes = format_bytes(sum(piece.numel() * max(piece.element_size(), 4) for piece in pieces))
    begins = f" from step {average.start} on" if average.start else ""
    return [f"average of the weights: decay {average.decay:g}{begins}, {num_bytes} for {len(pieces)} parameters"]


def _replica_lines(parts: ParallelModel) -> list[str]:
    plan = parts.mesh.plan
    if plan.replica_axis is None:
        return []
    data = plan.data
    buckets = weight_buckets_of(parts.sync, parts.mesh)
    steps = range(data.switch_step, data.switch_step + data.every)
    all_sent = [exchange_bytes(buckets, plan, step=step) for step in steps if exchanges_after(data, step + 1)]
    sent, kept = format_bytes(max(all_sent)), format_bytes(outer_bytes(buckets, plan))
    which = "the largest exchange" if data.fragments > 1 else "an exchange"
    return [
        f"replica {parts.mesh.replica} of {plan.num_replicas} along {plan.replica_axis}: "
        f"{_rule_between_replicas(plan)}; {which} sends {sent} of weights, and {kept} are kept for it"
    ]


def _server_lines(mesh: Mesh) -> list[str]:
    plan = mesh.whole_plan
    if not is_served(plan):
        return []
    which = f"worker {mesh.run.worker}" if isinstance(mesh, WorkerMesh) else "a worker"
    server, servers = plan.server, "a server" if plan.server.shards == 1 else f"{plan.server.shards} servers"
    rule = "every worker's gradient is an update"
    if server.updates_together:
        workers = f"the first {plan.axes.data_ranks - server.backups}" if server.backups else "all workers"
        rule = f"an update per step of the gradients of {workers}"
    elif server.mode == "bounded":
        rule += f", at most {server.staleness} clocks ahead of the slowest worker"
    scaled = ", with a rate divided by its age" if server.lr_scaling == "staleness" else ""
    moved = f", compensated by {server.compensation:g}" if server.compensation else ""
    sent = "as they are" if plan.codec.name == "none" else f"through codec {plan.codec.name}"
    taken = "" if server.pull == "master" else f", weights come back in {server.pull}"
    return [
        f"{which} of {plan.axes.data} with {servers}: {rule}{scaled}{moved}; gradients are sent {sent}{taken}; the "
        "optimizer's state is there"
    ]


def _rule_between_replicas(plan: Plan) -> str:
    """What replicas that differ exchange, and when."""
    data = plan.data
    often = "every step" if data.every == 1 else f"every {data.every} steps"
    if uses_delayed_averaging(plan):
        later = "a measured number of steps" if data.delay == "auto" else f"{data.delay} steps"
        return f"sends its change after {often} and merges the mean {later} later"
    rule = "an average"
    if data.outer == "nesterov":
        rule = f"a Nesterov step (rate {data.outer_lr:g}, momentum {data.outer_momentum:g})"
    until = f", an average after every step until step {data.switch_step}" if data.switch_step else ""
    if not uses_streaming(plan):
        return f"{rule} after {often}{until}"
    turns = f" of one of {data.fragments} fragments in turn, each" if data.fragments > 1 else ""
    return f"{rule}{turns} {often}, merged {data.delay} steps later and keeping {data.mix:g} of the own weights{until}"


def _codec_lines(parts: ParallelModel) -> list[str]:
    plan, exchange = parts.mesh.plan, parts.sync.compressed
    if plan.codec.name == "none" or exchange is None:
        return []
    step = plan.codec.warmup_steps
    if plan.replica_axis is not None:  # one that is followed by an exchange
        step = next(one for one in range(step, step + plan.data.every) if exchanges_after(plan.data, one + 1))
    sent = between_replicas(sent_bytes_of_step(parts, step=step), plan)
    names, num_tensors = set(exchange.names), len(parts.sync.pieces)
    kinds = sorted({name.partition("/")[0] for name in exchange.tensors()})
    kept = sum(tensor.nbytes for tensor in exchange.tensors().values())
    state = f"; {format_bytes(kept)} of state are kept ({', '.join(kinds)})" if kinds else "; nothing is kept"
    later = f" after {plan.codec.warmup_steps} steps" if plan.codec.warmup_steps else ""
    return [
        f"codec {plan.codec.name}: {len(names)} of {num_tensors} tensors are compressed, others travel as they are; "
        f"an exchange sends {format_bytes(sent)} between replicas{later}{state}"
    ]


def _used(mesh: Mesh) -> dict[str, int]:
    """The axes of more than one rank, outermost first."""
    return {axis: mesh.size(axis) for axis in mesh.grid.axes.order if mesh.size(axis) > 1}


class _Tree:
    """Lines of a model's modules, their changes and their parameters."""

    def __init__(self, given: ParallelModel) -> None:
        self._given = given
        self._first_names = {id(parameter): name for name, parameter in given.model.named_parameters()}
        hooks = [set(_gradient_hooks(parameter)) for parameter in given.model.parameters() if parameter.requires_grad]
        self._common_hooks = set.intersection(*hooks) if hooks else set()

    def lines(self) -> list[str]:
        common = [f"- gradient hook of each parameter: {source}" for source in sorted(self._common_hooks)]
        return [*common, *self._inside(self._given.model, "")]

    def _inside(self, module: nn.Module, path: str) -> list[str]:
        lines = [f"- {change.kind}, by {change.by}: {change.why}" for change in changes_of(module)]
        prefix = f"{path}." if path else ""
        for name, parameter in module._parameters.items():
            if parameter is not None:
                lines.append(f"{name}: {self._placement(prefix + name, parameter)}")
        rendered: list[tuple[list[str], list[str]]] = []
        for name, child in module._modules.items():
            if child is None:
                continue
            inside = [f"  {line}" for line in self._inside(child, prefix + name)]
            found = [self._title(child, prefix + name), *inside]
            if rendered and rendered[-1][1] == found:
                rendered[-1][0].append(name)
            else:
                rendered.append(([name], found))
        for names, (title, *inside) in rendered:
            shown = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}, each the same"
            lines += [f"{shown}: {title}", *inside]
        return lines

    def _title(self, module: nn.Module, path: str) -> str:
        cut = self._given.cut
        stages = cut.stage_of_unit.get(path) if cut is not None else None
        where = f" (stage {', '.join(map(str, sorted(stages)))})" if stages else ""
        return ("placeholder" if isinstance(module, PlaceholderModule) else type(module).__name__) + where

    def _placement(self, name: str, parameter: nn.Parameter) -> str:
        first = self._first_names.get(id(parameter), name)
        if first != name:
            return f"tied to {first}"
        mesh, layout, notes = self._given.mesh, self._given.layouts[name], []
        where = (mesh.grid.axes.sizes, mesh.grid.coordinates(mesh.world.rank))
        shape, local = _joined(layout.global_shape), _joined(layout.local_shape(*where))
        for split in layout.splits:
            ranges = ", ".join(f"{start}:{stop}" for start, stop in layout.ranges(*where)[split.dim])
            notes.append(f"dim {split.dim} split over {split.axis}, here {ranges}")
        if layout.flat_range is not None and mesh.plan.data.shard != "nothing":
            stage, over = _ZERO_STAGES[mesh.plan.data.shard], mesh.grid.axes.state_axes
            (start, stop), total = layout.flat_range, math.prod(layout.local_shape(*where))
            notes.append(f"{stage} over {over}, here elements {start}:{stop} of {total}")
        if self._given.cut is not None and name in self._given.cut.holders:
            notes.append(f"on pipeline ranks {', '.join(map(str, self._given.cut.holders[name]))}")
        notes += [f"gradient hook of {one}" for one in _gradient_hooks(parameter) if one not in self._common_hooks]
        return f"{shape if local == shape else f'{shape} -> {local}'}, {'; '.join(notes) or 'whole'}"


def _gradient_hooks(parameter: torch.Tensor) -> list[str]:
    """The files of weft that are called with a parameter's gradient."""
    hooks = [*(parameter._backward_hooks or {}).values(), *(parameter._post_accumulate_grad_hooks or {}).values()]
    return [source for hook in hooks if (source := getattr(hook, "__module__", "")).startswith("weft.")]


def _group_lines(mesh: Mesh) -> list[str]:
    """One line for all purposes of the same ranks; groups of one rank exchange nothing."""
    purposes: dict[tuple[str, tuple[int, ...], str], list[str]] = {}
    for (axes, purpose), group in mesh._groups.items():
        if group.size > 1:
            purposes.setdefault((axes, group.ranks, _transport(group)), []).append(purpose)
    lines = [
        f"{axes}: ranks {_ranks(ranks)}, by {transport}, for {', '.join(sorted(these))}"
        for (axes, ranks, transport), these in sorted(purposes.items())
    ]
    communicators = [group.communicator_bytes for group in mesh.groups if group.backend == "nccl" and group.size > 1]
    if communicators:
        lines.append(f"{len(communicators)} NCCL communicators, {format_bytes(sum(communicators))} of device memory")
    return lines or ["none"]


def _transport(group: Group) -> str:
    if group.handle is None:
        return "nothing (a fake world)"
    if not isinstance(group.handle, dist.ProcessGroup):
        return "nothing (closed)"
    backend = f"{dist.get_backend(group.handle)}{' through host memory' if group.through_host else ''}"
    if group.levels is not None:
        return f"shared memory inside hosts and {backend} between them"
    return "shared memory" if group.shared is not None else backend


def _ranks(ranks: tuple[int, ...]) -> str:
    some = ", ".join(map(str, ranks[:_MOST_RANKS]))
    return some if len(ranks) <= _MOST_RANKS else f"{some} ... {ranks[-1]} ({len(ranks)} in all)"


def _joined(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "scalar"
