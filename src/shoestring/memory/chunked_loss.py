"""Computes a language model's head and the cross-entropy together, for one chunk of tokens at a time."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoestring._torch import is_fake
from shoestring.core.attachments import Attachments
from shoestring.core.task import IGNORED, Batch, cross_entropy
from shoestring.models.distillation import targets_of
from shoestring.models.loss_in_head import LossInHead


class ChunkedTotal(NamedTuple):
    """Output of a model instead of logits: the sum of the loss over the targets, 0-d."""

    total: Tensor


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Computes the sum of the negative log-likelihoods of the targets.

    The forward pass also computes the gradients, chunk by chunk, and the backward pass only scales them. No logits have
    to be held for the backward pass (as in Liger's kernels, Hsu et al., 2024).
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, tokens: int, dtype: torch.dtype
    ) -> Tensor:
        needs = ctx.needs_input_grad
        total = torch.zeros((), dtype=torch.promote_types(dtype, torch.float32), device=hidden.device)
        matrix, offset = weight.to(dtype), None if bias is None else bias.to(dtype)
        d_hidden = torch.empty_like(hidden) if needs[0] else None
        d_weight = torch.zeros_like(weight, dtype=total.dtype) if needs[1] else None
        d_bias = torch.zeros_like(bias, dtype=total.dtype) if bias is not None and needs[2] else None
        for start in range(0, len(hidden), tokens):
            chunk = slice(start, start + tokens)
            inputs, labels = hidden[chunk].to(dtype), targets[chunk]
            logits = F.linear(inputs, matrix, offset).to(total.dtype)
            counted, norm = labels != IGNORED, logits.logsumexp(-1)
            places = torch.where(counted, labels, 0)[:, None]  # any other invalid label raises an error, as in torch
            total += torch.where(counted, norm - logits.gather(-1, places)[:, 0], 0).sum()
            if any(needs[:3]):
                # softmax(logits) - one_hot(labels), computed in place
                d_logits = logits.sub_(norm[:, None]).exp_()
                d_logits.scatter_add_(-1, places, d_logits.new_full(places.shape, -1.0))
                d_logits.masked_fill_(~counted[:, None], 0)
                rounded = d_logits.to(dtype)
                if d_hidden is not None:
                    d_hidden[chunk] = rounded @ matrix
                if d_weight is not None:
                    d_weight += rounded.T @ inputs
                if d_bias is not None:
                    d_bias += d_logits.sum(0)
        ctx.save_for_backward(d_hidden, d_weight, d_bias)
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        pairs = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        scaled = (None if gradient is None else (gradient * cotangents[0]).to(dtype) for gradient, dtype in pairs)
        return *scaled, None, None, None


def chunked_cross_entropy(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, tokens: int) -> Tensor:
    """Compute the sum of -log softmax(W h + b) over the targets, (…); targets of -100 do not count.

    Under autocast, matrix products use autocast's data type; the softmax is computed in float32 or wider.

    Args:
        hidden: (…, C). weight: (V, C). bias: (V,).
        tokens: number of tokens whose logits are held at a time.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    flat, labels = hidden.flatten(0, -2), targets.flatten()
    if device == "cpu":  # on a GPU, counting these targets would force a synchronization
        counted = labels != IGNORED
        flat, labels = flat[counted], labels[counted]
        if len(labels) and not is_fake(labels) and (wrong := labels[(labels < 0) | (labels >= len(weight))]).numel():
            raise IndexError(f"Target {int(wrong[0])} is out of bounds.")  # the same message as torch's
    with torch.autocast(device, enabled=False):  # the function casts its inputs itself
        return _ChunkedCrossEntropy.apply(flat, weight, bias, labels, tokens, dtype)


# -- in a job ----------------------------------------------------------------------------------------------------------


class ChunkedLossInHead:
    """Computes the cross-entropy inside the model's head during training; evaluation still uses the task's loss."""

    def __init__(self, attachments: Attachments, tokens: int) -> None:
        self.attachments, self.tokens = attachments, tokens

        def in_training(model: nn.Module, batch: Batch) -> bool:
            return model.training and torch.is_grad_enabled()

        LossInHead(attachments, self.compute, in_training, "remove the table [memory.chunkedloss]")

    def compute(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> ChunkedTotal:
        return ChunkedTotal(chunked_cross_entropy(hidden, weight, bias, targets, self.tokens))

    def loss(self, output: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """The job's loss: (sum over targets, number of targets)."""
        result = output if isinstance(output, ChunkedTotal) else getattr(output, "logits", None)
        if not isinstance(result, ChunkedTotal):  # in evaluation, the head returned logits
            return cross_entropy(output, batch)
        targets = targets_of(batch)
        self.attachments.trace.facts |= {
            "chunk_tokens": min(self.tokens, targets.numel()),
            "loss_tokens": targets.numel(),
        }
        return result.total, (targets != IGNORED).sum()
