"""Test whether a user's loss may be computed on parts of a batch: is the mean of the parts that of the whole?

Data ranks and microbatches each take the loss of their own samples, ranks that share a sequence that of their own
tokens; the parts are added, weighted by their number of targets. That equals the loss of the whole only if the loss is
a mean over those targets, and no target's part depends on another's: not if it divides by a number of its own, compares
samples with each other, or shifts targets along the sequence. So the loss of a small drawn batch is compared with that
of two unequal parts of it (`trial_batch.py`).
"""

from __future__ import annotations

import functools
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from weft.parallel.tensor.cross_entropy import IGNORED_TARGET
from weft.training.data.trees import num_samples, output_tensors, tensors_of
from weft.training.loss.loss import Loss, are_samples_counted, count_targets, loss_terms
from weft.training.setup.trial_batch import (
    TOKENS,
    Hints,
    TrialBatch,
    drawn_batches,
    real_batch,
    varied,
    with_minus_one,
)

_ALLOWED = {torch.float64: 1e-5, torch.float32: 1e-4}
"""Allowed relative difference, by the format of the outputs, which losses may narrow; 0.01 for 16 bits, also where the
loss itself is in these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossFinding:
    """The outcome of a trial."""

    is_additive: bool
    along: int = 0
    """The dim of the cut: samples or tokens."""
    whole: float = math.nan
    parts: float = math.nan
    """The loss of a batch, and the weighted mean of its parts."""
    needs_all_targets: bool = False
    """It is additive only as long as no target is −100, which the first batch had none of."""
    counts_itself: bool = False
    """It returned (sum, count)."""
    error: str = ""
    """What the loss raised on a part, though not on the whole."""


class _DrawsRandomNumbers(Exception):
    """The loss cannot be compared: it draws random numbers."""


@torch.no_grad()
def probe_loss(loss: Loss, output: Any, targets: Any, alongs: tuple[int, ...]) -> LossFinding | None:
    """Whether the losses of parts, cut along each of these dims, add up to that of the whole; None if not seen."""
    devices = sorted({tensor.device.index or 0 for tensor in output_tensors(output) if tensor.device.type == "cuda"})
    conclusive = None
    with torch.random.fork_rng(devices), state_kept(loss.function), warnings.catch_warnings(), _uncompiled():
        warnings.simplefilter("ignore")  # of drawn values; the real call comes next
        try:
            for along in alongs:
                found = _probe_along(loss, output, targets, along)
                if found is not None and not found.is_additive:
                    return found
                conclusive = conclusive or found
        except _DrawsRandomNumbers:
            return None
    return conclusive


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Context in which a compiled loss runs as it is written: each trial would compile it for another shape."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and importing it takes seconds
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def _probe_along(loss: Loss, output: Any, targets: Any, along: int) -> LossFinding | None:
    generator = torch.Generator().manual_seed(0)
    for batch in drawn_batches(output, targets, along, generator):
        seen = _SeenCalls()
        with seen:
            found = _compare(loss, batch, is_strict=batch.is_resized)
        if found is None:
            continue
        if not found.is_additive:
            return found
        ignores, needs_all = False, False
        for other in varied(batch, seen.hints(), generator):
            again = _compare(loss, other)
            is_off = again is not None and not again.is_additive
            if is_off and not (other.is_new and other.put_in == IGNORED_TARGET):
                return again
            needs_all = needs_all or is_off
            ignores = ignores or (again is not None and other.put_in == IGNORED_TARGET)
        # A loss that takes −100 for what it is leaves out other negative numbers by the same test, if any.
        if not ignores and (last := with_minus_one(batch, generator)) is not None:
            again = _compare(loss, last)
            if again is not None and not again.is_additive:
                return again
        return replace(found, needs_all_targets=needs_all)
    real = None if along == TOKENS else real_batch(output, targets)
    return None if real is None else _compare(loss, real)


def _compare(loss: Loss, batch: TrialBatch, *, is_strict: bool = False) -> LossFinding | None:
    """Compare a batch with its two parts; None if the loss cannot take it. `is_strict`: it must take parts then."""
    try:
        whole = _terms(loss, batch, 0, batch.size)
    except _DrawsRandomNumbers:
        raise
    except Exception:  # the loss may still accept real outputs
        return None
    try:
        parts = [_terms(loss, batch, 0, batch.first_part), _terms(loss, batch, batch.first_part, batch.size)]
    except _DrawsRandomNumbers:
        raise
    except Exception as error:
        if not is_strict:
            return None
        return LossFinding(
            is_additive=False,
            along=batch.along,
            whole=whole.mean,
            counts_itself=whole.is_own,
            error=_described(error),
        )
    means = [sum(part.sum for part in parts) / max(sum(part.count for part in parts), 1e-30)]
    if batch.is_new and not whole.is_own:
        plain = [part.value * part.size / batch.size for part in parts]
        means.append(sum(plain))
    scale = max(abs(whole.mean), *(abs(part.mean) for part in parts), 1e-30)
    if not whole.count or not all(map(math.isfinite, (scale, *means))):
        return None
    off = [abs(mean - whole.mean) / scale for mean in means]
    floats = [tensor.dtype for tensor in output_tensors(batch.output) if tensor.is_floating_point()]
    formats = (*floats[:1], whole.dtype) if floats else (torch.float64, whole.dtype)
    allowed = max(_ALLOWED.get(one, 1e-2) for one in formats)
    return LossFinding(
        is_additive=min(off) <= allowed,
        along=batch.along,
        whole=whole.mean,
        parts=means[off.index(min(off))],
        counts_itself=whole.is_own,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Terms:
    value: float
    """What the loss returned."""
    sum: float
    count: float
    size: int
    """Number of samples or tokens."""
    is_own: bool
    """The loss counts for itself."""
    dtype: torch.dtype
    """The format of what it returned."""

    @property
    def mean(self) -> float:
        return self.sum / self.count if self.count else 0.0


def _terms(loss: Loss, batch: TrialBatch, start: int, stop: int) -> _Terms:
    output, targets = batch.part(start, stop)
    weight = stop - start if batch.along == TOKENS and are_samples_counted(targets) else 1
    count = int(count_targets(targets)) * weight
    before = _random_states(output)
    terms = loss_terms(loss, output, targets, count)
    if not all(map(torch.equal, before, _random_states(output))):
        raise _DrawsRandomNumbers
    return _Terms(
        value=float(terms.value),
        sum=float(terms.value) * float(terms.multiplier),
        count=float(terms.count),
        size=stop - start,
        is_own=terms.own_count,
        dtype=terms.value.dtype,
    )


def _random_states(output: Any) -> list[torch.Tensor]:
    devices = {tensor.device for tensor in output_tensors(output) if tensor.device.type == "cuda"}
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]


class _SeenCalls(TorchFunctionMode):
    """Notes how a loss calls those functions of torch that leave out or weigh classes."""

    def __init__(self) -> None:
        super().__init__()
        self._ignored: set[int] = set()
        self._num_classes: int | None = None

    def hints(self) -> Hints:
        return Hints(ignored=frozenset(self._ignored - {IGNORED_TARGET}), num_classes=self._num_classes)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func in (F.cross_entropy, F.nll_loss):
            weight = args[2] if len(args) > 2 else given.get("weight")
            self._ignored.add(args[4] if len(args) > 4 else given.get("ignore_index", IGNORED_TARGET))
            if weight is not None:
                self._num_classes = weight.numel()
        return func(*args, **given)


@contextmanager
def state_kept(function: Any) -> Iterator[None]:
    """Context after which objects and tensors that a loss holds are what they were: running means, for example."""
    kept: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
    tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
    lists: list[tuple[list[Any], list[Any]]] = []
    for held in _held_by(function):
        inside = held.modules() if isinstance(held, nn.Module) else [held]
        for one in inside:
            if isinstance(one, torch.Tensor):
                tensors.append((one, one.detach().clone()))
                continue
            if isinstance(one, list):
                lists.append((one, list(one)))
                continue
            dicts = [vars(one)] if hasattr(one, "__dict__") else []
            dicts += [one._buffers] if isinstance(one, nn.Module) else []
            kept += [(own, dict(own)) for own in dicts]
            lists += [(value, list(value)) for own in dicts for value in own.values() if type(value) is list]
            tensors += [
                (value, value.detach().clone())
                for own in dicts
                for value in own.values()
                if isinstance(value, torch.Tensor)
            ]
    try:
        yield
    finally:
        with torch.no_grad():
            for own, before in kept:
                own.clear()
                own.update(before)
            for entries, entries_before in lists:
                entries[:] = entries_before
            for tensor, value in tensors:
                if not torch.equal(tensor, value):
                    tensor.copy_(value)


def _held_by(function: Any, depth: int = 3) -> Iterator[Any]:
    """Modules, objects, tensors and lists that a callable refers to by itself, its arguments or its closure."""
    if isinstance(function, torch.Tensor | nn.Module | list):
        yield function
    elif isinstance(function, functools.partial):
        for one in (function.func, *function.args, *function.keywords.values()):
            yield from _held_by(one, depth - 1) if depth else ()
    elif hasattr(function, "__self__") and not isinstance(function.__self__, type):
        yield from _held_by(function.__self__, depth - 1) if depth else ()
    elif hasattr(function, "__closure__"):
        for cell in function.__closure__ or ():
            try:
                yield from _held_by(cell.cell_contents, depth - 1) if depth else ()
            except ValueError:  # a name that is not bound yet
                continue
    elif callable(function) and hasattr(function, "__dict__") and not isinstance(function, type):
        yield function


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}".rstrip(": ")


def can_be_tried(output: Any, targets: Any) -> bool:
    """True if there is something to cut: samples, and targets whose number is known."""
    return bool(tensors_of(targets)) and bool(output_tensors(output)) and num_samples(targets) > 0
