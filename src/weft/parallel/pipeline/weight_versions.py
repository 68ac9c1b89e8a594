"""Weight versions of a pipeline stage: microbatches in flight keep the weights they started with across updates.

    slot 0   | weights of version 4 |    held by microbatch 6
    slot 1   | weights of version 5 |    held by microbatch 7
    slot 2   | weights of version 6 |    the newest: the model's own parameters ("heads") lie here

A slot is memory for all trainable weights (one flat buffer per dtype), with one leaf tensor per parameter on it. A pass
runs on the leaves of its version, which `using` puts into the modules in place of the heads; so the heads, which the
optimizer, `state_dict` and checkpoints see, are never part of a graph and move to another slot at every update.
Swapping `.data` under a live graph instead gives silently wrong gradients for convolutions and norms.

Assigning leaves to modules does what `torch.func.functional_call` does, fifty times cheaper, and also during a backward
pass: a recomputed block must find the weights of its version. Meanwhile no other thread may read the parameters.

Reusing a slot that a graph still needs makes that graph's backward pass fail ("modified by an inplace operation"): all
tensors of a slot share its version counters, which every update increments. Frozen parameters and buffers have one
version. A parameter under two names has one leaf.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from weft.errors import CheckpointError

_ALIGNMENT_BYTES = 64
"""Alignment of torch's allocator: kernels are as fast, and round alike, wherever a parameter lies in its buffer."""


@dataclass(slots=True)
class _Slot:
    """Memory for one version."""

    flats: tuple[Tensor, ...]
    leaves: tuple[nn.Parameter, ...]
    """One per head, in their order."""
    memories: tuple[Tensor, ...]
    """The leaves' memory without autograd, for the heads' `.data`."""
    version: int | None = None


