"""Computes the log-probabilities of targets from hidden states, chunk by chunk, and sums them by answer."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from shoestring.core.task import IGNORED


class _TargetLogProbabilities(torch.autograd.Function):
    """Computes log softmax(W h + b)[target], (N,), from hidden (N, C), weight (V, C), bias (V,) and targets (N,).

    The backward pass recomputes the logits chunk by chunk, so that the logits of the whole batch are never in memory.
    The forward pass cannot compute the gradients, because the loss is not a sum over tokens.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, tokens: int, dtype: torch.dtype
    ) -> Tensor:
        exact = torch.promote_types(dtype, torch.float32)
        values = torch.empty(len(hidden), dtype=exact, device=hidden.device)
        norms = torch.empty_like(values)
        matrix, offset = weight.to(dtype), None if bias is None else bias.to(dtype)
        for start in range(0, len(hidden), tokens):
            chunk = slice(start, start + tokens)
            logits = F.linear(hidden[chunk].to(dtype), matrix, offset).to(exact)
            norms[chunk] = logits.logsumexp(-1)
            values[chunk] = logits.gather(-1, targets[chunk, None])[:, 0]
        ctx.save_for_backward(hidden, weight, bias, targets, norms)
        ctx.tokens, ctx.dtype = tokens, dtype
        return values.sub_(norms)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        hidden, weight, bias, targets, norms = ctx.saved_tensors
        needs, dtype = ctx.needs_input_grad, ctx.dtype
        d_hidden = torch.empty_like(hidden) if needs[0] else None
        d_weight = torch.zeros_like(weight, dtype=norms.dtype) if needs[1] else None
        d_bias = torch.zeros_like(bias, dtype=norms.dtype) if bias is not None and needs[2] else None
        matrix, offset = weight.to(dtype), None if bias is None else bias.to(dtype)
        for start in range(0, len(hidden), ctx.tokens):
            chunk = slice(start, start + ctx.tokens)
            inputs, scale = hidden[chunk].to(dtype), grad[chunk, None].to(norms.dtype)
            # Computes g (one_hot(target) - softmax(logits)) in place, in the memory of the logits.
            d_logits = F.linear(inputs, matrix, offset).to(norms.dtype).sub_(norms[chunk, None]).exp_().mul_(-scale)
            d_logits.scatter_add_(-1, targets[chunk, None], scale)
            rounded = d_logits.to(dtype)
            if d_hidden is not None:
                d_hidden[chunk] = rounded @ matrix
            if d_weight is not None:
                d_weight += rounded.T @ inputs
            if d_bias is not None:
                d_bias += d_logits.sum(0)
        return (
            d_hidden,
            None if d_weight is None else d_weight.to(weight.dtype),
            None if d_bias is None else d_bias.to(bias.dtype),
            None,
            None,
            None,
        )


def target_log_probabilities(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, tokens: int
) -> Tensor:
    """Return log softmax(W h + b)[target] for each target, (…), in fp32 or fp64; 0 where the target is -100.

    Under autocast, matrix products are computed in autocast's data type.

    Args:
        hidden: (…, C). weight: (V, C). bias: (V,). targets: (…), integers.
        tokens: number of tokens whose logits are in memory at a time.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    flat, labels = hidden.flatten(0, -2), targets.flatten()
    counted = labels != IGNORED
    with torch.autocast(device, enabled=False):  # the function casts its inputs itself
        if device == "cpu":  # skips the logits of prompts; on a GPU, counting the targets would force a synchronisation
            values = _TargetLogProbabilities.apply(flat[counted], weight, bias, labels[counted], tokens, dtype)
            return values.new_zeros(labels.shape).masked_scatter(counted, values).view(targets.shape)
        values = _TargetLogProbabilities.apply(flat, weight, bias, labels.clamp_min(0), tokens, dtype)
        return torch.where(counted, values, 0).view(targets.shape)


class AnswerSums(NamedTuple):
    """Sums over the tokens of each answer; shape (B, N, K): rows, answers of a row, and kinds of answer."""

    log_probability: Tensor
    tokens: Tensor
    """Number of tokens of each answer; 0 where there is no answer."""


def sums_by_answer(values: Tensor, targets: Tensor, answers: Tensor, kinds: int) -> AnswerSums:
    """Sum the log-probabilities of the tokens of each answer.

    Args:
        values: log-probabilities (B, T).
        targets: (B, T); tokens whose target is -100 are left out.
        answers: index of the answer to which a token belongs, integers (B, T): kinds * n + k for kind k of the n-th
            answer (or pair) of the row; -1 for tokens outside answers.
        kinds: number of kinds of answer, such as chosen and rejected.

    Returns:
        Sums of shape (B, N, kinds). N depends only on T, and is an upper bound on the number of answers in a row.
    """
    rows, length = values.shape
    numbers = length // 2 + 1  # upper bound: a record consists of at least two sequences of one token each
    counted = (targets != IGNORED) & (answers >= 0)
    places = torch.where(counted, answers, numbers * kinds).clamp_max(numbers * kinds)

    def summed(numbers_of: Tensor) -> Tensor:
        space = numbers_of.new_zeros(rows, numbers * kinds + 1)
        return space.scatter_add(1, places, numbers_of)[:, :-1].view(rows, numbers, kinds)

    return AnswerSums(summed(torch.where(counted, values, 0)), summed(counted.to(values.dtype)))
