"""Cuts whole sequences to this rank's tokens, before the model sees them.

Inputs, targets and padding masks with one entry per token are cut along their dim 1, in the order of the plan's layout.
Sequences that do not divide are padded at their end, for the model only, by repeating their last token, which is valid
for any model; causal attention does not reach it, other attention masks it, and no loss includes it. Positions are
added where the model takes them.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from weft.blueprint import Positions
from weft.errors import DataError, ModelError
from weft.models.hugging_face_inputs import SequenceInputs, inputs_of
from weft.parallel.attention.attention import Pass
from weft.parallel.sequence.sequence_parallel import SequenceParallel
from weft.parallel.state.batchnorm import has_batch_norms
from weft.plan.partition.sequence import Places
from weft.plan.partition.tensor import Range
from weft.training.data.sample_split import MakeWhole, SampleSplit
from weft.training.data.to_device import to_device
from weft.training.data.trees import Arguments, map_output, map_tensors, named_tensors, num_samples

log = logging.getLogger("weft")

_TOKEN_DIM = 1
_FEWEST_EACH = 2
"""Fewest tokens of an example per rank for a trial."""
_HUGGING_FACE_POSITIONS = frozenset({"wpe", "position_embeddings", "embed_positions"})
"""Names of position embeddings in Hugging Face models."""


class SequenceSplit(SampleSplit):
    """Cuts a model's inputs, and lets it attend over the tokens of all ranks."""

    draws_alike = False

    def __init__(self, model: nn.Module, sequence: SequenceParallel, device: torch.device) -> None:
        self.sequence = sequence
        self.replacements = sequence.replacements
        self._model = model
        self._device = device
        self._names = _parameter_names(model)
        self._num_ranks = sequence.axes.ring.size * sequence.axes.ulysses.size
        self._tried: set[str] | None = None
        """Names of the arguments in the trial, until the first step."""
        self._is_first = sequence.is_first
        self._has_batch_norms = has_batch_norms(model)
        self._longest = _num_places(model, sequence.positions)

    def enter(self, inputs: Any) -> None:
        if isinstance(inputs, Arguments):
            self.sequence.enter(inputs.now)
            self._latest: Places = inputs.now.places

    def around(self, call: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def call_without_padding(inputs: Any) -> Any:
            output = call(inputs)
            if not isinstance(inputs, Arguments):
                return output
            num_padded, num_real = inputs.now.places.tokens_per_rank, self._num_real(inputs.now.places)
            if num_real == num_padded:
                return output
            return map_output(
                lambda one: one[:, :num_real].contiguous() if _is_of_tokens(one, num_padded) else one, output
            )

        return call_without_padding

    def weight(self, inputs: Any) -> int:
        return self._num_real(inputs.now.places)

    def cut(self, inputs: Any, targets: Any) -> tuple[Arguments, Any]:
        cut = self.cut_inputs(inputs)
        self._refuse_targets(targets, cut.now.places)
        self._warn_of_untried(cut)
        return cut, map_tensors(lambda target: self._cut_target(target, cut.now.places), targets)

    def cut_inputs(self, inputs: Any) -> Arguments:
        """This rank's tokens of some inputs, by names of the model's arguments."""
        whole = self._whole(inputs)
        num_tokens, samples = whole.inputs[whole.along[0]].shape[_TOKEN_DIM], num_samples(inputs)
        places = self.sequence.places(num_tokens)
        if not num_tokens:
            raise DataError("sequences have 0 tokens; give at least one")
        if self._longest is not None and num_tokens > self._longest:
            raise DataError(  # on all ranks, also those whose own tokens would fit
                f"sequences have {num_tokens} tokens and the model has places for {self._longest}; cut them, or build "
                "the model with more"
            )
        if self._has_batch_norms and places.padded > num_tokens:
            raise DataError(
                f"sequences of {num_tokens} tokens must be padded to {places.padded} for this plan, and a BatchNorm "
                f"would count the padding; use sequences of {places.padded} tokens, or another norm"
            )
        ranges = self.sequence.ranges(places)

        def cut_one(tensor: Tensor) -> Tensor:
            return take(tensor, ranges) if _has_tokens(tensor, num_tokens) else tensor

        cut = {name: map_tensors(cut_one, value) for name, value in whole.inputs.items()}
        beside = {name: cut.pop(name) for name in whole.along if len(cut[name]) != samples}
        positions = self.sequence.positions
        if positions is not None and positions.argument is not None and cut.get(positions.argument) is None:
            numbers = self.sequence.numbers(places, self._device)
            cut.pop(positions.argument, None)
            beside[positions.argument] = numbers.unsqueeze(0) if positions.num_dims == 2 else numbers

        def padded(tensor_BS: Tensor | None, fill: float) -> Tensor | None:
            if tensor_BS is None:
                return None
            return to_device(take(tensor_BS, ((0, places.padded),), fill=fill), self._device)

        now = Pass(
            places=places, key_mask_BS=padded(whole.key_mask_BS, False), documents_BS=padded(whole.documents_BS, -1)
        )
        return Arguments(cut, beside=beside, now=now)

    def shorten(self, inputs: Any, most: int) -> Any:
        whole = self._whole(inputs)
        num_tokens = whole.inputs[whole.along[0]].shape[_TOKEN_DIM]
        self._tried = {name for name, value in whole.inputs.items() if value is not None}
        if not num_samples(inputs) or num_tokens < _FEWEST_EACH * self._num_ranks:
            return None
        is_left = whole.key_mask_BS is not None and not bool(whole.key_mask_BS[:, 0].all())
        if is_left and isinstance(inputs, dict):
            # Padding in front attends to nothing; its outputs are meaningless, and differ.
            inputs = {**inputs, "attention_mask": torch.ones_like(inputs["attention_mask"])}
        most = min(most, num_tokens)
        if self.sequence.places(most).padded == most > 1 and not self._has_batch_norms:
            most -= 1  # so that padding is tried too

        def shortened(tensor: Tensor) -> Tensor:
            if _has_tokens(tensor, num_tokens):
                return tensor[:, :most].contiguous()
            is_length = tensor.dim() == 1 and not tensor.is_floating_point() and tensor.dtype != torch.bool
            if is_length and len(tensor) and 0 <= int(tensor.min()) <= int(tensor.max()) <= num_tokens:
                return (tensor * most).div(num_tokens, rounding_mode="floor").clamp(min=1).to(tensor.dtype)
            return tensor

        return map_tensors(shortened, inputs)

    def part_of_output(self, output: Tensor, make: MakeWhole) -> Tensor:
        places = self._latest
        num_real = self._num_real(places)
        if not _is_of_tokens(output, num_real):
            raise ModelError(
                f"the model's output for {num_real} tokens has shape {tuple(output.shape)}, without a dim of tokens; "
                "with [axes] ring or ulysses > 1 it must answer for every token by itself, along dim 1"
            )
        return self.part_of_whole(make((output.shape[0], places.num_tokens, *output.shape[2:])))

    def part_of_whole(self, whole: Tensor) -> Tensor:
        return take(whole, self.sequence.ranges(self._latest))[:, : self._num_real(self._latest)]

    def _num_real(self, places: Places) -> int:
        """Number of this rank's tokens that are not padding; they come first."""
        return sum(max(min(stop, places.num_tokens) - start, 0) for start, stop in self.sequence.ranges(places))

    def _whole(self, inputs: Any) -> SequenceInputs:
        found = inputs_of(self._model, inputs)
        if found is not None:
            return found
        named = self._by_name(inputs)
        tokens = [name for name, value in named.items() if isinstance(value, Tensor) and value.dim() > _TOKEN_DIM]
        if not tokens:
            raise DataError(
                "[axes] ring and ulysses split sequences, and no input has a dim of tokens; inputs hold samples along "
                "dim 0 and tokens along dim 1"
            )
        num_tokens = named[tokens[0]].shape[_TOKEN_DIM]
        problems = [
            f"{path} has shape {tuple(tensor.shape)}, and the sequences have {num_tokens} tokens along dim 1; weft can "
            "cut what has one entry per token there, and nowhere else"
            for path, tensor in named_tensors(named, "inputs")
            if tensor.dim() > _TOKEN_DIM and not _has_tokens(tensor, num_tokens)
        ]
        if problems:
            raise DataError(problems)
        return SequenceInputs(inputs=named, along=tuple(tokens), key_mask_BS=None, documents_BS=None)

    def _refuse_targets(self, targets: Any, places: Places) -> None:
        """Refuse targets of samples where no target has a dim of tokens, and other numbers of tokens."""
        shapes = [(path, target.shape) for path, target in named_tensors(targets, "targets")]
        has_tokens = any(len(shape) > _TOKEN_DIM for _, shape in shapes)
        problems = [
            f"{path} has shape {tuple(shape)} and the sequences have {places.num_tokens} tokens; with [axes] ring or "
            "ulysses > 1 every token has a target of its own, along dim 1"
            for path, shape in shapes
            if (not has_tokens or len(shape) > _TOKEN_DIM) and tuple(shape[_TOKEN_DIM:][:1]) != (places.num_tokens,)
        ]
        if problems:
            raise DataError(problems)

    def _cut_target(self, target: Tensor, places: Places) -> Tensor:
        if target.dim() <= _TOKEN_DIM:
            return target
        return take(target, self.sequence.ranges(places))[:, : self._num_real(places)].contiguous()

    def _warn_of_untried(self, cut: Arguments) -> None:
        """Warn once if the model is given arguments that the trial did not have."""
        given = {name for name, value in cut.items() if value is not None}
        if self._tried is not None and not given <= self._tried and self._is_first:
            log.warning(
                "the model is given %s, which the example had not, so the split was not tried with it; verify it first",
                ", ".join(sorted(given - self._tried)),
            )
        self._tried = None

    def _by_name(self, inputs: Any) -> dict[str, Any]:
        if isinstance(inputs, dict):
            return inputs
        given = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
        if len(given) > len(self._names):
            raise ModelError(
                f"the model is given {len(given)} inputs and its forward names {len(self._names)} "
                f"({', '.join(self._names)}); with [axes] ring or ulysses > 1 give them by name, as a dict"
            )
        return dict(zip(self._names, given, strict=False))


def take(tensor: Tensor, ranges: Sequence[Range], *, fill: float | None = None) -> Tensor:
    """These tokens of a tensor, padded beyond its end by its last one, or by `fill`."""
    length = tensor.shape[_TOKEN_DIM]
    parts = [tensor[:, min(start, length) : min(stop, length)] for start, stop in ranges]
    num_missing = sum(stop - start for start, stop in ranges) - sum(part.shape[_TOKEN_DIM] for part in parts)
    if num_missing:
        # Ranges ascend and padding ends the sequence, so the missing tokens are the last.
        shape = (tensor.shape[0], num_missing, *tensor.shape[_TOKEN_DIM + 1 :])
        parts.append(tensor[:, -1:].expand(shape) if fill is None else tensor.new_full(shape, fill))
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, _TOKEN_DIM)


