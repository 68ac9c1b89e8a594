"""The probe: before the first step, a split copy must give the outputs and gradients of the whole model.

Splitting a model relies on how its code is written: that a block treats every token by itself, that masks and positions
are arguments with known names, that a parameter is used where its name says. So an example passes forward and backward
through the whole model, and through a split copy of it; a difference beyond rounding is refused.

The probe runs in evaluation mode, because dropout would differ; it does not cover code that only runs in training. The
pass itself is in `probe_pass.py`.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch
from torch import nn

from weft.comm.broadcast_many import copy_from_first, float64_of_first
from weft.comm.collectives import all_reduce
from weft.comm.objects import gather_values, value_of_first
from weft.comm.shared_gradients import SharedGradientExchange
from weft.errors import ModelError, WeftError
from weft.mesh import Mesh
from weft.parallel.state.materialise import fill_alone, is_on_meta, model_tensors
from weft.parallel.tensor.shares import local_part
from weft.parallel.tensor.tensor_parallel import TensorParallel
from weft.training.data.sample_split import SampleSplit
from weft.training.data.trees import forward, map_tensors, num_samples, split_tree
from weft.training.setup.probe_pass import (
    GRADIENT,
    ROUNDING,
    SMALL,
    CannotCopyError,
    Trial,
    run_pass,
    try_whole,
    widened,
)
from weft.training.step.divergence import require_same_batch
from weft.training.step.parallel_model import ParallelModel

log = logging.getLogger("weft")

_MOST_SAMPLES = 2
"""Samples of the example that are used: enough to tell samples from tokens."""
_MOST_TOKENS, _MOST_TOKENS_EACH = 1024, 256
"""Tokens of the example that are used, in all and per rank: whole sequences may be longer than a rank can hold."""
_MOST_FILLED_BYTES = 256 * 2**20
"""Largest model on the meta device that is probed, because every rank fills a copy of the whole."""
_CPU = torch.device("cpu")


def probe_split(parts: ParallelModel) -> None:
    """Refuse a model that a split changes; collective. Rank 0 warns if the probe cannot run."""
    model, mesh, example, sample_split = parts.model, parts.mesh, parts.example, parts.sample_split
    if mesh.world.is_fake:
        return
    if example is None:
        _say_untried(mesh, "there is no example; give parallelize(..., example=inputs)")
        return
    if is_on_meta(model):
        filled = _filled_copy(model, mesh)
        if filled is None:
            return
        model = filled
    require_same_batch(mesh, example, (), what="example")
    few = split_tree(example, 0, min(num_samples(example), _MOST_SAMPLES))
    if sample_split is not None:
        few = sample_split.shorten(few, min(_MOST_TOKENS_EACH * mesh.sequence_size, _MOST_TOKENS))
        if few is None:
            _say_untried(mesh, "the example has too few tokens, or no samples")
            return
    trial, told = _try_on_first(model, few, mesh)
    if told.get("cannot_copy"):
        _say_untried(mesh, f"the model cannot be copied ({told['cannot_copy']})")
        return
    if not told["has_answer"]:
        if sample_split is not None:
            raise ModelError(
                f"the output of the model holds no tensor that learns, so whether it may be split over {_axes(mesh)} "
                "cannot be tried; return tensors, or a tuple, dict or dataclass of them"
            )
        return  # no loss of its output has gradients
    whole, is_wide = {} if trial is None else trial.found, told["is_wide"]
    copied = _cut_copy(model, model if trial is None else trial.model, parts, is_wide=is_wide)
    del trial
    tensor = TensorParallel(copied, mesh, parts.blueprint, parts.regions)
    tensor.install(keep_output=False)
    tensor.split_tokens(None)
    if parts.make_sample_split is not None:
        sample_split = parts.make_sample_split(tensor.model)
        sample_split.prepare(tensor.model)
    try:
        split = _pass_split(tensor, widened(few) if is_wide else few, mesh, sample_split)
    except WeftError:
        raise
    except Exception as error:  # others may wait for this rank, as they would in a step
        raise ModelError(
            f"split over {_axes(mesh)}, the model fails on the example ({type(error).__name__}: {error}){_advice(mesh)}"
        ) from error
    _compare(whole, split, tensor, mesh, sample_split, narrowed=told["casts"])


def _try_on_first(model: nn.Module, few: Any, mesh: Mesh) -> tuple[Trial | None, dict[str, Any]]:
    """The trial of the whole model on rank 0, and on every rank what it found; an error there is raised on all."""
    trial: Trial | None = None

    def try_here() -> dict[str, Any]:
        nonlocal trial
        try:
            trial = try_whole(model, few, mesh.world.device)
        except CannotCopyError as error:
            return {"cannot_copy": str(error)}
        except WeftError as error:
            return {"problem": "; ".join(error.problems)}
        except Exception as error:
            return {"problem": f"the model fails on the example ({type(error).__name__}: {error}){_advice(mesh)}"}
        return {"has_answer": bool(trial.found), "is_wide": trial.is_wide, "casts": trial.casts}

    told = value_of_first(try_here, mesh.everyone("control"))
    if "problem" in told:
        raise ModelError(told["problem"])
    return trial, told


def _pass_split(
    tensor: TensorParallel, inputs: Any, mesh: Mesh, sample_split: SampleSplit | None
) -> dict[str, torch.Tensor]:
    """Outputs and gradients of a split model; gradients are summed over the ranks that share samples or parameters."""
    found = _pass_parts(tensor.model, inputs, mesh, sample_split)
    shared = SharedGradientExchange(
        tensor.shared_gradients(sums_may_differ=False), bucket_bytes=mesh.plan.comm.bucket_bytes
    )
    named = dict(tensor.model.named_parameters())
    # A rank that did not use a parameter must not keep the others waiting.
    shared.run({name: found.get(GRADIENT + name, torch.zeros_like(named[name])) for name in shared.names})
    return found


def _pass_parts(model: nn.Module, inputs: Any, mesh: Mesh, sample_split: SampleSplit | None) -> dict[str, torch.Tensor]:
    """The same, before gradients are summed over the tensor axis."""
    device = mesh.world.device
    if sample_split is None:
        return run_pass(model, map_tensors(lambda leaf: leaf.to(device), inputs))
    cut = map_tensors(lambda leaf: leaf.to(device), sample_split.cut_inputs(inputs))
    with sample_split.replacements:
        sample_split.enter(cut)
        call = sample_split.around(lambda given: forward(model, given))
        found = run_pass(model, cut, call=call, part=sample_split.part_of_output)
    for what, tensor in found.items():
        if what.startswith(GRADIENT):
            summed = tensor.cpu().contiguous()
            all_reduce(summed, mesh.group("ring+ulysses", "control"))
            found[what] = summed.to(device)
    return found


def _filled_copy(model: nn.Module, mesh: Mesh) -> nn.Module | None:
    """A copy, with values, of a model on the meta device; None, after a warning, if there can be none; collective."""
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    if num_bytes > _MOST_FILLED_BYTES:
        _say_untried(
            mesh,
            f"it is on the meta device, and its {num_bytes / 2**20:.0f} MiB are more than the "
            f"{_MOST_FILLED_BYTES // 2**20} that each rank would fill for it",
        )
        return None
    problem: str | None = None
    copied: nn.Module | None = None
    try:
        copied = copy.deepcopy(model)
        fill_alone(copied, 0, _CPU)
    except Exception as error:  # not raised: weights without first values may yet be read from a file
        problem = "; ".join(error.problems) if isinstance(error, WeftError) else f"{type(error).__name__}: {error}"
    problems = gather_values(problem, mesh.everyone("control"))
    problem = next((one for one in problems if one is not None), None)
    if problem is not None:
        _say_untried(mesh, f"a copy of it cannot be filled ({problem})")
        return None
    return copied


def _say_untried(mesh: Mesh, why: str) -> None:
    if mesh.world.rank == 0:
        log.warning(
            "whether the model, split over %s, computes what the whole one does was not tried: %s; run weft verify "
            "on a small model of its kind",
            _axes(mesh),
            why,
        )


def _cut_copy(model: nn.Module, tried: nn.Module, parts: ParallelModel, *, is_wide: bool) -> nn.Module:
    """A copy of rank 0's copy, with this rank's shares, made without a second whole copy in memory."""
    mesh, tensors = parts.mesh, dict(model_tensors(tried))
    cutting = TensorParallel(model, mesh, parts.blueprint, parts.regions)
    memo: dict[int, Any] = {}
    for name, tensor in model_tensors(model):
        # The trial changed nothing but weights on purpose, and a pass may leave buffers of another dtype or shape.
        before = tensors[name] if isinstance(tensor, nn.Parameter) else tensor
        there = widened(before.detach().to(mesh.world.device, copy=True), is_wide)
        copy_from_first([there], mesh.axis_groups)
        share = cutting.cut_one(name, there)
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(share, requires_grad=tensor.requires_grad) if is_parameter else share
    return copy.deepcopy(model, memo)


def _axes(mesh: Mesh) -> str:
    sizes = {axis: mesh.size(axis) for axis in ("ring", "ulysses", "tensor")}
    return "[axes] " + ", ".join(f"{axis} = {size}" for axis, size in sizes.items() if size > 1)


def _advice(mesh: Mesh) -> str:
    if mesh.sequence_size > 1:
        return (
            "; each rank has some tokens of a sequence, so attention must be F.scaled_dot_product_attention or Hugging "
            "Face's, positions an argument of the model or declared in weft_blueprint() (Positions), and nothing else "
            "may look at several tokens; else set [axes] ring and ulysses to 1"
        )
    either = "set [tensor] sequence = false, or " if mesh.plan.tensor.sequence else ""
    return f"; {either}declare regions in weft_blueprint() that leave the layers concerned whole"


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


@torch.no_grad()
def _compare(
    whole: dict[str, torch.Tensor],
    split: dict[str, torch.Tensor],
    tensor: TensorParallel,
    mesh: Mesh,
    sample_split: SampleSplit | None,
    *,
    narrowed: bool,
) -> None:
    """Refuse differences beyond rounding; `narrowed`: the model computes in fewer bits than its output has."""
    everyone, device = mesh.everyone("control"), mesh.world.device
    listed = gather_values([[what, list(t.shape)] for what, t in whole.items()], everyone)[0]
    measured = torch.zeros(len(listed), 2, dtype=torch.float64)
    first = float64_of_first(list(whole.values()), [shape for _, shape in listed], everyone)
    for number, ((what, shape), sent) in enumerate(zip(listed, first, strict=True)):
        true = sent.to(device)
        if what.startswith(GRADIENT):
            layout = tensor.shares.layout(what.removeprefix(GRADIENT), shape)
            expected = local_part(true, layout, mesh.grid, mesh.world.rank)
            mine = split.get(what, torch.zeros_like(expected))
        else:
            mine = split.get(what, torch.zeros_like(true))
            expected = true if sample_split is None else sample_split.part_of_whole(true)
        measured[number, 1] = _largest(true)
        if mesh.data_rank == 0:  # others may have been given another example
            is_alike = mine.shape == expected.shape
            measured[number, 0] = _largest(mine.double() - expected) if is_alike else float("inf")
    measured = torch.nan_to_num(measured, nan=float("inf"), posinf=float("inf"))
    all_reduce(measured, everyone, op="max")
    dtype = torch.bfloat16 if narrowed else next(iter(split.values())).dtype
    allowed = ROUNDING.get(dtype, ROUNDING[torch.float32])
    rows = [(what, off, size) for (what, _), (off, size) in zip(listed, measured.tolist(), strict=True)]
    largest = max((size for what, _, size in rows if what.startswith(GRADIENT)), default=0.0)
    problems = [
        f"{what} is not finite in the whole model, so it cannot be compared; give an example for which it is"
        for what, _, size in rows
        if size == float("inf")
    ]
    if problems:
        raise ModelError(problems[:8])
    problems = [
        f"{what} is off by {off:.1e}, with {size:.1e} its largest entry"
        for what, off, size in rows
        if off > allowed * max(size, SMALL * largest)
    ]
    if problems:
        raise ModelError(
            [
                f"split over {_axes(mesh)}, the model computes something else than the whole one, as a pass of the "
                f"example shows{_advice(mesh)}",
                *problems[:8],
            ]
        )
