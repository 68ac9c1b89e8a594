"""The effect of torch functions on features: which they keep apart, and which they mix.

`RULES` has a rule for every known function, by its name without underscores (`add_` and `__iadd__` are `add`). A rule
unifies and blocks digits of the operands and returns the layouts of the results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from weft.parallel.tensor.discovery import layer_rules as layers
from weft.parallel.tensor.discovery import shape_rules as shapes
from weft.parallel.tensor.discovery.features import Dim, cut, fresh, length, split_outer, whole
from weft.parallel.tensor.discovery.operation import Operation
from weft.parallel.tensor.discovery.shape_rules import Made
from weft.parallel.tensor.discovery.symbolic_sizes import plain
from weft.parallel.tracing import torch_functions as kinds

HARMLESS = frozenset(kinds.METADATA) | frozenset(
    "ndim dtype device requires_grad requires_grad_ is_meta is_cuda is_cpu is_sparse is_nested is_quantized is_leaf "
    "layout grad_fn grad itemsize _version names output_nr _backward_hooks get_default_dtype is_grad_enabled "
    "_set_grad_enabled is_autocast_enabled set_autocast_enabled get_autocast_dtype set_autocast_dtype "
    "is_autocast_cache_enabled set_autocast_cache_enabled autocast_increment_nesting autocast_decrement_nesting "
    "clear_autocast_cache is_tensor is_storage finfo iinfo can_cast promote_types manual_seed __deepcopy__ "
    "_is_zerotensor is_neg is_conj".split()
)
"""Functions that make no tensors and whose results are the same on all ranks."""

EXPANDING = frozenset({"expand", "expand_as", "broadcast_to", "repeat", "tile", "repeat_interleave"})
"""Functions of one tensor whose result has more features."""

VALUELESS = frozenset(
    "zeros_like ones_like full_like empty_like rand_like randn_like new_zeros new_ones new_full new_empty".split()
)
"""Functions that read a tensor's shape or device, but not its values."""

UNARY = frozenset((*kinds.POINTWISE, *kinds.CASTS)) | frozenset(
    "alpha_dropout angle bernoulli conj data deg2rad dropout exponential fill imag invert log_normal normal pin_memory "
    "rad2deg rand_like randn_like real resolve_conj rrelu short signbit uniform zero".split()
)
"""Functions that work entry by entry on the first operand alone."""

KEEPING = dict.fromkeys((*kinds.ALONG_DIM, "logcumsumexp", "sort", "argsort"), 1)
KEEPING |= {"roll": 2, "normalize": 2, "gumbel_softmax": 4}
"""Functions that mix entries along some dims and keep the shape, with the position of the argument that names them."""


def unary(op: Operation) -> Made:
    if op.tensor(0, "input") is None:
        return None
    return [op.first] if isinstance(op.result, torch.Tensor) else []


def broadcast(op: Operation) -> Made:
    return [op.broadcast(*(op.layout(tensor) for tensor in op.tensors()))]


def keeping(op: Operation) -> Made:
    place = KEEPING[op.name]
    name = "dims" if op.name in ("flip", "roll") else "dim"
    default = 1 if op.name == "normalize" else None if op.name == "roll" else -1
    given = op.get(place, name, default)
    if op.name == "flip" and isinstance(given, int):
        given = op.args[1:]
    for dim in op.dims(given):
        op.block(op.first[dim])
    return [op.first] * (2 if op.name == "sort" else 1)


def reducing(op: Operation) -> Made:
    if op.name in ("max", "min") and isinstance(op.get(1, "other"), torch.Tensor):
        return broadcast(op)
    given = op.get(2 if "norm" in op.name else 1, "dim", op.kwargs.get("axis"))
    if op.name in ("std", "var", "std_mean", "var_mean") and isinstance(given, bool):
        given = None
    gone = op.dims(given)
    for dim in gone:
        op.block(op.first[dim])
    results = op.result if isinstance(op.result, tuple) else (op.result,)
    is_kept = results[0].dim() == len(op.first)
    made = tuple(() if place in gone else dim for place, dim in enumerate(op.first) if is_kept or place not in gone)
    return [made] * len(results)


