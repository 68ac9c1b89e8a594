"""One process that plays all replicas of a plan that compresses gradients: W gradients, their exchange, one update.

Every replica's gradient is computed by itself, from its data ranks' parts of the batch in the plan's microbatches, and
cut as the plan cuts it. Each part goes through the rule of the plan's codec (`rules.py`), all else is summed as it is:

    sums     replica k's gradient of the sum of its losses; replicas keep what they did not send in this unit
    clip     dgc: scaled to at most clip / sqrt(replicas), as a mean over the targets of the step before
    total    the exchange's sum / targets of the whole batch; for sign the vote, as it is
    update   the optimizer's. With dgc w := w - lr total, past its momentum, which it keeps of weight decay alone

Nothing here is shared with `sync/` and `codecs/`, so a mistake there cannot hide in its own answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from weft.plan.plan import Plan
from weft.training.data.trees import num_samples
from weft.verification.compression.exchanges import CodedExchanges
from weft.verification.compression.parts import CodedPart, num_coded_replicas
from weft.verification.one_process import Key, OneProcess, Passes, Recipe, microbatch_rows

Gradients = dict[str, Tensor]


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
        self._given: list[Gradients] = []
        """Each replica's gradient of the sum of its losses in this step."""
        self._dense: Gradients = {}
        """Sums without a codec, for the diagnosis."""
        self._sent: Gradients = {}
        """dgc: what was received of compressed tensors in this step, zero elsewhere."""
        self._last_count = 0.0
        if self._codec.name == "dgc":
            self._updates.optimizer.register_step_post_hook(self._move_past_momentum)

    def _run(self, inputs: Any, targets: Any, passes: Passes) -> None:
        self._given = []
        each = self._plan.axes.data_ranks // self._num_replicas
        for replica in range(self._num_replicas):
            self._updates.optimizer.zero_grad(set_to_none=True)
            for rank in range(replica * each, (replica + 1) * each):
                rows = microbatch_rows(self._plan, num_samples(inputs), [rank], shares=self.shares)
                self._run_rows(inputs, targets, rows, passes)
            self._given.append({name: p.grad for name, p in self._trained.items() if p.grad is not None})
        for name, parameter in self._trained.items():
            found = [one[name] for one in self._given if name in one]
            parameter.grad = torch.stack(found).sum(dim=0) if found else None

    @torch.no_grad()
    def _update(self) -> None:
        (count,) = self.num_targets
        if self._codec.clip:
            self._clip(unit=self._last_count or count)
        self._last_count = count
        self._dense = {name: p.grad.clone() for name, p in self._trained.items() if p.grad is not None}
        self._sent = {}
        for name, parameter in self._trained.items():
            if parameter.grad is None or name not in self._exchanges.names:  # used by no rank in this step, or dense
                continue
            given = [one.get(name, torch.zeros_like(parameter)) for one in self._given]
            divisor = 1.0 if self._codec.name == "sign" else count
            self._exchanges.replace_(name, parameter.grad, given, len(self.losses), divisor=divisor)
            self._sent[name] = parameter.grad * self._exchanges.mask(name, parameter)
        self._updates.step(len(self.losses)) if self._codec.name != "dgc" else self._update_with_dgc()

    def _clip(self, *, unit: float) -> None:
        """Scale each replica's gradient, and their sum anew; the 1e-6 is torch's."""
        for given in self._given:
            norm = math.sqrt(sum(float(one.square().sum()) for one in given.values())) / unit
            factor = min(1.0, self._codec.clip / math.sqrt(self._num_replicas) / (norm + 1e-6))
            for name in given:
                given[name] = given[name] * factor
        for name, parameter in self._trained.items():
            if parameter.grad is not None:
                found = [one[name] for one in self._given if name in one]
                parameter.grad.copy_(torch.stack(found).sum(dim=0) / self.num_targets[0])

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
        """Of a gradient, the sum that no codec has touched."""
        return {"dense": self._dense[key.name]} if key.what == "gradient" and key.name in self._dense else {}
