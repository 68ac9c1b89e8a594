"""Dict batches, a model of two outputs, an auxiliary loss and an average of the weights: one process, or many ranks.

    python examples/newcomer_dict_batches.py
    torchrun --nproc-per-node 2 examples/newcomer_dict_batches.py
    torchrun --nproc-per-node 2 examples/newcomer_dict_batches.py examples/plans/zero.toml checkpoint

A tagger reads padded sentences and says the tag of each word; beside it a small head guesses the sentence's length,
which is the auxiliary loss. Padding has the target -1. Such a mean has a denominator of its own, so the loss returns
(sum, count): weft adds both over ranks and microbatches and divides once.

The plan keeps an exponential average of the weights (EMA). `trainer.extra_state` puts the script's own state, the best
loss so far, into checkpoints. With a folder as the second argument the script saves there, and goes on from there when
it is started again, also on another number of ranks.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from weft.plan.plan import Average, Axes, Plan
from weft.plan.text import as_plan

WORDS, TAGS, LENGTH, WIDTH = 50, 5, 12, 16
BATCH, LEARNING_RATE, AUXILIARY, PADDING = 8, 1e-2, 0.1, -1

Batch = dict[str, Tensor]


class Sentences(torch.utils.data.Dataset[tuple[Batch, Batch]]):
    """Words whose tag is their number modulo 5, in sentences of 4 to 12 words, padded with 0."""

    def __len__(self) -> int:
        return 128

    def __getitem__(self, index: int) -> tuple[Batch, Batch]:
        generator = torch.Generator().manual_seed(index)  # by the index, so that every rank makes the same sentence
        length = 4 + index % (LENGTH - 3)
        words = torch.randint(1, WORDS, (LENGTH,), generator=generator)
        is_word = torch.arange(LENGTH) < length
        inputs = {"words": words * is_word, "mask": is_word}
        return inputs, {"tags": torch.where(is_word, words % TAGS, PADDING), "length": torch.tensor(float(length))}


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH)) for _ in range(2))
        )
        self.tag, self.length = nn.Linear(WIDTH, TAGS), nn.Linear(WIDTH, 1)

    def forward(self, words: Tensor, mask: Tensor) -> Batch:
        hidden_BSE = self.layers(self.embedding(words))
        pooled_BE = (hidden_BSE * mask[..., None]).sum(1)
        return {"tags": self.tag(hidden_BSE), "length": self.length(pooled_BE).squeeze(1)}


def loss(output: Batch, targets: Batch) -> tuple[Tensor, Tensor]:
    """The sum over words, and their number. The auxiliary loss of a sentence counts for each of its words."""
    tags = F.cross_entropy(
        output["tags"].flatten(0, 1), targets["tags"].flatten(), ignore_index=PADDING, reduction="sum"
    )
    num_words_B = (targets["tags"] != PADDING).sum(1)
    lengths = (F.smooth_l1_loss(output["length"], targets["length"], reduction="none") * num_words_B).sum()
    return tags + AUXILIARY * lengths, num_words_B.sum()


def main(
    plan: Plan | str | Path | None = None, checkpoint: str | Path | None = None, *, steps: int = 40
) -> list[float]:
    """Train, and return the loss of every step, then those of the last weights and of their average."""
    torch.manual_seed(0)
    data = Sentences()
    chosen = as_plan(plan or Plan(axes=Axes(data="all")))  # a plan, or the path of its file
    chosen = replace(chosen, average=Average(decay=0.9))  # in a plan file: [average] decay = 0.9
    with weft.parallelize(
        Tagger(),
        chosen,
        loss=loss,
        optimizer=functools.partial(torch.optim.AdamW, lr=LEARNING_RATE),
        global_batch=BATCH,
    ) as trainer:
        losses: list[float] = []
        trainer.extra_state["best"] = float("inf")  # named before load(), which replaces it
        if checkpoint is not None and Path(checkpoint).exists():
            trainer.load(checkpoint)
        last_step = trainer.steps_done + steps
        for inputs, targets in weft.batches(data, trainer, global_batch=BATCH, shuffle_seed=0, epochs=None):
            losses.append(trainer.step(inputs, targets).item())
            trainer.extra_state["best"] = min(trainer.extra_state["best"], losses[-1])
            if trainer.steps_done == last_step:
                break
        held_out = weft.batches(data, trainer, global_batch=BATCH)
        last, average = trainer.evaluate(held_out), trainer.evaluate(held_out, average=True)
        if trainer.mesh.world.rank == 0:
            best = trainer.extra_state["best"]
            print(f"loss of the last weights {last:.4f}, of their average {average:.4f}; best of a batch {best:.4f}")
        if checkpoint is not None:
            trainer.save(checkpoint)  # on every rank
    return [*losses, last, average]


if __name__ == "__main__":
    main(*sys.argv[1:3])
