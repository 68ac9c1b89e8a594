"""The rule of every torch function that accepts images split by rows, in one table (see README.md).

Refused because silently wrong: unknown in-place functions, functions whose random numbers must agree on all ranks, and
BatchNorm outside its module.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from weft.errors import ModelError
from weft.parallel.spatial import conv_pool, norms, reductions, shapes
from weft.parallel.spatial.join import JOIN, elementwise, join_first, marked
from weft.parallel.spatial.row_tensor import Function, RowTensor, Rule, mark, rows_of
from weft.parallel.state.rng import mix
from weft.parallel.tracing import torch_functions as kinds
from weft.plan.model_refusals import CHANNELS_DROPPED_BY_ROWS

OWNERS: tuple[type | ModuleType, ...] = (torch, torch.Tensor, F, torch._C._nn, torch.special)
"""Namespaces in which functions of one name are found."""

OPERATORS = """
__add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __mul__ __rmul__ __imul__ __truediv__ __rtruediv__ __itruediv__
__div__ __rdiv__ __idiv__ __floordiv__ __rfloordiv__ __mod__ __rmod__ __pow__ __rpow__ __ipow__ __neg__ __pos__
__abs__ __invert__ __and__ __or__ __xor__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__
copy_ fill_ zero_ expit log_sigmoid
""".split()
"""Further functions that work entry by entry."""

BESIDE = """
stride storage_offset untyped_storage storage register_post_accumulate_grad_hook record_stream is_shared is_pinned
__dir__ new_zeros new_ones new_empty new_full new_tensor new_empty_strided
""".split()
"""Further functions that do not read a tensor's entries."""


