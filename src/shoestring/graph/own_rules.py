"""Rules that torch lacks: attention on a CPU, losses and BatchNorm over a sharded batch, and instructions.

A batch norm normalises by the mean and variance of the whole batch. If the batch is sharded, the ranks exchange these
statistics (as nn.SyncBatchNorm does; BatchNorm: Ioffe and Szegedy, 2015).
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from shoestring.graph.instructions import exchange, move, take_shard
from shoestring.graph.placements import SUM, WHOLE, InnerExchange, OwnRules, Placement, ShardingRule

aten = torch.ops.aten
Computed = Generator[Tensor, Tensor, tuple[Tensor | None, ...]]
_MEAN, _SUM = 1, 2  # values of the argument `reduction` of ATen operators


def _attention(*args: Any, attn_mask: Tensor | None = None, **kwargs: Any) -> Iterable[ShardingRule]:
    """Samples and heads attend independently of each other; so do their gradients."""
    tensors = [argument for argument in args if isinstance(argument, Tensor)]
    outputs = 2 if len(tensors) == 3 else 3
    for dim in (0, 1):  # (B, H, T, D)
        inputs = [dim] * len(tensors)
        if attn_mask is not None:
            inputs.append(dim if attn_mask.ndim == 4 and attn_mask.shape[dim] > 1 else WHOLE)
        yield ShardingRule((dim,) * outputs, tuple(inputs))


def _loss(
    scores: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignored: int
) -> Iterable[ShardingRule]:
    """Each rank computes the losses of its samples; the ranks exchange the sum and count of a mean or sum."""
    if scores.ndim != 2 or reduction not in (_MEAN, _SUM):
        return
    exchange = InnerExchange(2 * scores.dtype.itemsize, _sharded_loss)
    yield ShardingRule((WHOLE, WHOLE), (0, 0, *([] if weight is None else [WHOLE])), exchange)


def _sharded_loss(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], ranks: int) -> Computed:
    scores, target, weight, reduction, ignored = args
    total, count = yield torch.stack(op(scores, target, weight, _SUM, ignored))
    return (total / count if reduction == _MEAN else total), count


def _batch_norm(x: Tensor, *args: Any) -> Iterable[ShardingRule]:
    """Sharded by channel, ranks need no exchange; sharded by sample, they exchange statistics in training."""
    vectors = [argument for argument in args if isinstance(argument, Tensor)]
    yield ShardingRule((1, 0, 0, 0, 0), (1, *[0] * len(vectors)))
    training = args[4]
    exchange = InnerExchange(2 * x.shape[1] * x.dtype.itemsize, _sharded_batch_norm) if training else None
    yield ShardingRule((0, WHOLE, WHOLE, WHOLE, WHOLE), (0, *[WHOLE] * len(vectors)), exchange)


def _sharded_batch_norm(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], ranks: int) -> Computed:
    x, weight, bias, running_mean, running_var, _, momentum, eps = args
    others = [dim for dim in range(x.ndim) if dim != 1]
    variance, mean = torch.var_mean(x, others, correction=0)
    mean, square = (yield torch.stack([mean, variance + mean.square()])) / ranks
    variance = square - mean.square()
    rate, count = (variance + eps).rsqrt(), x.numel() // x.shape[1] * ranks
    out = (x - _along(mean, x)) * _along(rate if weight is None else rate * weight, x)
    updated = (
        running_mean + momentum * (mean - running_mean),
        running_var + momentum * (variance * (count / (count - 1)) - running_var),
    )
    return (out if bias is None else out + _along(bias, x), mean, rate, *updated)


def _batch_norm_backward(gradient: Tensor, x: Tensor, *args: Any) -> Iterable[ShardingRule]:
    vectors = [argument for argument in args if isinstance(argument, Tensor)]
    training = args[5]
    if training:
        exchange = InnerExchange(2 * x.shape[1] * x.dtype.itemsize, _sharded_batch_norm_backward)
        yield ShardingRule((0, WHOLE, WHOLE), (0, 0, *[WHOLE] * len(vectors)), exchange)


def _sharded_batch_norm_backward(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], ranks: int) -> Computed:
    gradient, x, weight, _, _, mean, rate, _, _, mask = args
    others = [dim for dim in range(x.ndim) if dim != 1]
    normal = (x - _along(mean, x)) * _along(rate, x)
    bias_gradient, weight_gradient = yield torch.stack([gradient.sum(others), (gradient * normal).sum(others)])
    count = x.numel() // x.shape[1] * ranks
    centred = gradient - _along(bias_gradient / count, x) - normal * _along(weight_gradient / count, x)
    out = centred * _along(rate if weight is None else rate * weight, x)
    outputs = (out, weight_gradient, bias_gradient)
    return tuple(output if wanted else None for output, wanted in zip(outputs, mask, strict=True))


def _move(x: Tensor, source: Placement, target: Placement, axis: int) -> Iterable[ShardingRule]:
    """A move along one mesh axis can itself be sharded along dimensions that the move does not shard or join.

    Along its own dimensions it cannot: shards of shards would be joined in another order.
    """
    for dim in range(x.ndim):
        if dim not in (source, target):
            yield ShardingRule((dim,), (dim,))
    yield ShardingRule((SUM,), (SUM,))


def _take_shard(x: Tensor, dim: int, axis: int) -> Iterable[ShardingRule]:
    return _move(x, WHOLE, dim, axis)


def _exchange(*args: Any) -> Iterable[ShardingRule]:
    """No rules: an operator with an exchange along one mesh axis is computed whole along the other axes."""
    return ()


def _along(vector: Tensor, x: Tensor) -> Tensor:
    """Reshape one number per channel, so that it can be multiplied by x (N, C, …)."""
    return vector.reshape(1, -1, *[1] * (x.ndim - 2))


OWN: Mapping[Any, OwnRules] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention,
    aten.nll_loss_forward.default: _loss,
    aten._native_batch_norm_legit_functional.default: _batch_norm,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    move: _move,
    take_shard: _take_shard,
    exchange: _exchange,
}
"""Operator -> function: the operator's arguments -> rules in addition to torch's."""
