"""One process that plays all workers of parameter servers, where every update is made of one whole batch.

Each worker's part runs through the same model, in the plan's microbatches and with the worker's own buffers; gradients
are added up over workers, and updated with once. What is compared is what can be seen: the mean of a worker's own
gradients, which it sends; the weights that come back; and the state of the optimizer, which servers keep, and in which
a wrong factor shows that Adam would hide in the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from weft.plan.plan import Plan
from weft.training.data.trees import num_samples
from weft.verification.one_process import Key, OneProcess, Passes, Recipe, microbatch_rows

Tensors = dict[str, torch.Tensor]


class ServedBatches(OneProcess):
    """A model trained on whole batches, seen by one worker."""

    def __init__(self, model: nn.Module, plan: Plan, recipe: Recipe, worker: int = 0) -> None:
        """`worker`: the one whose own gradients and buffers are compared."""
        super().__init__(model, plan, recipe)
        self._worker = worker
        self._buffers = OwnBuffers(model, plan.axes.data_ranks)
        self._own: Tensors = {}
        self._own_before: Tensors = {}

    def _run(self, inputs: Any, targets: Any, passes: Passes) -> None:
        summed: Tensors = {}
        self._own_before, self._own = self._own, {}
        for worker in range(self._plan.axes.data_ranks):
            self._buffers.use(worker)
            count_before = sum(passes.counts)
            self._updates.optimizer.zero_grad(set_to_none=True)
            self._run_rows(inputs, targets, microbatch_rows(self._plan, num_samples(inputs), [worker]), passes)
            count = sum(passes.counts) - count_before
            found = {name: one.grad for name, one in self._trained.items() if one.grad is not None}
            self._note(worker, found, count)
            if worker == self._worker and count:
                self._own = {name: one / count for name, one in found.items()}
            for name, one in found.items():
                summed[name] = summed[name] + one if name in summed else one
        self._buffers.use(self._worker)
        if not self._plan.server.updates_together:  # there is one worker, which clips what it sends
            clip(self._own, self._plan.step.clip_norm)
        for name, parameter in self._trained.items():
            parameter.grad = summed.get(name)

    def _note(self, worker: int, found: Tensors, count: float) -> None:
        """A worker's gradients of the sum over its targets are `found`, which may be changed in place."""

    def tensors(self, *, is_drained: bool = True) -> Iterator[tuple[Key, torch.Tensor]]:
        for name, gradient in self._own.items():
            yield Key("gradient", name), gradient
        for key, tensor in super().tensors(is_drained=is_drained):
            if key.what != "gradient":
                yield key, tensor
        for name, parameter in self._trained.items():
            for kind, state in self._updates.optimizer.state.get(parameter, {}).items():
                if is_of_elements(state, parameter):
                    yield Key("state", f"{name} {kind}"), state.detach()

    def previous(self, key: Key) -> torch.Tensor | None:
        return self._own_before.get(key.name) if key.what == "gradient" else super().previous(key)


@torch.no_grad()
def clip(gradients: Tensors, clip_norm: float) -> None:
    """Scale gradients to this norm over all of them, where theirs is larger; in place. 0 clips nothing."""
    if clip_norm and gradients:
        norm = torch.stack([one.norm() for one in gradients.values()]).norm()
        for one in gradients.values():
            one.mul_((clip_norm / (norm + 1e-6)).clamp(max=1.0))  # as torch.nn.utils.clip_grad_norm_


class OwnBuffers:
    """The buffers of one model, as each of several workers has them."""

    def __init__(self, model: nn.Module, num_workers: int) -> None:
        self._model, self._used = model, 0
        self._of = [{name: one.clone() for name, one in model.named_buffers()} for _ in range(num_workers)]

    @torch.no_grad()
    def use(self, worker: int) -> None:
        """Put a worker's buffers into the model, and keep those of the worker before."""
        if worker == self._used:
            return
        for name, buffer in self._model.named_buffers():
            self._of[self._used][name].copy_(buffer)
            buffer.copy_(self._of[worker][name])
        self._used = worker


def is_of_elements(state: object, parameter: torch.Tensor) -> bool:
    """An optimizer's state has a value for every element of its parameter, which is no single one."""
    return isinstance(state, torch.Tensor) and parameter.dim() > 0 and state.shape == parameter.shape
