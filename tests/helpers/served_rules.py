"""What servers and workers with codecs must compute, by one process: the rules of `verification/compression`, which
share no code with codecs, on every worker's own gradient, part by part as servers hold them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from served_workers import add_noise, batch_of, first_weights, gradients_of
from torch import Tensor

from weft.plan.exchange.warm_up import is_dense
from weft.plan.plan import Codec
from weft.server.protocol.layout import ServerLayout
from weft.server.protocol.settings import Settings
from weft.verification.compression.rules import Part, Rule, make_rule

Key = tuple[int, int]
"""A server, and one of its parts."""


class Bfloat16(Rule):
    """What "half" sends."""

    def compress(self, step: int, given: Sequence[Tensor]) -> Tensor:
        return given[0].bfloat16().to(given[0])


class WorkerRules:
    """The rules of one worker, whose random numbers are drawn from its number."""

    def __init__(self, settings: Settings, worker: int) -> None:
        self.layouts = [ServerLayout.of(settings, server) for server in range(settings.num_servers)]
        self.rules: dict[Key, Rule] = {}
        for layout in self.layouts:
            for number, part in enumerate(layout.parts):
                if settings.tensors[part.tensor].is_coded:
                    self.rules[layout.server, number] = rule_of(settings, layout, number, worker)

    def send(self, step: int, gradients: dict[str, Tensor]) -> dict[Key, Tensor]:
        """What servers get of gradients that are sums over targets."""
        found = {}
        for layout in self.layouts:
            for number, part in enumerate(layout.parts):
                key, name = (layout.server, number), layout.settings.tensors[part.tensor].name
                given = gradients[name].flatten()[part.start : part.stop]
                found[key] = self.rules[key].exchange(step, [given]) if key in self.rules else given
        return found


def rule_of(settings: Settings, layout: ServerLayout, number: int, worker: int) -> Rule:
    """The rule of a part."""
    codec, part = settings.compression, layout.parts[number]
    tensor, group = settings.tensors[part.tensor], settings.optimizer["groups"][0]["settings"]
    is_whole = part.numel == tensor.numel
    given = Part(
        name=tensor.name if is_whole else f"{tensor.name}[{part.start}:{part.stop}]",
        num_columns=tensor.row_numel,
        momentum=group.get("momentum", 0.0),
        is_nesterov=group.get("nesterov", False),
        first_replica=worker,
    )
    return Bfloat16(codec, given, 1) if codec.name == "half" else make_rule(codec, given, 1)


class OneProcess:
    """Weights that are updated with what the workers' rules send."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.weights = {name: torch.nn.Parameter(one) for name, one in first_weights().items()}
        kind = getattr(torch.optim, settings.optimizer["class"].rpartition(".")[2])
        self.group = settings.optimizer["groups"][0]["settings"]
        self.optimizer = kind(list(self.weights.values()), **self.group)
        self.rules = {number: WorkerRules(settings, number) for number in range(settings.num_workers)}

    def step(self, clock: int, chosen: Sequence[int], size: Callable[[int, int], int]) -> None:
        """An update of the gradients of these workers, with batches of `size(worker, clock)`."""
        counts = {worker: size(worker, clock) for worker in chosen}
        total: dict[Key, Tensor] = {}
        now = {name: one.detach() for name, one in self.weights.items()}
        for worker, count in counts.items():
            if count:  # a worker without targets sends nothing, and keeps what it has
                gradients, _ = gradients_of(now, batch_of(worker, clock, count))
                add_noise(worker, clock, gradients)
                for key, sent in self.rules[worker].send(clock, gradients).items():
                    total[key] = total[key] + sent if key in total else sent
        self._update(clock, total, sum(counts.values()))

    def _update(self, clock: int, total: dict[Key, Tensor], count: int) -> None:
        codec, past = self.settings.compression, dict[str, Tensor]()
        rules = next(iter(self.rules.values()))
        for parameter in self.weights.values():
            parameter.grad = torch.zeros_like(parameter)
        for layout in rules.layouts:
            for number, part in enumerate(layout.parts):
                key, name = (layout.server, number), layout.settings.tensors[part.tensor].name
                is_coded, sent = key in rules.rules, total[key]
                if is_coded and codec.name == "sign" and not is_dense(codec, clock):
                    mean = torch.where(sent >= 0, 1.0, -1.0).to(sent)
                else:
                    mean = sent / count
                parameter = self.weights[name]
                assert parameter.grad is not None
                target = parameter.grad
                if is_coded and codec.name == "dgc":  # has momentum already
                    target = past.setdefault(name, torch.zeros_like(parameter))
                target.view(-1)[part.start : part.stop] = mean
        self._clip()
        self.optimizer.step()
        for name, gradient in past.items():
            self.weights[name].data -= self.group["lr"] * gradient

    def _clip(self) -> None:
        if self.settings.clip_norm:
            torch.nn.utils.clip_grad_norm_(list(self.weights.values()), self.settings.clip_norm)

    def found(self) -> dict[str, Tensor]:
        return {name: one.detach() for name, one in self.weights.items()}


def some_codec(name: str, **changes: object) -> Codec:
    """With settings that matter for tensors of some 100 elements."""
    given: dict[str, object] = dict(name=name)
    if name != "half":
        given |= dict(dense_below=1)
    given |= {
        "topk": dict(density=0.1),
        "dgc": dict(density=0.1),
        "powersgd": dict(rank=2),
        "qsgd": dict(levels=16),
    }.get(name, {})
    return Codec(**{**given, **changes})  # type: ignore[arg-type]
