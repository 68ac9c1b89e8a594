"""Small drawn batches on which a user's loss is tried: outputs of the real kind, and targets made from the real ones.

A loss that divides by a number of its own shows it only where that number differs between parts. So outputs are drawn
(those of a fresh model may all be alike), and targets are varied: other classes, thinner masks, ignored targets.
Values that the loss may not know are tried on the host only: on a GPU a class out of range ends the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from weft.parallel.tensor.cross_entropy import IGNORED_TARGET
from weft.training.data.trees import map_output, map_tensors, num_samples, output_tensors, tensors_of
from weft.training.loss.loss import are_samples_counted

SAMPLES, TOKENS = 0, 1
"""The dims along which batches are cut."""

_NUM_SAMPLES, _FIRST_SAMPLES = 5, 2
_MOST_TOKENS = 64
_MOST_ELEMENTS = 2**24
"""Elements of drawn outputs, all together."""

MapAll = Callable[[Callable[[torch.Tensor], torch.Tensor], Any], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hints:
    """What a loss was seen to do with its targets, by the functions of torch that it called."""

    ignored: frozenset[int] = frozenset()
    """Targets that it leaves out, besides −100."""
    num_classes: int | None = None
    """Number of classes, where it weighs them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialBatch:
    """Outputs and targets that can be cut into two parts along one dim."""

    output: Any
    targets: Any
    along: int
    is_cut: tuple[tuple[bool, ...], tuple[bool, ...]]
    """Which tensors of the output, and of the targets, have this dim."""
    size: int
    first_part: int
    """Size of the first of the two parts."""
    is_resized: bool = False
    """The real batch has another size, so a loss that takes this one takes any, and must take the parts."""
    put_in: int | None = None
    """A value that was put into some places of the targets."""
    is_new: bool = False
    """The real targets did not have that value, so a loss may also take it for a number like others."""

    def part(self, start: int, stop: int) -> tuple[Any, Any]:
        """The output and the targets of a range of samples or tokens."""
        is_cut = [iter(flags) for flags in self.is_cut]

        def narrowed(flags: Iterator[bool]) -> Callable[[torch.Tensor], torch.Tensor]:
            def narrow(tensor: torch.Tensor) -> torch.Tensor:
                return tensor.narrow(self.along, start, stop - start).contiguous() if next(flags) else tensor

            return narrow

        return map_output(narrowed(is_cut[0]), self.output), map_tensors(narrowed(is_cut[1]), self.targets)


