"""torch's sides of `slow_networks.py`: DistributedDataParallel with its hooks, with the calls of weft's trainer.

gloo moves a GPU's tensors through the host, and the futures of these do not always keep to the right streams
(pytorch issue 155714), which changes results without an error. So a hook sees buckets that lie on the host.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from codecs_lab import waited_power_sgd_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.nn.parallel import DistributedDataParallel

import weft
from weft.models.gpt import GPT
from weft.optim.schedule import Schedule

CLIP_NORM = 1.0
POWERSGD_RANK = 4


class HostBucket:
    """A copy of a bucket of gradients on the host, with what hooks ask of one."""

    def __init__(self, bucket: Any) -> None:
        self.index, self.is_last, self.parameters = bucket.index, bucket.is_last, bucket.parameters
        self._flat = bucket.buffer().to("cpu", copy=True)
        self._shapes = [one.shape for one in bucket.gradients()]

    def buffer(self) -> torch.Tensor:
        return self._flat

    def gradients(self) -> list[torch.Tensor]:
        parts = self._flat.split([shape.numel() for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]


# DDP refuses annotations that are not the classes themselves, and here they are text.
def on_host(state, bucket):  # type: ignore[no-untyped-def]
    """A hook, given with its own state, on a copy of the bucket; its result is back when this returns."""
    own_state, hook = state
    # Where there is a GPU, the PowerSGD hook waits for the device of its bucket, and refuses the host.
    with patch.object(torch.cuda, "synchronize", lambda *_: None):
        pending = hook(own_state, HostBucket(bucket))
        pending.wait()
    flat = bucket.buffer()
    found = pending.value()
    flat.copy_(found[0] if isinstance(found, list | tuple) else found)
    done = torch.futures.Future(devices=[flat.device] if flat.is_cuda else [])
    done.set_result(flat)
    return done


def power_sgd_state() -> PowerSGDState:
    return PowerSGDState(process_group=None, matrix_approximation_rank=POWERSGD_RANK, start_powerSGD_iter=2)


class TorchTrainer:
    """A model in DistributedDataParallel, or ("alone") by itself, trained as weft trains it."""

    def __init__(self, model: GPT, hook: str | None, optimizer: Any, schedule: Schedule, device: str) -> None:
        self.model: Any = model if hook == "alone" else DistributedDataParallel(model)
        if hook in ("fp16", "powersgd"):
            given = (None, fp16_compress_hook) if hook == "fp16" else (power_sgd_state(), waited_power_sgd_hook)
            self.model.register_comm_hook(*(given if device == "cpu" else (given, on_host)))
        self.device, self.data_position, self.steps_done = device, 0, 0
        self.is_alone = hook == "alone"
        self.data_rank, self.data_size = (0, 1) if self.is_alone else (dist.get_rank(), dist.get_world_size())
        self.num_parameters = sum(one.numel() for one in model.parameters())
        self._optimizer = optimizer(model.parameters())
        self._rates = torch.optim.lr_scheduler.LambdaLR(self._optimizer, schedule)

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self._optimizer.zero_grad(set_to_none=True)
        loss = self._loss(inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        self._optimizer.step()
        self._rates.step()
        self.steps_done += 1
        return loss.detach()

    @torch.no_grad()
    def evaluate(self, batches: weft.batches) -> float:
        """The mean loss of all ranks' parts."""
        total = torch.zeros(2, dtype=torch.float64)
        for inputs, targets in batches.from_start():
            total += torch.tensor([float(self._loss(inputs, targets)) * targets.numel(), targets.numel()])
        if not self.is_alone:
            dist.all_reduce(total)
        return float(total[0] / total[1])

    def _loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        output = self.model(inputs.to(self.device, non_blocking=True))
        return F.cross_entropy(output.flatten(0, 1), targets.to(self.device, non_blocking=True).flatten())

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.model = None
