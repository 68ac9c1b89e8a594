"""One process that plays all replicas of a plan that compresses gradients: W gradients, their exchange, one update.

Every replica's gradient is computed by itself, from its data ranks' parts of the batch in the plan's microbatches (all
at once where a rank needs those of others: `compression/lockstep.py`), and cut as the plan cuts it. Each part goes
through the rule of the plan's codec (`compression/rules.py`), all else is summed as it is:

    sums     replica k's gradient of the sum of its losses; replicas keep what they did not send in this unit
    clip     dgc: scaled to at most clip / sqrt(replicas), as a mean over the targets of the step before
    total    the exchange's sum / targets of the whole batch; for sign the vote, as it is
    update   the optimizer's. With dgc w := w - lr total, past its momentum, which it keeps of weight decay alone

Nothing here is shared with `sync/` and `codecs/`, so a mistake there cannot hide in its own answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from weft.parallel.state.batchnorm import has_batch_norms
from weft.plan.exchange.warm_up import is_dense
from weft.plan.plan import Plan
from weft.training.data.trees import num_samples
from weft.training.loss.loss import LossTerms
from weft.verification.compression.exchanges import CodedExchanges
from weft.verification.compression.lockstep import Lockstep, OthersNeededError, alone
from weft.verification.compression.parts import CodedPart, num_coded_replicas
from weft.verification.one_process import Key, OneProcess, Passes, Recipe, microbatch_rows

Gradients = dict[str, Tensor]
_WITHOUT_MEMORY = ("sign", "qsgd", "terngrad")


class CompressedReplicas(OneProcess):
    """A model trained with the compressed gradients of several replicas."""

    rule, is_exact = "one process that compresses for all replicas", False
    instead_of = "training without the codec in one process"

    def __init__(self, model: nn.Module, plan: Plan, recipe: Recipe, coded: Sequence[CodedPart]) -> None:
        super().__init__(model, plan, recipe)
        self._codec, self._num_replicas = plan.codec, num_coded_replicas(plan)
        groups = dict(zip(self._trained, self._updates.optimizer.param_groups, strict=True))
        momenta = {name: (one.get("momentum", 0.0), one.get("nesterov", False)) for name, one in groups.items()}
        self._exchanges = CodedExchanges(coded, plan.codec, self._num_replicas, momenta)
        couples = plan.data.buffers == "synchronise" and has_batch_norms(model)
        self._lockstep = Lockstep(model, plan.axes.data_ranks) if couples else None
        """Where what a rank computes depends on the samples of others."""
        self._given: list[Gradients] = []
        """Each replica's gradient of the sum of its losses in this step."""
        self._dense: Gradients = {}
        """Sums without a codec, for the diagnosis."""
        self._sent: Gradients = {}
        """dgc: what was received of compressed tensors in this step, zero elsewhere."""
        self._last_count = 0.0
        self._lasting: set[str] = set()
        """What some rank has used: something of it may be kept, and sent in a step that does not use it."""
        if self._codec.name == "dgc":
            self._updates.optimizer.register_step_post_hook(self._move_past_momentum)

    def _run(self, inputs: Any, targets: Any, passes: Passes) -> None:
        num_ranks, total = self._plan.axes.data_ranks, num_samples(inputs)
        rows = [microbatch_rows(self._plan, total, [rank], shares=self.shares) for rank in range(num_ranks)]
        if self._lockstep is None:
            try:
                with alone():
                    by_rank = [self._gradients_of(inputs, targets, one, passes) for one in rows]
            except OthersNeededError:  # found in the first loss of the run
                self._lockstep = Lockstep(self.model, num_ranks)
        if self._lockstep is not None:
            by_rank = self._gradients_together(self._lockstep, inputs, targets, rows, passes)
        each = num_ranks // self._num_replicas
        self._given = [_sum(by_rank[first : first + each]) for first in range(0, num_ranks, each)]
        totals = _sum(self._given)
        for name, parameter in self._trained.items():
            parameter.grad = totals.get(name)

    def _gradients_of(self, inputs: Any, targets: Any, rows: list[list[int]], passes: Passes) -> Gradients:
        """Of one data rank's part of the batch."""
        self._updates.optimizer.zero_grad(set_to_none=True)
        self._run_rows(inputs, targets, rows, passes)
        return _gradients(self.model)

    def _gradients_together(
        self, lockstep: Lockstep, inputs: Any, targets: Any, rows: list[list[list[int]]], passes: Passes
    ) -> list[Gradients]:
        """Of all data ranks, where one must look at what the others have."""
        for model in lockstep.models:
            model.zero_grad(set_to_none=True)
        for microbatch in zip(*rows, strict=True):
            parts = {rank: part for rank, part in enumerate(microbatch) if part}

            def run_one(rank: int, model: nn.Module, parts: dict[int, list[int]] = parts) -> tuple[Any, LossTerms]:
                return self._forward(model, inputs, targets, parts[rank])

            found = lockstep.run(run_one, list(parts))
            if parts:
                self._backward([(part, *one) for part, one in zip(parts.values(), found, strict=True)], passes)
        return [_gradients(model) for model in lockstep.models]

    @torch.no_grad()
    def _update(self) -> None:
        (count,) = self.num_targets
        if self._codec.clip:
            self._clip(unit=self._last_count or count)
        self._last_count = count
        self._dense = {name: p.grad.clone() for name, p in self._trained.items() if p.grad is not None}
        self._sent, step = {}, len(self.losses)
        is_vote = self._codec.name == "sign" and not is_dense(self._codec, step)
        for name, parameter in self._trained.items():
            if name not in self._exchanges.names:
                continue
            if parameter.grad is None:  # used by no rank in this step
                if name not in self._lasting:
                    continue
                parameter.grad = torch.zeros_like(parameter)
            if self._codec.name not in _WITHOUT_MEMORY:
                self._lasting.add(name)
            given = [one.get(name, torch.zeros_like(parameter)) for one in self._given]
            self._exchanges.replace_(name, parameter.grad, given, step, divisor=1.0 if is_vote else count)
            self._sent[name] = parameter.grad * self._exchanges.mask(name, parameter)
        if self._codec.name == "dgc":
            self._update_with_dgc()
        else:
            self._updates.step(step)

    def _clip(self, *, unit: float) -> None:
        """Scale each replica's gradient, and their sum anew; the 1e-6 is torch's."""
        for given in self._given:
            norm = math.sqrt(sum(float(one.square().sum()) for one in given.values())) / unit
            factor = min(1.0, self._codec.clip / math.sqrt(self._num_replicas) / (norm + 1e-6))
            for name in given:
                given[name] = given[name] * factor
        totals = _sum(self._given)
        for name, parameter in self._trained.items():
            if parameter.grad is not None:
                parameter.grad.copy_(totals[name] / self.num_targets[0])

    def _update_with_dgc(self) -> None:
        """The optimizer sees nothing of what was sent, so that its momentum is of weight decay, and of what is not
        compressed."""
        named = {name: parameter.grad for name, parameter in self._trained.items()}
        for name, sent in self._sent.items():
            whole = named[name]
            self._trained[name].grad = None if whole is None else whole - sent
        self._updates.step(len(self.losses))
        for name, gradient in named.items():
            self._trained[name].grad = gradient

    @torch.no_grad()
    def _move_past_momentum(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        del args, kwargs
        for (name, parameter), group in zip(self._trained.items(), optimizer.param_groups, strict=True):
            if name in self._sent:
                parameter.sub_(group["lr"] * self._sent[name])

    def at_exchange(self, key: Key) -> dict[str, Tensor]:
        """Of a gradient that is compressed, the sum that no codec has touched."""
        is_coded = key.what == "gradient" and key.name in self._exchanges.names and key.name in self._dense
        return {"dense": self._dense[key.name]} if is_coded else {}


def with_compression(plan: Plan, *, num_steps: int) -> tuple[Plan, list[str]]:
    """A plan whose compression has set in within so few steps, and a note if that is another plan."""
    warmup_steps = plan.codec.warmup_steps
    fewer = min(warmup_steps, 1 if num_steps > 2 else 0)
    if warmup_steps < num_steps - 1 or fewer == warmup_steps:
        return plan, []
    note = f"the codec's warm-up was cut from {warmup_steps} steps to {fewer}, to be over in {num_steps} steps"
    return replace(plan, codec=replace(plan.codec, warmup_steps=fewer)), [note]


def _gradients(model: nn.Module) -> Gradients:
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def _sum(given: Sequence[Gradients]) -> Gradients:
    """Of what there is of each."""
    names = dict.fromkeys(name for one in given for name in one)
    return {name: torch.stack([one[name] for one in given if name in one]).sum(dim=0) for name in names}