def apply_rule(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function some of whose arguments are split by rows."""
    rule = rule_for(func)
    if rule not in HARMLESS and _is_backward_of_function():
        name = getattr(func, "__name__", func)
        raise ModelError(
            f"a torch.autograd.Function of the model uses an image in its backward pass ({name}) of which it has some "
            "rows only, together with gradients of these rows, which [axes] ring cannot follow; write it with torch's "
            "own functions, or use ring = 1"
        )
    result = rule(func, *args, **kwargs)
    return join_first(func, args, kwargs) if result is JOIN else result


def _is_backward_of_function() -> bool:
    """True if this is a backward pass and not recomputation, which runs with gradients or saved-tensor hooks on."""
    return (
        torch._C._current_graph_task_id() != -1
        and not torch.is_grad_enabled()
        and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    )


@functools.cache
def rule_for(func: Function) -> Rule:
    if getattr(func, "__name__", "") in ("__get__", "__set__", "__delete__"):
        return _property_rule(func)
    return _table().get(func, _join)


def _rules() -> Iterator[tuple[Iterable[str], Rule]]:
    yield (*kinds.POINTWISE, *kinds.BROADCAST, *OPERATORS), elementwise
    yield (*kinds.CASTS, "detach_", "requires_grad_", "alias"), cast
    yield (*kinds.METADATA, *BESIDE), ask
    yield ("size", "numel", "nelement", "__len__"), ask_whole
    yield ("local_response_norm", "prelu"), channelwise
    yield kinds.CHANNEL_DROPOUTS, channel_dropout
    yield (*kinds.REDUCTIONS, *kinds.ALONG_DIM), reductions.along(1)
    yield ("normalize",), reductions.along(2, 1)
    yield ("glu",), reductions.along(1, -1)
    yield ("sum", "mean"), reductions.total
    yield ("adaptive_avg_pool2d",), reductions.global_pool
    yield ("layer_norm", "rms_norm"), reductions.last_norm
    yield ("linear",), functools.partial(reductions.on_last_dims, 1)
    yield ("matmul", "__matmul__"), reductions.matmul
    yield "permute transpose swapaxes swapdims movedim moveaxis unsqueeze select unbind".split(), shapes.view
    yield ("chunk", "split", "__getitem__"), shapes.view
    yield ("view", "reshape", "flatten", "unflatten", "view_as", "reshape_as"), shapes.reshape
    yield ("expand", "expand_as", "broadcast_to"), shapes.expand
    yield ("cat", "concat", "concatenate"), shapes.cat
    windows: list[Rule] = [conv_pool.conv2d, conv_pool.max_pool2d, conv_pool.avg_pool2d, conv_pool.pad]
    others: list[Rule] = [norms.group_norm, norms.instance_norm, shapes.squeeze, shapes.stack]
    yield from (((rule.__name__,), rule) for rule in (*windows, *others, dropout, batch_norm))


@functools.cache
def _table() -> dict[Function, Rule]:
    """Rules of every form of a function: of torch, of tensors, of torch.nn.functional, and in place."""
    names = ((form, rule) for names, rule in _rules() for name in names for form in (name, f"{name}_"))
    found = ((getattr(owner, form, None), rule) for form, rule in names for owner in OWNERS)
    table = {function: rule for function, rule in found if callable(function)}
    # A recomputed block is given gradients of this rank's rows and asks for gradients of rows.
    return {**table, torch.autograd.backward: ask, torch.autograd.grad: ask, torch.Tensor.backward: ask}


def cast(func: Function, *args: Any, **kwargs: Any) -> Any:
    made = func(*args, **kwargs)
    rows = rows_of(args[0])
    return made if rows is None else marked(made, rows)


def channelwise(func: Function, *args: Any, **kwargs: Any) -> Any:
    """A function along dim 1."""
    rows = rows_of(args[0])
    return JOIN if rows is None or rows.dim <= 1 else marked(func(*args, **kwargs), rows)


def ask(func: Function, *args: Any, **kwargs: Any) -> Any:
    return func(*args, **kwargs)


def ask_whole(func: Function, x: RowTensor, *args: Any, **kwargs: Any) -> Any:
    whole = torch.empty(x.weft_rows.whole_shape(x.shape), dtype=x.dtype, device="meta")
    return func(whole, *args, **kwargs)


HARMLESS: tuple[Rule, ...] = (ask, ask_whole, cast)
"""Rules that are right in any context."""


def _property_rule(func: Function) -> Rule:
    name = func.__self__.__name__  # type: ignore[attr-defined]
    is_read = func.__name__ == "__get__"
    if name == "shape":
        return ask_whole
    if name == "data" and is_read:
        return cast
    if name in ("T", "mT", "H", "mH", "real", "imag", "data"):
        return _join if is_read else _refuse_data
    return ask


def _join(func: Function, *args: Any, **kwargs: Any) -> Any:
    return JOIN


def _refuse_data(func: Function, *args: Any, **kwargs: Any) -> Any:
    raise ModelError("the model sets .data of an image that is split by rows over [axes] ring; make a new tensor")


def dropout(
    func: Function, input: RowTensor, p: float = 0.5, training: bool = True, inplace: bool = False, train: bool = True
) -> Any:
    if not (training and train) or p == 0.0:
        return input
    # One number from the common stream, whatever the rows, so that all ranks' streams stay equal.
    seed = _draw_seed(input.device)
    own = torch.Generator(input.device).manual_seed(mix(seed, input.weft_rows.group.index))
    kept = torch.empty_like(input).bernoulli_(1 - p, generator=own)
    kept = kept.div_(1 - p) if p < 1 else kept
    overwrites = inplace or func.__name__.endswith("_")
    return input.mul_(kept) if overwrites else mark(input * kept, input.weft_rows)


def _draw_seed(device: torch.device) -> int:
    """A number from the common stream; on a GPU from the state of its generator, which the host need not wait for."""
    if device.type != "cuda":
        return int(torch.randint(2**62, (), device=device))
    common = torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    seed = zlib.crc32(common.get_state().numpy().tobytes())
    torch.rand((), device=device)  # the stream goes on
    return seed


def channel_dropout(func: Function, *args: Any, **kwargs: Any) -> Any:
    is_training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
    if is_training:
        raise ModelError(CHANNELS_DROPPED_BY_ROWS.message(function=func.__name__))
    return args[0]


def batch_norm(func: Function, *args: Any, **kwargs: Any) -> Any:
    is_training = kwargs.get("training", args[5] if len(args) > 5 else False)
    if is_training:
        raise ModelError(
            "F.batch_norm takes its statistics from the rows of one rank where [axes] ring splits images; use "
            "nn.BatchNorm2d, whose statistics weft takes over all ranks"
        )
    return channelwise(func, *args, **kwargs)


_table()  # at once, from torch's own functions: while a pass runs, some of them are replaced
