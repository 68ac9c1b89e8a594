"""What each torch function does with images that are split by rows, in one table.

    asked about      shapes are the whole image's; the rest (dtype, device, strides) is that of this rank's rows
    element by element, casts, other dims     each rank computes its rows
    windows          convolutions and pools fetch the rows they miss (`conv_pool.py`)
    sums             means, global pools and norms over rows add up what ranks have (`reductions.py`, `norms.py`)
    everything else  the map is made whole first, on every rank, and stays so: a function that is not known is never
                     run on a part

What would be silently wrong is refused: functions that overwrite their argument and are not known, functions whose
random numbers must be alike on all ranks, and BatchNorm outside of its module.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from weft.errors import ModelError
from weft.parallel.spatial import conv_pool as row_windows
from weft.parallel.spatial import norms as row_norms
from weft.parallel.spatial import reductions as row_sums
from weft.parallel.spatial import shapes as row_shapes
from weft.parallel.spatial.join import elementwise, join_first, marked
from weft.parallel.spatial.row_tensor import Function, RowTensor, Rule, mark, rows_of
from weft.parallel.state.rng import mix
from weft.plan.model_refusals import CHANNELS_DROPPED_BY_ROWS

OWNERS: tuple[type | ModuleType, ...] = (torch, torch.Tensor, F, torch._C._nn, torch.special)
"""Where functions of one name are found."""

ELEMENTWISE = """
abs absolute neg negative positive sign sgn square sqrt rsqrt reciprocal exp exp2 expm1 log log2 log10 log1p
sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh sigmoid logit expit erf erfc erfinv lgamma digamma
floor ceil round trunc frac sinc nan_to_num isnan isinf isfinite isposinf isneginf logical_not bitwise_not
relu relu6 leaky_relu elu selu celu gelu silu mish softplus softsign softshrink hardshrink tanhshrink threshold
hardtanh hardswish hardsigmoid logsigmoid log_sigmoid clamp clip clamp_min clamp_max
add sub subtract rsub mul multiply div divide true_divide floor_divide remainder fmod pow float_power xlogy
maximum minimum fmax fmin atan2 arctan2 hypot copysign heaviside lerp addcmul addcdiv where masked_fill
eq ne lt le gt ge not_equal less less_equal greater greater_equal logical_and logical_or logical_xor
bitwise_and bitwise_or bitwise_xor
__add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __mul__ __rmul__ __imul__ __truediv__ __rtruediv__ __itruediv__
__div__ __rdiv__ __idiv__ __floordiv__ __rfloordiv__ __mod__ __rmod__ __pow__ __rpow__ __ipow__ __neg__ __pos__
__abs__ __invert__ __and__ __or__ __xor__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__
copy_ fill_ zero_
""".split()
"""Functions of one or more tensors that make each entry out of those at its own place, and their forms in place."""

CASTS = """
contiguous clone detach detach_ requires_grad_ to float double half bfloat16 int long bool byte type type_as cpu cuda
alias zeros_like ones_like full_like empty_like
""".split()
"""Functions of one tensor that keep its shape; others among their arguments say only how."""

CHANNELWISE = "local_response_norm prelu".split()
"""Functions along dim 1."""

METADATA = """
dim ndimension is_contiguous stride storage_offset element_size get_device data_ptr untyped_storage storage
is_floating_point is_complex is_signed register_hook register_post_accumulate_grad_hook retain_grad
record_stream is_shared is_pinned is_inference __hash__ __repr__ __format__ __dir__
new_zeros new_ones new_empty new_full new_tensor new_empty_strided result_type
""".split()
"""What is asked of a tensor, or made beside it, without a look at its entries."""

FEATURE_DROPOUTS = "dropout1d dropout2d dropout3d feature_dropout feature_alpha_dropout".split()


def apply_rule(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a function makes where some of its arguments are rows of images."""
    rule = rule_for(func)
    if rule not in HARMLESS and _is_backward_of_function():
        name = getattr(func, "__name__", func)
        raise ModelError(
            f"a torch.autograd.Function of the model uses an image in its backward pass ({name}) of which it has some "
            "rows only, together with gradients of these rows, which [axes] ring cannot follow; write it with torch's "
            "own functions, or use ring = 1"
        )
    return rule(func, args, kwargs)


