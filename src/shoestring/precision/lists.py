"""Lists of the operators that may compute in 16 bits: TensorFlow's lists for mixed precision, for torch's ATen
operators.

Source: the tables of TensorFlow's graph optimizer `auto_mixed_precision`, whose names the lists keep.
"""

from __future__ import annotations

from typing import Literal

ListName = Literal["allow", "infer", "deny", "clear"]


def _names(text: str) -> frozenset[str]:
    """Split a text into words."""
    return frozenset(text.split())


ALLOW = _names(
    """
    mm addmm bmm baddbmm mv addmv convolution convolution_backward _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_flash_attention_for_cpu_backward _scaled_dot_product_flash_attention
    _scaled_dot_product_flash_attention_backward _scaled_dot_product_efficient_attention
    _scaled_dot_product_efficient_attention_backward _scaled_dot_product_cudnn_attention
    _scaled_dot_product_cudnn_attention_backward _scaled_dot_product_fused_attention_overrideable
    _scaled_dot_product_fused_attention_overrideable_backward
    """
)
"""Matrix products, which tensor cores compute faster in 16 bits, with sums in 32 bits."""

INFER = _names(
    """
    add sub rsub mul div neg abs sqrt rsqrt reciprocal tanh tanh_backward sigmoid sigmoid_backward erf sin cos
    silu silu_backward gelu gelu_backward elu elu_backward hardswish hardswish_backward hardsigmoid mish
    log_sigmoid_forward softplus softplus_backward leaky_relu leaky_relu_backward addcmul addcdiv lerp _softmax
    _softmax_backward_data avg_pool2d avg_pool2d_backward _adaptive_avg_pool2d _adaptive_avg_pool2d_backward
    native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional native_batch_norm_backward
    native_layer_norm native_layer_norm_backward native_group_norm native_group_norm_backward _fused_rms_norm
    _fused_rms_norm_backward native_dropout native_dropout_backward
    """
)
"""Operators that compute in 16 bits only if their neighbours do."""

DENY = _names(
    """
    exp exp2 expm1 log log2 log10 log1p pow square sum mean prod var var_mean std norm linalg_vector_norm cumsum
    cumprod logsumexp _log_softmax _log_softmax_backward_data nll_loss_forward nll_loss_backward
    nll_loss2d_forward nll_loss2d_backward mse_loss mse_loss_backward smooth_l1_loss smooth_l1_loss_backward
    huber_loss huber_loss_backward binary_cross_entropy binary_cross_entropy_backward
    binary_cross_entropy_with_logits embedding_dense_backward embedding_bag index_put scatter_add index_add dist
    cdist acos asin cosh sinh tan erfinv _cdist_forward renorm trace
    """
)
"""Operators whose results would be too inexact in 16 bits: sums of many numbers, powers, and losses."""

CLEAR = _names(
    """
    view _unsafe_view reshape _reshape_alias t transpose permute expand squeeze unsqueeze slice select split
    split_with_sizes unbind chunk narrow as_strided alias detach clone contiguous cat stack flip roll repeat
    constant_pad_nd slice_backward select_backward gather index index_select relu threshold_backward
    max_pool2d_with_indices max_pool2d_with_indices_backward where masked_fill maximum minimum clamp clamp_min
    clamp_max amax amin max min tril triu copy lift_fresh_copy slice_scatter select_scatter unfold
    upsample_nearest2d diagonal movedim
    """
)
"""Operators that only move or select numbers, and therefore add no rounding error."""

SUMMING = frozenset(
    {
        f"{norm}{way}"
        for norm in ("native_layer_norm", "native_group_norm", "_fused_rms_norm")
        for way in ("", "_backward")
    }
)
"""Operators of `INFER` that stay wide without forward propagation: they read the residual stream, the sum of all
earlier blocks, whose rounding would cost more accuracy than all other rounding."""

PROMOTING = frozenset({"add", "sub", "rsub", "mul", "div", "maximum", "minimum"})
"""Operators that compute in 32 bits if any operand has 32 bits, without casts of the other operands."""

NARROWED_ARGUMENTS = {
    "native_layer_norm": (0,),
    "native_layer_norm_backward": (0, 1),
    "native_group_norm": (0,),
    "native_batch_norm": (0,),
    "_native_batch_norm_legit": (0,),
    "_native_batch_norm_legit_functional": (0,),
    "native_batch_norm_backward": (0, 1),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (0, 1, 2, 3, 4),
    "_scaled_dot_product_flash_attention_backward": (0, 1, 2, 3, 4),
    "_scaled_dot_product_efficient_attention_backward": (0, 1, 2, 3, 4, 5),
    "_scaled_dot_product_cudnn_attention_backward": (0, 1, 2, 3, 4, 8),
}
"""Maps an operator to the indices of the arguments that are narrowed, if not all are. Weights and statistics of norms,
and the sums of exponentials that attention saves, stay in 32 bits."""


LISTS: dict[ListName, frozenset[str]] = {"allow": ALLOW, "infer": INFER, "deny": DENY, "clear": CLEAR}


def list_of(operator: str) -> ListName | None:
    """Return the list of an ATen operator, given its name without namespace and overload; None if it is in no list."""
    return next((name for name, operators in LISTS.items() if operator in operators), None)
