"""Functions of torch by what they do to features, where their kind says all.

Names are without underscores (`add_` and `__iadd__` are `add`), but for those that are harmless.
"""

from __future__ import annotations

HARMLESS = frozenset(
    "dim ndim ndimension dtype device requires_grad requires_grad_ is_floating_point is_complex is_contiguous "
    "is_meta is_cuda is_cpu is_sparse is_nested is_quantized is_leaf layout grad_fn grad get_device element_size "
    "itemsize data_ptr register_hook retain_grad _version is_inference names is_signed output_nr "
    "_backward_hooks get_default_dtype is_grad_enabled _set_grad_enabled is_autocast_enabled set_autocast_enabled "
    "get_autocast_dtype set_autocast_dtype is_autocast_cache_enabled set_autocast_cache_enabled "
    "autocast_increment_nesting autocast_decrement_nesting clear_autocast_cache is_tensor is_storage finfo iinfo "
    "result_type can_cast promote_types manual_seed __hash__ __repr__ __format__ __deepcopy__ _is_zerotensor is_neg "
    "is_conj".split()
)
"""Functions that neither make tensors nor tell anything that differs between ranks."""

EXPANDING = frozenset({"expand", "expand_as", "broadcast_to", "repeat", "tile", "repeat_interleave"})
"""Functions of one tensor whose result has more features."""

ROOTLESS = frozenset(
    "zeros_like ones_like full_like empty_like rand_like randn_like new_zeros new_ones new_full new_empty".split()
)
"""Functions that take a tensor's shape or device, but nothing of its values."""

UNARY = (
    "abs absolute acos acosh asin asinh atan atanh angle bernoulli bfloat16 bool byte ceil celu clone conj "
    "contiguous cos cosh cpu cuda data deg2rad detach double dropout alpha_dropout elu erf erfc erfinv exp exp2 "
    "expm1 float floor frac gelu half hardshrink hardsigmoid hardswish hardtanh imag int isfinite isinf isnan "
    "isneginf isposinf leaky_relu lgamma log log10 log1p log2 logical_not logit logsigmoid long mish nan_to_num neg "
    "negative positive pin_memory rad2deg real reciprocal relu relu6 resolve_conj round rrelu rsqrt selu sgn short "
    "sigmoid sign signbit silu sin sinc sinh softplus softshrink softsign sqrt square tan tanh tanhshrink threshold "
    "to trunc type type_as zero fill invert zeros_like ones_like full_like empty_like rand_like randn_like uniform "
    "normal exponential digamma log_normal"
).split()
"""Entry by entry, of the first operand alone."""

BROADCAST = (
    "add addcdiv addcmul sub subtract mul multiply div divide true_divide floor_divide fmod remainder pow "
    "float_power rsub truediv floordiv mod atan2 arctan2 bitwise_and bitwise_or bitwise_xor bitwise_not and or xor "
    "clamp clamp_min clamp_max clip copy copysign eq ne ge gt le lt greater greater_equal less less_equal not_equal "
    "fmax fmin heaviside hypot isclose lerp logaddexp logaddexp2 logical_and logical_or logical_xor masked_fill "
    "maximum minimum nextafter where xlogy"
).split()
"""Entry by entry, of all operands."""

KEEPING = {"softmax": 1, "log_softmax": 1, "softmin": 1, "cumsum": 1, "cumprod": 1, "logcumsumexp": 1, "flip": 1}
KEEPING |= {"roll": 2, "normalize": 2, "gumbel_softmax": 4, "sort": 1, "argsort": 1}
"""Functions that mix entries along some dims, and keep their number; where those dims are named."""

REDUCING = (
    "sum mean nansum nanmean prod amax amin max min argmax argmin any all std var logsumexp norm median std_mean "
    "var_mean aminmax count_nonzero"
).split()
"""Functions that make one entry of all along some dims."""