class WeightVersions:
    """The weights of a stage in several versions, numbered by updates from the start of training.

    The schedule decides which version a pass uses. The slots that takes, and the most versions by which a pass that
    has yet to begin may lag behind the newest, on stage i of p:

                        num_slots   lag
        pipedream       p - i       0
        vertical sync   p           i
        2bw             2           1
    """

    def __init__(
        self, model: nn.Module, parameters: Mapping[str, nn.Parameter], *, num_slots: int, lag: int = 0
    ) -> None:
        """Move `parameters` of `model` into slots; their present values are version 0."""
        assert num_slots > lag >= 0, f"a lag of {lag} needs {lag + 1} slots, not {num_slots}"
        self._parameters = dict(parameters)
        names: dict[nn.Parameter, str] = {}
        for name, parameter in parameters.items():
            if parameter.requires_grad:
                names.setdefault(parameter, name)
        self._names, self.heads = tuple(names.values()), tuple(names)
        self.lag = lag
        self.newest = 0
        self.most_live = 1
        """Largest number of versions live at once so far."""
        self._oldest = 0
        self._held: Counter[int] = Counter()
        self._in_use: int | None = None
        index_of = {head: index for index, head in enumerate(self.heads)}
        self._index = {name: index_of.get(p) for name, p in self._parameters.items()}
        self._places = [
            (module._parameters, name, index_of[held])
            for module in model.modules()
            for name, held in module._parameters.items()
            if held is not None and held in index_of
        ]
        self._slots = [_make_slot(self.heads)]
        with torch.no_grad():
            for head, memory in zip(self.heads, self._slots[0].memories, strict=True):
                memory.copy_(head)
        self._move_heads(self._slots[0])
        # Only now, when the parameters' former memory is free.
        self._slots += [_make_slot(self.heads) for _ in range(num_slots - 1)]
        self._slots[0].version = 0

    @property
    def num_bytes(self) -> int:
        """Size of all slots."""
        return sum(flat.nbytes for slot in self._slots for flat in slot.flats)

    @property
    def live(self) -> tuple[int, ...]:
        """The versions that a pass in flight or a later one may use, oldest first."""
        kept = [slot.version for slot in self._slots if slot.version is not None and self._is_needed(slot.version)]
        return tuple(sorted(kept))

    def leaves(self, version: int) -> dict[str, Tensor]:
        """The tensors of a version by name, the same ones at every call; a frozen parameter is its own leaf."""
        leaves = self._slot(version).leaves
        return {name: self._parameters[name] if index is None else leaves[index] for name, index in self._index.items()}

    def leaves_of_heads(self, version: int) -> tuple[nn.Parameter, ...]:
        """The tensors of a version, one per trained parameter, in the order of `heads`."""
        return self._slot(version).leaves

    @contextmanager
    def using(self, version: int) -> Iterator[None]:
        """Context in which the model computes with a version, whose leaves accumulate the gradients."""
        assert self._in_use is None, f"version {version} is to be used while {self._in_use} is"
        leaves = self._slot(version).leaves
        self._in_use = version
        for holder, name, index in self._places:
            holder[name] = leaves[index]
        try:
            yield
        finally:
            for holder, name, index in self._places:
                holder[name] = self.heads[index]
            self._in_use = None

    def hold(self, version: int) -> None:
        """Keep a version for one more microbatch, until `release`."""
        self._slot(version)
        self._held[version] += 1

    def release(self, version: int) -> None:
        assert self._held[version], f"version {version} is released once too often; held: {self._holders()}"
        self._held[version] -= 1
        if not self._held[version]:
            del self._held[version]

    def take_gradients(self, version: int) -> None:
        """Move a version's gradients to the heads, for the optimizer, without a copy; before the next update.

        The last pass that used the version may have released it already.
        """
        slot = next((slot for slot in self._slots if slot.version == version), None)
        assert slot is not None, f"version {version} is gone, and its gradients with it; live are {self.live}"
        for name, head, leaf in zip(self._names, self.heads, slot.leaves, strict=True):
            assert head.grad is None, (
                f"{name} has a gradient already: clear it after each update, and run passes only inside using()"
            )
            head.grad, leaf.grad = leaf.grad, None

    @contextmanager
    def advance(self) -> Iterator[None]:
        """Context of `optimizer.step()`, which makes the next version, in another slot if the newest is still needed.

        If the step fails, the weights are as before, unless they were updated in place.
        """
        assert self._in_use is None, f"an update while version {self._in_use} is in use"
        before = self._slot(self.newest)
        is_in_place = self.newest not in self._held and self.lag == 0
        after = before if is_in_place else self._free_slot()
        assert all(leaf.grad is None for leaf in after.leaves), f"gradients of version {after.version} were not taken"
        if is_in_place:
            torch.autograd.graph.increment_version(after.flats)
        else:
            after.version = None
            for to, source in zip(after.flats, before.flats, strict=True):
                to.copy_(source)
            self._move_heads(after)
        try:
            yield
        except BaseException:
            self._move_heads(before)
            raise
        self.newest += 1
        after.version = self.newest
        self._oldest = max(self._oldest, self.newest - self.lag)
        self.most_live = max(self.most_live, len(self.live))

    def forget_older(self) -> None:
        """Drop older versions, whatever the lag; the pipeline is empty and restarts from the newest."""
        self._must_be_empty("forgetting older versions")
        self._oldest = self.newest

    def restart(self, newest: int) -> None:
        """Number the present weights `newest`, and give the versions before it the same weights: W(-1) := W(0)."""
        self._must_be_empty("a restart")
        present = self._slot(self.newest)
        self._number(newest, oldest=max(0, newest - self.lag))
        for version in range(self._oldest, newest):
            self._fill(version, present.leaves)

    def older(self) -> dict[int, dict[str, Tensor]]:
        """The live versions before the newest, which is the model's own state: tensors by number and name.

        The tensors are the slots' own memory: write or copy them before the next update.
        """
        self._must_be_empty("saving weight versions")
        return {
            version: dict(zip(self._names, self._slot(version).memories, strict=True))
            for version in self.live
            if version != self.newest
        }

    def load(self, newest: int, older: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Restore `newest` and `older()`, after the model's own weights, which are the newest version, were loaded."""
        self._must_be_empty("loading weight versions")
        problems = []
        if len(older) >= len(self._slots):
            problems.append(
                f"there are {len(older) + 1} weight versions, and this stage holds {len(self._slots)}; "
                "load them with the plan that saved them"
            )
        for version, named in older.items():
            problems += _differences(version, dict(zip(self._names, self.heads, strict=True)), named)
        if problems:
            raise CheckpointError(problems)
        self._number(newest, oldest=min(older, default=newest))
        for version, named in older.items():
            self._fill(version, [named[name] for name in self._names])

    def _is_needed(self, version: int) -> bool:
        return version >= self._oldest or version in self._held

    def _slot(self, version: int) -> _Slot:
        for slot in self._slots:
            if slot.version == version and self._is_needed(version):
                return slot
        raise AssertionError(f"there is no version {version}: live are {self.live}, held: {self._holders()}")

    def _free_slot(self) -> _Slot:
        """A slot whose version no pass needs after the next update."""
        oldest = max(self._oldest, self.newest + 1 - self.lag)
        for slot in self._slots:
            version = slot.version
            if version is None or (version < oldest and version not in self._held):
                return slot
        raise AssertionError(
            f"no slot of {len(self._slots)} is free for version {self.newest + 1}: live are {self.live}, "
            f"those from {oldest} on may yet be used, held: {self._holders()}"
        )

    def _move_heads(self, slot: _Slot) -> None:
        for head, memory in zip(self.heads, slot.memories, strict=True):
            head.data = memory

    def _number(self, newest: int, *, oldest: int) -> None:
        """Number the present weights `newest`, and mark all other slots as free."""
        present = self._slot(self.newest)
        for slot in self._slots:
            slot.version = None
        present.version = self.newest = newest
        self._oldest = oldest

    @torch.no_grad()
    def _fill(self, version: int, weights: Sequence[Tensor]) -> None:
        slot = next(slot for slot in self._slots if slot.version is None)
        for memory, weight in zip(slot.memories, weights, strict=True):
            memory.copy_(weight)
        slot.version = version

    def _must_be_empty(self, what: str) -> None:
        assert not self._held, f"{what} needs an empty pipeline; held: {self._holders()}"

    def _holders(self) -> str:
        counts = (f"version {version} by {count} microbatches" for version, count in sorted(self._held.items()))
        return ", ".join(counts) or "none"


def _make_slot(heads: tuple[nn.Parameter, ...]) -> _Slot:
    """An uninitialised slot with the heads' shapes, strides, dtypes and devices."""
    sizes: Counter[tuple[torch.dtype, torch.device]] = Counter()
    offsets = []
    for head in heads:
        kind = (head.dtype, head.device)
        offsets.append(sizes[kind])
        step = _ALIGNMENT_BYTES // head.itemsize
        sizes[kind] += -(-head.numel() // step) * step
    flats = {kind: torch.empty(size, dtype=kind[0], device=kind[1]) for kind, size in sizes.items()}
    views = [
        flats[head.dtype, head.device].as_strided(head.shape, torch.empty_like(head, device="meta").stride(), offset)
        for head, offset in zip(heads, offsets, strict=True)
    ]
    leaves = tuple(nn.Parameter(view) for view in views)
    for head, leaf in zip(heads, leaves, strict=True):
        for hook in (head._backward_hooks or {}).values():  # hooks on a parameter's gradient apply to all versions
            leaf.register_hook(hook)
    return _Slot(flats=tuple(flats.values()), leaves=leaves, memories=tuple(view.detach() for view in views))


def _differences(version: int, mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> list[str]:
    """Differences in names and shapes between this stage's weights and saved ones."""
    problems = [
        f"version {version} {'lacks' if name in mine else 'has an unknown'} {name}; load it with the plan that saved it"
        for name in sorted(mine.keys() ^ theirs.keys())
    ]
    return problems + [
        f"version {version} of {name} has shape {tuple(theirs[name].shape)} and the model's is {tuple(tensor.shape)}; "
        "load it with the plan that saved it"
        for name, tensor in mine.items()
        if name in theirs and theirs[name].shape != tensor.shape
    ]
