"""Parallelize a 70B model as one rank of 1,024, in a new process, and print time, memory and layout as JSON.

python tests/helpers/fake_world_70b.py llama 517 '{"data": {"shard": "parameters"}}'
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import resource
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import weft
from weft.models.gpt import GPT, GPTConfig
from weft.plan.plan import Axes, Data, Pipeline, Plan, Precision, Step, Tensor
from weft.training.meta_trainer import MetaTrainer

SIZES = {"vocab_size": 32000, "context": 4096, "layers": 80, "hidden": 8192, "heads": 64, "kv_heads": 8, "mlp": 28672}


def make_model(kind: str) -> torch.nn.Module:
    vocab_size, context, layers, hidden, heads, kv_heads, mlp = SIZES.values()
    with torch.device("meta"):
        if kind == "gpt":
            sizes = {"hidden": hidden, "heads": heads, "kv_heads": kv_heads, "mlp_hidden": mlp, "num_layers": layers}
            return GPT(GPTConfig(vocab_size=vocab_size, context=context, tied=False, **sizes))
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=hidden,
            intermediate_size=mlp,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            max_position_embeddings=context,
        )
        return LlamaForCausalLM(config)


def make_plan(given: dict[str, Any]) -> Plan:
    return Plan(
        axes=Axes(**{"pipeline": 16, "data": 8, "tensor": 8, **given.get("axes", {})}),
        step=Step(microbatches=32),
        data=Data(**given.get("data", {})),
        pipeline=Pipeline(**given.get("pipeline", {})),
        tensor=Tensor(**given.get("tensor", {})),
        precision=Precision(compute="bf16"),
    )


def tiling_problems(trainer: MetaTrainer) -> list[str]:
    """Tensors of this stage that the ranks along tensor and data do not hold exactly once together."""
    problems = []
    for flat in trainer.sync.flats:
        for member, name in enumerate(flat.names):
            layout = flat.layout(member)
            numel = math.prod(layout.global_shape)
            for split in layout.splits:
                ranges = sorted(itertools.chain.from_iterable(split.parts))
                ends = [0, *(stop for _, stop in ranges)]
                if [start for start, _ in ranges] != ends[:-1] or ends[-1] != layout.global_shape[split.dim]:
                    problems.append(f"{name}: dim {split.dim} is cut into {ranges}")
                numel //= len(split.parts)
            kept = [flat.flat.kept(member, index) for index in range(flat.flat.num_parts)]
            joined = [one for one in kept if one[0] < one[1]]
            ends = [0, *(stop for _, stop in joined)]
            if [start for start, _ in joined] != ends[:-1] or ends[-1] != numel:
                problems.append(f"{name}: {numel} elements are kept as {kept}")
    return problems


def stage_problems(trainer: MetaTrainer, names: list[str]) -> list[str]:
    """Parameters that are not on exactly one stage, or whose presence on this rank does not match its stages."""
    cut = trainer.cut
    assert cut is not None
    problems = [f"{name} is on stages {cut.stages_of.get(name)}" for name in names if len(cut.stages_of[name]) != 1]
    mine = {name for name in names if not cut.stages_of[name].isdisjoint(cut.my_stages)}
    held = {name for flat in trainer.sync.flats for name in flat.names}
    return (
        problems
        + [f"{name} should be here" for name in mine - held]
        + [f"{name} should not be here" for name in held - mine]
    )


def main(kind: str, rank: int, given: dict[str, Any]) -> dict[str, Any]:
    plan = make_plan(given)
    dist.init_process_group("fake", rank=rank, world_size=plan.axes.num_ranks, store=FakeStore())
    model = make_model(kind)
    names = [name for name, _ in model.named_parameters()]
    began = time.process_time()
    trainer = weft.parallelize(
        model,
        plan,
        loss="cross-entropy",
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-4),
        example=torch.zeros(1, SIZES["context"], dtype=torch.int64),
        device="meta",
    )
    parallelize_s = time.process_time() - began
    assert isinstance(trainer, MetaTrainer)
    layouts, axes = trainer.layouts, trainer.mesh.grid
    place = axes.axes.sizes, axes.coordinates(rank)
    return {
        "num_parameters": trainer.num_parameters,
        "stage_numel": sum(
            math.prod(layouts[n].local_shape(*place)) for flat in trainer.sync.flats for n in flat.names
        ),
        "part_numel": sum(piece.tensor.numel() for piece in trainer.sync.pieces),
        "state_bytes": trainer.state_memory().state,
        "problems": [*tiling_problems(trainer), *stage_problems(trainer, names)],
        "parallelize_s": parallelize_s,
        "cpu_s": time.process_time(),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]))))