def einsum(op: Operation) -> Made:
    equation, *operands = op.args
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = list(operands[0])
    if not isinstance(equation, str) or "." in equation:
        return None
    given, arrow, wanted = equation.replace(" ", "").partition("->")
    terms = given.split(",")
    if not arrow:
        letters = "".join(terms)
        wanted = "".join(sorted(letter for letter in set(letters) if letters.count(letter) == 1))
    found: dict[str, Dim] = {}
    for term, operand in zip(terms, operands, strict=True):
        for letter, dim in zip(term, op.layout(operand), strict=True):
            if term.count(letter) > 1 or letter not in wanted:
                op.block(dim, "adds them up")
            if letter in found and length(found[letter]) == length(dim):
                op.unify(found[letter], dim)
            elif length(dim) > 1 or letter not in found:
                found[letter] = dim
    return [tuple(found[letter] for letter in wanted)]


def attention(op: Operation) -> Made:
    """Scaled dot-product attention: heads and samples are kept apart."""
    q, k, v = (op.operand(place) for place in range(3))
    if not len(q) == len(k) == len(v):
        return None
    if op.kwargs.get("enable_gqa") and length(q[-3]) != length(k[-3]):
        k, v = ((*x[:-3], (*x[-3], *fresh(length(q[-3]) // length(x[-3]))), *x[-2:]) for x in (k, v))
    for dim in (q[-1], k[-1], k[-2], v[-2]):
        op.block(dim, "adds them up")
    if op.get(5, "is_causal", False):
        op.block(q[-2])
    batch = op.broadcast(q[:-2], k[:-2], v[:-2])
    mask = op.tensor(3, "attn_mask")
    if mask is not None:
        op.broadcast((*batch, q[-2], k[-2]), op.layout(mask))
    return [(*batch, q[-2], v[-1])]


def last_norm(op: Operation) -> Made:
    """layer_norm and rms_norm: over the last dims."""
    count = len(op.get(1, "normalized_shape"))
    for dim in op.first[-count:]:
        op.block(dim)
    for tensor in (op.tensor(2, "weight"), op.tensor(3, "bias") if op.name == "layer_norm" else None):
        if tensor is not None:
            op.broadcast(op.first, op.layout(tensor))
    return [op.first]


def channel_norm(op: Operation) -> Made:
    """batch_norm, instance_norm and group_norm: per channel or group of channels."""
    blocked = [*op.first[2:], *(op.first[:1] if op.name == "batch_norm" else ())]
    if op.name == "group_norm":
        is_counted = type(op.tracer.record.modules[op.tracer.module]) is nn.GroupNorm  # its attribute is adapted
        halves = split_outer(op.first[1], op.get(1, "num_groups")) if is_counted else None
        blocked.append(op.first[1] if halves is None else halves[1])
    for dim in blocked:
        op.block(dim)
    for tensor in op.tensors()[1:]:
        op.unify(op.first[1], op.layout(tensor)[0])
    return [op.first]


def pooling(op: Operation) -> Made:
    """Functions that mix pixels along the last dims, as many as the name says."""
    count = next((int(letter) for letter in op.name if letter.isdigit()), len(op.first) - 2)
    results = op.result if isinstance(op.result, tuple) else (op.result,)
    kept = op.first[: len(op.first) - count]
    for dim in op.first[len(kept) :]:
        op.block(dim, "mixes neighbours")
    return [(*kept, *(whole(size, op.why("made them")) for size in made.shape[len(kept) :])) for made in results]


def channel_dropout(op: Operation) -> Made:
    """Whole channels are dropped or kept."""
    for dim in op.first[2:]:
        op.block(dim, "drops all or none of them")
    return [op.first]


def pad(op: Operation) -> Made:
    amounts = [plain(amount) for amount in op.get(1, "pad")]
    made = list(op.first)
    for place, size in enumerate(op.result.shape):
        back = len(made) - 1 - place
        if any(amounts[2 * back : 2 * back + 2]):
            op.block(made[place], "adds entries to them")
            made[place] = whole(size, op.why("made them"))
    return [tuple(made)]


def prelu(op: Operation) -> Made:
    weight = op.operand(1)
    if length(weight[0]) > 1:
        op.unify(op.first[1], weight[0])
    return [op.first]


def glu(op: Operation) -> Made:
    """The first half of the features, each gated by one of the second."""
    dim = op.dim(op.get(1, "dim", -1))
    value, gate = cut(op.first[dim], [length(op.first[dim]) // 2], op.why("cuts them inside a unit"))
    op.unify(value, gate)
    return [(*op.first[:dim], value, *op.first[dim + 1 :])]


def constant(op: Operation) -> Made:
    """Constant tensors, which can be split along any dim."""
    given = op.sizes(1 if op.name.startswith("new_") else 0, "size")
    made = tuple(fresh(size) for size in op.result.shape)
    op.sized_each(given, made)
    return [made]


def triangle(op: Operation) -> Made:
    for dim in op.first[-2:]:
        op.block(dim, "tells them apart by their place")
    return [op.first]


Rule = Callable[[Operation], Made]


def _names(rule: Rule, names: str | Iterable[str]) -> dict[str, Rule]:
    return dict.fromkeys(names.split() if isinstance(names, str) else names, rule)


_SAME_NAME: tuple[Rule, ...] = (einsum, pad, prelu, glu, layers.linear, layers.addmm, layers.embedding)
_SAME_NAME += (shapes.repeat_interleave, shapes.unbind, shapes.select, shapes.narrow, shapes.stack)

RULES: dict[str, Rule] = {
    **{rule.__name__: rule for rule in _SAME_NAME},
    **_names(unary, UNARY),
    **_names(broadcast, kinds.BROADCAST),
    **_names(broadcast, "and copy floordiv isclose logaddexp logaddexp2 mod nextafter or truediv xor"),
    **_names(keeping, KEEPING),
    **_names(reducing, kinds.REDUCTIONS),
    **_names(
        reducing, "sum mean nansum nanmean norm median std_mean var_mean aminmax count_nonzero linalg_vector_norm"
    ),
    **_names(layers.matmul, "matmul mm bmm mv dot rmatmul baddbmm"),
    **_names(attention, "scaled_dot_product_attention"),
    **_names(last_norm, "layer_norm rms_norm"),
    **_names(channel_norm, "batch_norm instance_norm group_norm"),
    **_names(
        pooling, [f"{kind}pool{n}d" for n in (1, 2, 3) for kind in ("max_", "avg_", "adaptive_max_", "adaptive_avg_")]
    ),
    **_names(pooling, "interpolate upsample"),
    **_names(channel_dropout, kinds.CHANNEL_DROPOUTS),
    **_names(triangle, "tril triu"),
    **_names(constant, "zeros ones full empty new_zeros new_ones new_full new_empty"),
    **_names(layers.convolution, "conv1d conv2d conv3d"),
    **_names(shapes.view, "view reshape flatten unflatten ravel squeeze unsqueeze view_as reshape_as"),
    **_names(shapes.permute, "transpose swapaxes swapdims permute t T H mT mH adjoint movedim moveaxis"),
    **_names(shapes.expand, "expand expand_as broadcast_to"),
    **_names(shapes.repeat, "repeat tile"),
    **_names(shapes.split, "split split_with_sizes chunk tensor_split"),
    **_names(shapes.index, "getitem setitem"),
    **_names(shapes.cat, "cat concat concatenate"),
    **_names(shapes.as_complex, "view_as_complex"),
    **_names(shapes.as_real, "view_as_real"),
}
