"""Fine-tune a pretrained Hugging Face model under any plan, and save a checkpoint that transformers loads.

    torchrun --nproc-per-node 4 examples/hugging_face/finetune.py FOLDER PLAN.toml OUTPUT

FOLDER holds a config.json and *.safetensors, as `save_pretrained` writes them. The model is built on the meta device,
each rank reads its own shards of the weights, and `from_pretrained` reads the checkpoint in OUTPUT.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import weft
from weft.training.data.datasets import TokenWindows, fetch, standard_library_text

NUM_STEPS, GLOBAL_BATCH, CONTEXT = 20, 16, 128


def train(folder: Path, plan_file: Path, output: Path) -> weft.Trainer:
    """Train on this rank and save a checkpoint."""
    with torch.device("meta"):
        config = AutoConfig.from_pretrained(folder)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    dataset = TokenWindows(standard_library_text(), CONTEXT)
    trainer = weft.parallelize(
        model,
        weft.read_plan(plan_file),
        loss="cross-entropy",
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-3),
        example=fetch(dataset, np.arange(4))[0],
        weights=folder,
    )
    is_first = trainer.mesh.world.rank == 0
    for inputs, targets in weft.batches(dataset, trainer, global_batch=GLOBAL_BATCH, shuffle_seed=0):
        loss = trainer.step(inputs, targets)
        if is_first:
            print(f"step {trainer.steps_done}: loss {float(loss):.4f}", flush=True)
        if trainer.steps_done == NUM_STEPS:
            break
    trainer.save(output)
    return trainer


def continue_text(checkpoint: Path, prompt: str, num_tokens: int = 64) -> str:
    """Text generated from a checkpoint by transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    tokens = torch.tensor([list(prompt.encode())])
    made = model.generate(tokens, max_new_tokens=num_tokens, do_sample=False, pad_token_id=0)
    return bytes(made[0].tolist()).decode(errors="replace")


if __name__ == "__main__":
    trainer = train(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
    if trainer.mesh.world.rank == 0:
        print(continue_text(Path(sys.argv[3]), "def "))
    torch.distributed.destroy_process_group()