def _is_of_tokens(output: Tensor, num_tokens: int) -> bool:
    return output.dim() > _TOKEN_DIM and output.shape[_TOKEN_DIM] == num_tokens


def _has_tokens(tensor: Tensor, num_tokens: int) -> bool:
    """True if dim 1 alone is the tokens; a dim of features may by chance have the same size."""
    if tensor.dim() <= _TOKEN_DIM or tensor.shape[_TOKEN_DIM] != num_tokens:
        return False
    return num_tokens not in tensor.shape[_TOKEN_DIM + 1 :] or (tensor.dim() == 3 and tensor.is_floating_point())


def _num_places(model: nn.Module, positions: Positions | None) -> int | None:
    """The longest sequence that a model has positions for, if known."""
    found = []
    if positions is not None:
        modules = [model.get_submodule(name) for name in positions.modules]
        found += [module.num_embeddings for module in modules if isinstance(module, nn.Embedding)]
        found += [model.get_buffer(name).shape[dim] for name, dim in positions.tables]
        found += [] if positions.longest is None else [positions.longest]
    found += [
        module.num_embeddings - getattr(module, "offset", 0 if module.padding_idx is None else module.padding_idx + 1)
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] in _HUGGING_FACE_POSITIONS
    ]
    return min(found, default=None)


def _parameter_names(model: nn.Module) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [name for name, one in inspect.signature(model.forward).parameters.items() if one.kind in kinds]
