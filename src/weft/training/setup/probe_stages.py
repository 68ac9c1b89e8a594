"""The probe of a pipeline: before the first step, a cut model must give the outputs and gradients of the whole one.

A cut relies on how a model is written: that what a block makes reaches the loss through what it returns, and that its
backward pass is that of its graph. So the example passes through a copy of the whole model, and through copies cut for
every rank, all on the first rank and without a message (`parallel/pipeline/all_stages.py`); all ranks are told the
verdict. The copies have noise in their weights and compute in 32 bits (`probe_pass.py`). They are in training mode,
in which models recompute blocks; dropout draws alike in both.

It costs about two steps of one microbatch on one device. Where that would take long, less of the example is used, or
none, which is said.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from weft.comm.objects import value_of_first
from weft.dtypes import HALF_DTYPES
from weft.errors import ModelError, WeftError
from weft.mesh import Mesh
from weft.parallel.pipeline.all_stages import cut_copies, run_stages, run_whole
from weft.parallel.pipeline.cut_model import Outline, outline
from weft.parallel.state.materialise import fill_alone, is_on_meta
from weft.parallel.tracing.meta_copy import copy_with_hooks, freeze_batch_norms
from weft.parallel.wrapping.replacements import Replacements, exact_float32
from weft.plan.model_refusals import CUT_CHANGES_THE_MODEL, CUT_MODEL_FAILS
from weft.plan.plan import Plan, Precision
from weft.training.data.trees import forward, num_samples, output_tensors, split_tree, tensors_of
from weft.training.setup.probe_pass import ROUNDING, SMALL, add_noise, widened

log = logging.getLogger("weft")

_MOST_FILLED_BYTES = 256 * 2**20
"""Largest model on the meta device that is probed, because a copy of it is filled."""
_MOST_OPERATIONS = {"cpu": 2e11, "cuda": 2e14}
"""Floating-point operations of both passes: some seconds."""
_MOST_NAMED = 8

Tensors = dict[str, torch.Tensor]


class _UntriedError(Exception):
    """The probe cannot run; with the reason."""


def probe_stages(whole: Outline, mesh: Mesh, plan: Plan, example: Any, *, is_traced: bool) -> None:
    """Refuse a model that is changed by being cut as the plan says; collective.

    `example` has whole samples; `is_traced`: it is the one that the model was traced with.
    """
    if mesh.world.is_fake:
        return

    def find() -> dict[str, Any]:
        try:
            with warnings.catch_warnings(), torch.enable_grad():
                warnings.simplefilter("ignore")
                return {"problems": _problems(whole, plan, example, is_traced=is_traced)}
        except _UntriedError as error:
            return {"problems": [], "untried": str(error)}
        except (torch.OutOfMemoryError, MemoryError):
            return {"problems": [], "untried": "the memory does not suffice for a copy of it"}

    told = value_of_first(find, mesh.everyone("control"))
    if whole.device.type == "cuda":
        torch.cuda.empty_cache()  # what the copies had is not for torch alone: NCCL allocates too
    if told["problems"]:
        raise ModelError(told["problems"])
    if told.get("untried") and mesh.world.rank == 0:
        log.warning(
            "whether the model, cut over [axes] pipeline = %d, computes what the whole one does was not tried: %s; run "
            "weft verify on a small model of its kind",
            plan.axes.pipeline,
            told["untried"],
        )


def _problems(whole: Outline, plan: Plan, example: Any, *, is_traced: bool) -> list[str]:
    """How the cut model differs from the whole one."""
    few = _affordable(whole, example)
    for has_noise in (True, False):
        tried = _copied(whole, plan, few, has_noise=has_noise, is_same=is_traced and few is example)
        call = _caller(widened(few, _is_half(whole.model)))
        outputs: list[Tensors] = [{}, {}, {}]
        try:
            parts = cut_copies(tried, plan.pipeline.cuts, plan.axes.pipeline)
        except WeftError as error:
            return list(error.problems)
        try:
            expected = run_whole(tried, call, _mixed(outputs[0]))
        except Exception as error:
            if not has_noise:
                raise _UntriedError(f"it fails on the example ({type(error).__name__}: {error})") from error
            continue
        if all(bool(one.isfinite().all()) for one in expected.values()):
            break
    if not outputs[0]:
        return []  # no loss of its output has gradients
    if not all(bool(one.isfinite().all()) for one in (*expected.values(), *outputs[0].values())):
        raise _UntriedError("its outputs or gradients for the example are not finite")
    try:
        found = run_stages(parts, whole.device, plan.pipeline.schedule, call, _mixed(outputs[1]))
    except torch.OutOfMemoryError:
        raise
    except WeftError as error:
        return list(error.problems)
    except Exception as error:
        return [CUT_MODEL_FAILS.message(plan, error=f"{type(error).__name__}: {error}")]
    different = _different(expected | outputs[0], found | outputs[1])
    if different and _different(expected | outputs[0], run_whole(tried, call, _mixed(outputs[2])) | outputs[2]):
        raise _UntriedError("two passes of the whole model do not agree with each other")
    return [CUT_CHANGES_THE_MODEL.message(plan), *different[:_MOST_NAMED]] if different else []


def _affordable(whole: Outline, example: Any) -> Any:
    """As much of the example as may be computed."""
    model = whole.model
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    if is_on_meta(model) and num_bytes > _MOST_FILLED_BYTES:
        raise _UntriedError(
            f"it is on the meta device, and its {num_bytes / 2**20:.0f} MiB are more than the "
            f"{_MOST_FILLED_BYTES // 2**20} that would be filled for it"
        )
    if whole.device.type == "cuda" and 32 * num_parameters > torch.cuda.mem_get_info(whole.device)[0]:
        raise _UntriedError(f"{num_parameters:,} parameters in 32 bits, and what they compute, do not fit on one GPU")
    most = _MOST_OPERATIONS.get(whole.device.type, _MOST_OPERATIONS["cpu"])
    for few in (example, split_tree(example, 0, 1) if num_samples(example) > 1 else example):
        operations = 12 * num_parameters * max((leaf.numel() for leaf in tensors_of(few)), default=1)
        if operations <= most:
            return few
    raise _UntriedError(f"one sample takes about {operations:.0e} operations, and {most:.0e} are spent on it at most")


def _is_half(model: nn.Module) -> bool:
    return any(parameter.dtype in HALF_DTYPES for parameter in model.parameters())


def _copied(whole: Outline, plan: Plan, few: Any, *, has_noise: bool, is_same: bool) -> Outline:
    """A copy of a model to try, traced anew where it computes in another way than the model was traced in."""
    try:
        if is_on_meta(whole.model):
            copied = copy.deepcopy(whole.model)
            fill_alone(copied, 0, whole.device)
        else:
            copied = copy_with_hooks(whole.model, {}).to(whole.device)
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # weights without first values may yet be read from a file
        said = "; ".join(error.problems) if isinstance(error, WeftError) else f"{type(error).__name__}: {error}"
        raise _UntriedError(f"a copy of it cannot be made ({said})") from error
    if is_wide := _is_half(copied):
        copied.float()
    if has_noise:
        add_noise(copied)
    if not copied.training:
        copied.train()
        is_same = False
    freeze_batch_norms(copied)
    if is_same and not is_wide and plan.precision.compute == "model":
        return dataclasses.replace(whole, model=copied)
    exact = dataclasses.replace(plan, precision=Precision())
    try:
        return outline(copied, whole.blueprint, exact, widened(few, is_wide), call=forward, device=whole.device)
    except WeftError as error:
        raise _UntriedError("; ".join(error.problems)) from error


def _caller(inputs: Any) -> Callable[[nn.Module], Any]:
    def call(model: nn.Module) -> Any:
        with torch.enable_grad(), Replacements(*exact_float32()):
            return forward(model, inputs)

    return call


def _mixed(outputs: Tensors) -> Callable[[Any], torch.Tensor | None]:
    """A fixed weighted sum of a model's outputs, which are kept."""

    def mix(output: Any) -> torch.Tensor | None:
        # Entries that are masked out with -inf are not compared.
        learned = [leaf.masked_fill(~leaf.isfinite(), 0.0) for leaf in output_tensors(output) if leaf.requires_grad]
        drawn = torch.Generator().manual_seed(0)
        total: torch.Tensor | None = None
        for number, leaf in enumerate(learned):
            real = torch.view_as_real(leaf) if leaf.is_complex() else leaf
            outputs[f"output {number}"] = real.detach()
            part = (real * torch.randn(real.shape, generator=drawn).to(real.device, real.dtype)).sum()
            total = part if total is None else total + part
        return total

    return mix


@torch.no_grad()
def _different(expected: Tensors, found: Tensors) -> list[str]:
    """Differences beyond rounding."""
    gradients = [one for what, one in expected.items() if not what.startswith("output ")]
    largest = max((_largest(one) for one in gradients), default=0.0)
    problems = []
    for what in dict.fromkeys((*expected, *found)):
        true, mine = expected.get(what), found.get(what)
        size = 0.0 if true is None else _largest(true)
        some = true if mine is None else mine
        assert some is not None
        if true is not None and mine is not None:
            off = _largest(mine.double() - true.double()) if mine.shape == true.shape else float("inf")
        else:
            off = _largest(some)
        allowed = ROUNDING.get(some.dtype, ROUNDING[torch.float32])
        if not off <= allowed * max(size, SMALL * largest):
            name = what if what.startswith("output ") else f"the gradient of {what}"
            problems.append(f"{name} is off by {off:.1e}, with {size:.1e} its largest entry")
    return problems


def _largest(tensor: torch.Tensor) -> float:
    return float(torch.nan_to_num(tensor.abs().max(), nan=float("inf"))) if tensor.numel() else 0.0