def real_batch(output: Any, targets: Any) -> TrialBatch | None:
    """The samples as they are, where there are several."""
    total = num_samples(targets)
    if total < 2:
        return None
    return TrialBatch(
        output=output,
        targets=targets,
        along=SAMPLES,
        is_cut=(_have_samples(output_tensors(output), total), _have_samples(tensors_of(targets), total)),
        size=total,
        first_part=max(total // 3, 1),
    )


def drawn_batches(output: Any, targets: Any, along: int, generator: torch.Generator) -> Iterator[TrialBatch]:
    """The same small batch in several forms, of which a loss may accept the first or a later one."""
    floats = [tensor for tensor in output_tensors(output) if tensor.is_floating_point()]
    if along == TOKENS and _num_tokens(targets) < 4:  # a half of one token may have nothing to count
        return
    places = [torch.device("cpu"), *dict.fromkeys(tensor.device for tensor in floats if tensor.device.type != "cpu")]
    for place in places:
        for dtype in dict.fromkeys((torch.float64, *(tensor.dtype for tensor in floats[:1]), torch.float32)):
            for is_short in (True, False):
                made = _drawn(output, targets, along, place, dtype, generator, is_short=is_short)
                if made is not None:
                    yield made


def varied(batch: TrialBatch, hints: Hints, generator: torch.Generator) -> Iterator[TrialBatch]:
    """The batch with other targets, each of which a loss may refuse to take."""
    classes = range(hints.num_classes or 0)
    others = map_tensors(lambda tensor: _other_values(batch, tensor, classes, generator), batch.targets)
    yield replace(batch, targets=others)
    first = tensors_of(batch.targets)[0]
    if are_samples_counted(batch.targets):
        return
    for value in (IGNORED_TARGET, *sorted(hints.ignored)):
        is_known = value in hints.ignored or bool((first == value).any())
        if is_known or first.device.type == "cpu":
            yield replace(batch, targets=_with_some(batch, value, generator), put_in=value, is_new=not is_known)


def with_minus_one(batch: TrialBatch, generator: torch.Generator) -> TrialBatch | None:
    """The batch with targets of −1, the other value that people ignore."""
    if are_samples_counted(batch.targets) or tensors_of(batch.targets)[0].device.type != "cpu":
        return None
    return replace(batch, targets=_with_some(batch, -1, generator))


def _drawn(
    output: Any,
    targets: Any,
    along: int,
    place: torch.device,
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    is_short: bool,
) -> TrialBatch | None:
    """A drawn batch; `is_short`: of few tokens only. None if that is no other batch, or too large a one."""
    total, num_tokens = num_samples(targets), _num_tokens(targets)
    window = None
    if along == TOKENS or (is_short and num_tokens > _MOST_TOKENS):
        first = _first_counted(targets, num_tokens) if along == TOKENS else 0
        window = (first, min(first + _MOST_TOKENS, num_tokens))
    if not is_short and (along == TOKENS or num_tokens <= _MOST_TOKENS):
        return None
    wanted = min(total, _FIRST_SAMPLES) if along == TOKENS else _NUM_SAMPLES + (total == _NUM_SAMPLES)
    rows = torch.arange(wanted) % total

    def few(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dim() or tensor.shape[0] != total:
            return tensor
        kept = tensor.detach().index_select(0, rows.to(tensor.device))
        # Outputs may have their classes before the tokens, or the rows of an image.
        dims = [dim for dim in range(TOKENS, tensor.dim()) if tensor.shape[dim] == num_tokens]
        if window is None or not dims or (along == TOKENS and dims[0] != TOKENS):
            return kept
        return kept.narrow(dims[0], window[0], window[1] - window[0]).contiguous()

    def draw(tensor: torch.Tensor) -> torch.Tensor:
        kept = few(tensor).to(place)
        if not tensor.is_floating_point():
            return kept
        if not tensor.dim() or tensor.shape[0] != total:
            return kept.to(dtype)
        return _like(tensor, kept.shape, generator).to(place, dtype)

    if sum(few(one).numel() for one in output_tensors(output) if one.dim()) > _MOST_ELEMENTS and not window:
        return None
    drawn, goal = map_output(draw, output), map_tensors(lambda tensor: few(tensor).to(place), targets)
    size = wanted if along == SAMPLES or window is None else window[1] - window[0]
    trees = output_tensors(output), tensors_of(targets)
    if along == SAMPLES:
        is_cut = _have_samples(trees[0], total), _have_samples(trees[1], total)
    else:
        is_cut = _have_tokens(trees[0], num_tokens), _have_tokens(trees[1], num_tokens)
    return TrialBatch(
        output=drawn,
        targets=goal,
        along=along,
        is_cut=is_cut,
        size=size,
        first_part=max(size * 2 // 5, 2),
        is_resized=size != (total if along == SAMPLES else num_tokens),
    )


def _like(tensor: torch.Tensor, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Values of the tensor's own kind: probabilities, their logarithms, other positive numbers, or any."""
    low, high = (float(tensor.detach().min()), float(tensor.detach().max())) if tensor.numel() else (-1.0, 1.0)
    made = torch.randn(shape, generator=generator)
    if low >= 0 and high <= 1:
        return made.sigmoid() * 0.9 + 0.05
    if high <= 0:
        return made.log_softmax(-1) if made.dim() > 1 and made.shape[-1] > 1 else -made.abs() - 0.1
    return made.abs() + 0.1 if low >= 0 else made


def _other_values(batch: TrialBatch, tensor: torch.Tensor, classes: range, generator: torch.Generator) -> torch.Tensor:
    """Classes that the batch knows, thinner masks, and smaller weights."""
    if not tensor.numel() or not tensor.dim() or tensor.is_complex():
        return tensor
    chance = torch.rand(tensor.shape, generator=generator).to(tensor.device)
    low, high = (0.0, 1.0) if tensor.dtype == torch.bool else (float(tensor.min()), float(tensor.max()))
    is_mask = low >= 0 and high == 1 and bool(((tensor == 0) | (tensor == 1)).all())
    if is_mask and not classes:
        return torch.where(_some_places(batch, tensor, generator), torch.zeros_like(tensor), tensor)
    if tensor.is_floating_point():
        return tensor * (0.5 + chance / 2)
    if classes:
        return torch.where(tensor >= 0, (chance * len(classes)).to(tensor.dtype), tensor)
    if low >= 0:
        return (chance * (high + 1)).to(tensor.dtype)
    pool = tensor.flatten()
    return pool[(chance.flatten() * pool.numel()).long()].view(tensor.shape)


def _with_some(batch: TrialBatch, value: int, generator: torch.Generator) -> Any:
    """The targets with this value in some places of the first tensor."""
    first = tensors_of(batch.targets)[0]
    changed = torch.where(_some_places(batch, first, generator), torch.full_like(first, value), first)
    return map_tensors(lambda tensor: changed if tensor is first else tensor, batch.targets)


def _some_places(batch: TrialBatch, tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Places in a tensor of the targets: more in the second part than in the first, and nowhere all."""
    if tensor.dim() == 1:
        chosen = torch.arange(len(tensor)) == len(tensor) - 1
    else:
        inner = [1] * (tensor.dim() - 2)
        share = torch.linspace(0.0, 0.8, tensor.shape[0]).view(-1, 1, *inner)
        if batch.along == TOKENS:
            share = 0.2 + 0.4 * (torch.arange(tensor.shape[1]) >= batch.first_part).view(1, -1, *inner)
        chosen = torch.rand(tensor.shape, generator=generator) < share
        for kept in (0, batch.first_part) if batch.along == TOKENS else (-1,):
            if -1 <= kept < tensor.shape[1]:
                chosen[:, kept] = False
    return chosen.to(tensor.device)


def _num_tokens(targets: Any) -> int:
    lengths = {tensor.shape[TOKENS] for tensor in tensors_of(targets) if tensor.dim() > TOKENS}
    return lengths.pop() if len(lengths) == 1 else 0


def _first_counted(targets: Any, num_tokens: int) -> int:
    """The first token that counts in a few samples, at least 4 tokens before the end if there are as many."""
    first = tensors_of(targets)[0][:_FIRST_SAMPLES]
    if are_samples_counted(targets) or first.dim() <= TOKENS:
        return 0
    counts = (first != IGNORED_TARGET).flatten(2).any(-1) if first.dim() > 2 else first != IGNORED_TARGET
    return min(int(counts.any(0).int().argmax()), max(num_tokens - 4, 0))


def _have_samples(tensors: list[torch.Tensor], total: int) -> tuple[bool, ...]:
    return tuple(tensor.dim() > 0 and tensor.shape[0] == total for tensor in tensors)


def _have_tokens(tensors: list[torch.Tensor], num_tokens: int) -> tuple[bool, ...]:
    return tuple(tensor.dim() > TOKENS and tensor.shape[TOKENS] == num_tokens for tensor in tensors)
