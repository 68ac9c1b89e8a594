"""A model as plain data: its parameters, and the memory that one microbatch takes.

A training step passes through the model's segments in this order and back; the memory of a segment is measured once
(`measure/model.py`) and added up for any plan (`planning/memory.py`):

    forward    prelude ─ block 0 ─ block 1 ─ ... ─ postlude and loss ─┐
    backward   prelude ─ block 0 ─ block 1 ─ ... ─ postlude and loss ─┘

Parameters belong to units: each block is one, and so may be large embeddings before the blocks, and large linear layers
after them; everything else outside the blocks (prelude and postlude) is the root.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.errors import ModelError
from weft.plan.partition.flat_buffers import ParameterSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Bytes that grow with the number of samples in a microbatch."""

    fixed_bytes: int = 0
    """Bytes that do not grow: gradients of weights, attention masks."""
    sample_bytes: int = 0

    def at(self, samples: int) -> int:
        """Bytes with a microbatch of this many samples."""
        return max(self.fixed_bytes + self.sample_bytes * samples, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """The memory of one segment of the model, beside parameters and their kept gradients.

    A storage that several segments hold counts for the first of them only.
    """

    name: str
    """"prelude", the block's name in the model, or "postlude"; the loss is part of the postlude."""
    saved: Size = Size()
    """Kept from forward to backward where nothing is recomputed."""
    selective: Size = Size()
    """Kept where everything but the outputs of matrix products is recomputed."""
    inputs: Size = Size()
    """Kept where whole blocks are recomputed: a block's inputs."""
    forward_peak: Size = Size()
    """The most that is alive in its forward pass, above what the segments before it have saved."""
    backward_peak: Size = Size()
    """The most that is alive in its backward pass, above what it and the segments before it have saved."""

    def kept(self, policy: str) -> Size:
        """Bytes kept from forward to backward under a `[recompute] policy`."""
        return {"none": self.saved, "selective": self.selective, "full": self.inputs}[policy]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile:
    """A model and one microbatch of it."""

    parameters: tuple[ParameterSpec, ...]
    """In the order of registration."""
    blocks: tuple[str, ...] = ()
    """Names of the blocks, in the order of use; empty: the model has none."""
    segments: tuple[Segment, ...] = ()
    """Prelude, blocks, postlude."""
    buffer_bytes: int = 0
    """Buffers, whole on every rank."""
    batch_norms: bool = False
    """Some layers normalise by the batch they see."""
    batch: Size = Size()
    """Inputs and targets."""
    output: Size = Size()
    """The model's output: the logits."""
    compute: str = "model"
    """The `[precision] compute` under which segments were measured."""
    device: str = "cpu"
    """The kind of device it was measured for, which decides which kernels run and what they save."""
    samples: int = 1
    """Samples of the microbatch that was measured; sizes are exact there and linear around it."""

    def __post_init__(self) -> None:
        problems = []
        if self.segments and len(self.segments) != len(self.blocks) + 2:
            problems.append(
                f"a profile of {len(self.blocks)} blocks has {len(self.segments)} segments; give prelude, blocks and "
                f"postlude, {len(self.blocks) + 2} in all"
            )
        problems += [
            f'parameter "{parameter.name}" belongs to block {parameter.block}, and the profile has '
            f"{len(self.blocks)} blocks; count blocks from 0"
            for parameter in self.parameters
            if parameter.block is not None
            and not parameter.is_outside_blocks
            and not 0 <= parameter.block < len(self.blocks)
        ]
        if problems:
            raise ModelError(problems)

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(parameter.numel for parameter in self.parameters)
