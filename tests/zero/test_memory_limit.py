"""Train what does not fit: a model that dies on one memory-limited rank trains on four that are limited alike.

Every rank may allocate `LIMIT_BYTES` more than it has when the test begins (RLIMIT_DATA counts private writable
memory, which is what tensors on the host are). The model is built on the meta device, so that no rank holds it whole.
"""

from __future__ import annotations

import functools
import re
import resource
from pathlib import Path

import pytest
import torch
from ranks import ranks

from weft.models.gpt import GPT, GPTConfig
from weft.plan.plan import Axes, Data, Plan
from weft.training.parallelize import parallelize

pytestmark = pytest.mark.long

SIZES = GPTConfig(vocab_size=512, context=64, num_layers=12, hidden=896, heads=8)
NUM_PARAMETERS = 116_000_000
STATE_BYTES = 16 * NUM_PARAMETERS
LIMIT_BYTES = STATE_BYTES * 6 // 10
"""Six tenths of the 16 bytes per parameter that one rank needs. Stacks of threads count too, some 100 MB of them."""


def limit_memory() -> None:
    status = Path("/proc/self/status").read_text()
    found = re.search(r"VmData:\s+(\d+) kB", status)
    assert found is not None
    allowed = int(found[1]) * 1024 + LIMIT_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (allowed, allowed))


def train(plan: Plan, num_steps: int) -> list[float]:
    torch.manual_seed(0)
    with torch.device("meta"):
        model = GPT(SIZES)
    assert abs(sum(parameter.numel() for parameter in model.parameters()) / NUM_PARAMETERS - 1) < 0.02
    trainer = parallelize(
        model,
        plan,
        loss="cross-entropy",
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-3, fused=True),
        device="cpu",
    )
    tokens = torch.randint(SIZES.vocab_size, (2, 65), generator=torch.Generator().manual_seed(trainer.data_rank))
    return [float(trainer.step(tokens[:, :-1], tokens[:, 1:])) for _ in range(num_steps)]


@ranks(1, fresh=True, timeout_s=100)
def test_one_rank_dies_of_it() -> None:
    limit_memory()
    with pytest.raises(RuntimeError, match="can't allocate memory|not enough memory"):
        train(Plan(), num_steps=1)


@ranks(4, fresh=True, timeout_s=100)
def test_four_ranks_train() -> None:
    limit_memory()
    losses = train(Plan(axes=Axes(data=4), data=Data(shard="parameters")), num_steps=4)
    assert losses[-1] < losses[0]
