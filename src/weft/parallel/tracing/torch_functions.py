"""Names of torch functions by kind, from which `spatial/rules.py` and `tensor/discovery/rules.py` build their rules.

A name stands for the function, the method and the form in place. Each user adds names that only it understands.
"""

from __future__ import annotations

POINTWISE = tuple(
    """
abs absolute acos acosh asin asinh atan atanh ceil celu cos cosh digamma elu erf erfc erfinv exp exp2 expm1 floor frac
gelu hardshrink hardsigmoid hardswish hardtanh isfinite isinf isnan isneginf isposinf leaky_relu lgamma log log10 log1p
log2 logical_not logit logsigmoid mish nan_to_num neg negative positive reciprocal relu relu6 round rsqrt selu sgn
sigmoid sign silu sin sinc sinh softplus softshrink softsign sqrt square tan tanh tanhshrink threshold trunc
""".split()
)
"""Elementwise functions of one tensor."""

BROADCAST = tuple(
    """
add addcdiv addcmul arctan2 atan2 bitwise_and bitwise_not bitwise_or bitwise_xor clamp clamp_max clamp_min clip copysign
div divide eq float_power floor_divide fmax fmin fmod ge greater greater_equal gt heaviside hypot le lerp less
less_equal logical_and logical_or logical_xor lt masked_fill maximum minimum mul multiply ne not_equal pow remainder
rsub sub subtract true_divide where xlogy
""".split()
)
"""Elementwise functions of several tensors that are broadcast against each other."""

CASTS = tuple(
    """
bfloat16 bool byte clone contiguous cpu cuda detach double empty_like float full_like half int long ones_like to type
type_as zeros_like
""".split()
)
"""Functions that return a tensor of the first argument's shape; other arguments give only its format."""

REDUCTIONS = tuple("all amax amin any argmax argmin logsumexp max min prod std var".split())
"""Reductions along some dims, which are the second argument."""

ALONG_DIM = tuple("cumprod cumsum flip log_softmax softmax softmin".split())
"""Functions that mix entries along some dims, which are the second argument, and keep the shape."""

CHANNEL_DROPOUTS = tuple("dropout1d dropout2d dropout3d feature_alpha_dropout feature_dropout".split())

METADATA = tuple(
    """
__format__ __hash__ __repr__ data_ptr dim element_size get_device is_complex is_contiguous is_floating_point
is_inference is_signed ndimension register_hook result_type retain_grad
""".split()
)
"""Functions that read a tensor's metadata and not its entries, and hooks."""