def _is_backward_of_function() -> bool:
    """In the backward pass, and not because a block is computed again: that is done with gradients, or hooks, on."""
    return (
        torch._C._current_graph_task_id() != -1
        and not torch.is_grad_enabled()
        and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    )


@functools.cache
def rule_for(func: Function) -> Rule:
    """What is to be done where a function is given rows of an image."""
    if getattr(func, "__name__", "") in ("__get__", "__set__", "__delete__"):
        return _property_rule(func)
    return _table().get(func, join_first)


@functools.cache
def _table() -> dict[Function, Rule]:
    table: dict[Function, Rule] = {}
    for names, rule in (
        (ELEMENTWISE, elementwise),
        (CASTS, cast),
        (CHANNELWISE, channelwise),
        (METADATA, ask),
        (FEATURE_DROPOUTS, feature_dropout),
        (["size"], size),
        (["numel", "nelement"], numel),
        (["__len__"], length),
        (["dropout"], dropout),
        (["batch_norm"], batch_norm),
        *row_norms.RULES,
        *row_shapes.RULES,
        *row_sums.RULES,
        *row_windows.RULES,
    ):
        table.update((function, rule) for name in names for function in functions_named(name))
    # A recomputed block is given gradients of this rank's rows, and of these rows it asks for some.
    return {**table, torch.autograd.backward: ask, torch.autograd.grad: ask, torch.Tensor.backward: ask}


def functions_named(name: str) -> Iterator[Function]:
    """Every form of a function: of torch, of tensors, of torch.nn.functional, and in place."""
    for form in (name, f"{name}_"):
        for owner in OWNERS:
            found = getattr(owner, form, None)
            if callable(found):
                yield found


def cast(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    made = func(*args, **kwargs)
    rows = rows_of(args[0])
    return made if rows is None else marked(made, rows)


def channelwise(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rows = rows_of(args[0])
    if rows is None or rows.dim <= 1:
        return join_first(func, args, kwargs)
    return marked(func(*args, **kwargs), rows)


def ask(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


def size(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _meta(args[0]).size(*args[1:], **kwargs)


def shape(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Size:
    return _meta(args[0]).shape


def numel(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    return _meta(args[0]).numel()


def length(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    return len(_meta(args[0]))


HARMLESS: tuple[Rule, ...] = (ask, cast, size, shape, numel, length)
"""Rules of what may be asked at any time."""


def _meta(x: RowTensor) -> torch.Tensor:
    """A tensor of the whole shape, without memory."""
    return torch.empty(x.weft_rows.whole_shape(x.shape), dtype=x.dtype, device="meta")


def _property_rule(func: Function) -> Rule:
    name = func.__self__.__name__  # type: ignore[attr-defined]
    is_read = func.__name__ == "__get__"
    if name == "shape":
        return shape
    if name == "data" and is_read:
        return cast
    if name in ("T", "mT", "H", "mH", "real", "imag", "data"):
        return join_first if is_read else _refuse_data
    return ask


def _refuse_data(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise ModelError("the model sets .data of an image that is split by rows over [axes] ring; make a new tensor")


def dropout(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def run(input: RowTensor, p: float = 0.5, training: bool = True, inplace: bool = False, train: bool = True) -> Any:
        if not (training and train) or p == 0.0:
            return input
        # One number of the common stream, whatever the rows, so that all ranks go on alike.
        seed = int(torch.randint(2**62, (), device=input.device))
        own = torch.Generator(input.device).manual_seed(mix(seed, input.weft_rows.group.index))
        kept = torch.empty_like(input).bernoulli_(1 - p, generator=own)
        kept = kept.div_(1 - p) if p < 1 else kept
        overwrites = inplace or func.__name__.endswith("_")
        return input.mul_(kept) if overwrites else mark(input * kept, input.weft_rows)

    return run(*args, **kwargs)


def feature_dropout(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    is_training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
    if is_training:
        raise ModelError(CHANNELS_DROPPED_BY_ROWS.message(function=func.__name__))
    return args[0]


def batch_norm(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    is_training = kwargs.get("training", args[5] if len(args) > 5 else False)
    if is_training:
        raise ModelError(
            "F.batch_norm takes its statistics from the rows of one rank where [axes] ring splits images; use "
            "nn.BatchNorm2d, whose statistics weft takes over all ranks"
        )
    return channelwise(func, args, kwargs)
