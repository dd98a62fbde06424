"""Implements torch's operators on numpy arrays in double precision. Reduced dimensions are kept, with size 1."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def softplus(x: Array) -> Array:
    return np.logaddexp(x, 0.0)


erf = np.vectorize(math.erf, otypes=[np.float64])


def gelu(x: Array) -> Array:
    return 0.5 * x * (1 + erf(x / math.sqrt(2)))


def gelu_tanh(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def elu(x: Array) -> Array:
    return np.where(x > 0, x, np.expm1(x))


def selu(x: Array) -> Array:
    return 1.0507009873554805 * np.where(x > 0, x, 1.6732632423543772 * np.expm1(x))


def hardsigmoid(x: Array) -> Array:
    return np.clip(x / 6 + 0.5, 0, 1)


def mish(x: Array) -> Array:
    return x * np.tanh(softplus(x))


def norm(x: Array, axis: Any) -> Array:
    return np.sqrt(np.sum(x * x, axis=axis, keepdims=True))


def logsumexp(x: Array, axis: Any) -> Array:
    return np.log(np.sum(np.exp(x), axis=axis, keepdims=True))


def softmax(x: Array, axis: Any) -> Array:
    return np.exp(x - logsumexp(x, axis))


def log_softmax(x: Array, axis: Any) -> Array:
    return x - logsumexp(x, axis)


def layer_norm(x: Array, axis: Any) -> Array:
    return (x - x.mean(axis, keepdims=True)) / np.sqrt(x.var(axis, keepdims=True))


def rms_norm(x: Array, axis: Any) -> Array:
    return x / np.sqrt(np.mean(x * x, axis=axis, keepdims=True))


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def hardswish(x: Array) -> Array:
    return x * hardsigmoid(x)


def truth(array: Array) -> Array:
    return array if array.dtype == bool else array > 0


def number(array: Array) -> Array:
    return array.astype(np.float64) if array.dtype == bool else array


def leaky_relu(x: Array, y: Array) -> Array:
    """Leaky ReLU of x, with the negative slope fitted so that the result is y; NaN if no slope fits."""
    if x.shape != y.shape or not (x < 0).any():
        return np.full_like(x, np.nan)
    slope = np.median(y[x < 0] / x[x < 0])
    return np.where(x < 0, slope * x, x) if 0 < slope < 1 else np.full_like(x, np.nan)


def scaled(norm: Callable[[Array, Any], Array]) -> Callable[[Array, Array, Any], Array]:
    return lambda x, weight, axis: norm(x, axis) * weight


def bce_with_logits(x: Array, t: Array) -> Array:
    return softplus(x) - t * x


def bce(p: Array, t: Array) -> Array:
    return -(t * np.log(p) + (1 - t) * np.log(1 - p))


def huber(x: Array, target: Array, y: Array) -> Array:
    """Huber or smooth L1 loss, with `delta` or `beta` fitted so that the loss of the largest error is as in y.

    Returns the loss (Huber or smooth L1) that is closer to y; NaN if neither parameter is plausible.
    """
    size = np.abs(x - target)
    if y.shape != size.shape:
        return np.full_like(x, np.nan)
    most = np.argmax(size)
    d, loss = float(size.flat[most]), float(y.flat[most])
    delta, beta = d - math.sqrt(max(d * d - 2 * loss, 0.0)), 2 * (d - loss)
    candidates = [np.full_like(x, np.nan)]
    if 0.05 < (size < delta).mean() < 0.95:
        candidates.append(np.where(size < delta, 0.5 * size**2, delta * (size - 0.5 * delta)))
    if 0.05 < (size < beta).mean() < 0.95:
        candidates.append(np.where(size < beta, 0.5 * size**2 / beta, size - 0.5 * beta))
    # every comparison with NaN is false, so `min` would return an array of NaN if it came first
    return min(candidates[::-1], key=lambda candidate: float(np.abs(candidate - y).max()))


def masked_softmax(x: Array, mask: Array, axis: Any) -> Array:
    if not np.isin(mask, (0, 1)).all():
        return np.full_like(x, np.nan)
    weights = np.exp(x) * mask
    return weights / np.sum(weights, axis=axis, keepdims=True)


def cross_entropy(x: Array, t: Array, axis: Any) -> Array:
    return -np.sum(t * log_softmax(x, axis), axis=axis, keepdims=True)


def batch_norm(x: Array, mean: Array, variance: Array, scale: Array, shift: Array, epsilon: float) -> Array:
    return (x - mean) / np.sqrt(variance + epsilon) * scale + shift


UNARY: dict[str, Callable[[Array], Array]] = {
    "abs": np.abs, "exp": np.exp, "exp2": np.exp2, "expm1": np.expm1, "log": np.log, "log1p": np.log1p,
    "log2": np.log2, "log10": np.log10, "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x),
    "reciprocal": lambda x: 1 / x, "neg": np.negative, "negative": np.negative, "square": np.square,
    "tanh": np.tanh, "sigmoid": sigmoid, "erf": erf, "relu": lambda x: np.maximum(x, 0),
    "softplus": softplus, "logsigmoid": lambda x: -softplus(-x), "silu": silu, "mish": mish, "gelu": gelu,
    "elu": elu, "sin": np.sin, "cos": np.cos, "sign": np.sign, "hardsigmoid": hardsigmoid,
    "logical_not": lambda x: ~truth(x), "floor": np.floor, "relu6": lambda x: np.clip(x, 0, 6), "round": np.round,
}  # fmt: skip
BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add, "sub": np.subtract, "subtract": np.subtract, "mul": np.multiply, "multiply": np.multiply,
    "div": np.divide, "divide": np.divide, "true_divide": np.divide, "pow": np.power, "maximum": np.maximum,
    "minimum": np.minimum, "gt": np.greater, "ge": np.greater_equal, "lt": np.less, "le": np.less_equal,
    "eq": np.equal, "ne": np.not_equal, "rsub": lambda x, y: y - x, "logaddexp": np.logaddexp,
    "logical_and": lambda x, y: truth(x) & truth(y), "logical_or": lambda x, y: truth(x) | truth(y),
}  # fmt: skip
REDUCTIONS: dict[str, Callable[[Array, Any], Array]] = {
    "sum": partial(np.sum, keepdims=True), "mean": partial(np.mean, keepdims=True),
    "amax": partial(np.max, keepdims=True), "amin": partial(np.min, keepdims=True),
    "max": partial(np.max, keepdims=True), "min": partial(np.min, keepdims=True),
    "norm": norm, "vector_norm": norm, "logsumexp": logsumexp, "softmax": softmax, "log_softmax": log_softmax,
}  # fmt: skip
