"""All that is wrong with a model, a plan, a loss and an optimizer and can be seen before they meet, in one error.

`parallelize` asks here before it makes anything, and `weft train` before it starts a rank; each stage by itself would
stop at its own problems, and a user would mend them run by run.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn

from weft.errors import ModelError, PlanError, WeftError
from weft.models.balance_loss import balance_problems
from weft.parallel.state.batchnorm import has_batch_norms
from weft.parallel.state.fragments import fragment_problems
from weft.plan.check import check
from weft.plan.model_refusals import COMPILED_AS_A_WHOLE
from weft.plan.partition.one_worker import is_served
from weft.plan.plan import Plan
from weft.training.loss.loss import resolve_loss
from weft.training.setup.codec_problems import codec_problems
from weft.training.setup.probe_optimizer import class_name, takes_parts


def setup_problems(
    model: nn.Module | None,
    plan: Plan,
    *,
    loss: Any,
    optimizer: Any,
    num_ranks: int,
    device: torch.device,
    global_batch: int | None,
) -> list[WeftError]:
    """An error for each of model, optimizer, plan and loss that has problems; a part that is None is not known."""
    found: list[WeftError] = []
    named_model: Any = getattr(model, "_orig_mod", model)
    if model is not None and (problems := _model_problems(named_model)):
        found.append(ModelError(problems))
    factory = optimizer if callable(optimizer) else None
    if optimizer is not None and factory is None:
        found.append(ModelError(_not_a_factory(optimizer)))
    gets_parts = plan.data.shard != "nothing" or plan.axes.tensor > 1 or is_served(plan)
    problems = check(
        plan,
        num_ranks=num_ranks,
        optimizer=None if factory is None else class_name(factory, device),
        elementwise=takes_parts(factory, device) if gets_parts and factory is not None else None,
        global_batch=global_batch,
        local_batch_statistics=isinstance(named_model, nn.Module) and has_batch_norms(named_model),
    )
    if isinstance(named_model, nn.Module):
        problems += [*codec_problems(named_model, plan), *fragment_problems(named_model, plan)]
    if problems:
        found.append(PlanError(problems))
    try:
        known = resolve_loss(loss if loss is not None else "cross-entropy")
        if isinstance(named_model, nn.Module):
            problems = list(balance_problems(named_model, plan, own_loss=not known.counts_targets))
            found += [ModelError(problems)] if problems else []
    except ModelError as error:
        found.append(error)
    if model is not named_model and plan.axes.pipeline * plan.axes.tensor * plan.axes.sequence > 1:
        found.append(ModelError(COMPILED_AS_A_WHOLE.message()))
    return found


def raise_together(found: list[WeftError]) -> NoReturn:
    """Raise one error with the problems of all; of their kind, if they have one in common."""
    kinds = {type(error) for error in found}
    kind = kinds.pop() if len(kinds) == 1 else WeftError
    raise kind([problem for error in found for problem in error.problems])


def _model_problems(model: Any) -> list[str]:
    if not isinstance(model, nn.Module):
        made = " (a class: call it first)" if isinstance(model, type) else ""
        return [f"the model is {_a(type(model))}{made}; give an nn.Module"]
    problems = []
    if not any(parameter.requires_grad for parameter in model.parameters()):
        problems.append("the model has no parameter to train: every one is frozen; set requires_grad on some")
    problems += [
        f'embedding "{name}" makes sparse gradients, which weft does not exchange; build it with sparse=False'
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    ]
    return problems


def _a(kind: type) -> str:
    return f"{'an' if kind.__name__[0] in 'AEIOUaeiou' else 'a'} {kind.__name__}"


def _not_a_factory(optimizer: object) -> str:
    if not isinstance(optimizer, torch.optim.Optimizer):
        return (
            f"the optimizer is {_a(type(optimizer))}; give a function that makes one from parameters, such as "
            "functools.partial(torch.optim.AdamW, lr=3e-4)"
        )
    kind = type(optimizer)
    where = f"torch.optim.{kind.__name__}" if kind.__module__.startswith("torch.optim") else kind.__name__
    rate = optimizer.defaults.get("lr")
    lr = f", lr={rate:g}" if isinstance(rate, int | float) else ""
    return (
        f"the optimizer is {_a(kind)} that was already made, for the whole model's parameters, and weft makes one "
        f"for each rank's part of them; give what makes it: functools.partial({where}{lr})"
    )
