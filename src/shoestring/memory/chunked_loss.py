"""The head of a language model and the cross-entropy of its logits, chunk by chunk of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoestring._torch import is_fake
from shoestring.core.errors import ConfigError
from shoestring.core.job import Job
from shoestring.core.task import IGNORED, Batch
from shoestring.models.distillation import targets_of
from shoestring.models.gpt import GPT


class ChunkedTotal(NamedTuple):
    """What a model returns in place of logits: the sum of the loss over its targets, 0-d."""

    total: Tensor


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The sum of the negative log-likelihoods of targets; gradients are computed with it, chunk by chunk, and scaled in
    the backward pass (as Liger's kernels do, Hsu et al., 2024)."""

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
            part, wanted = hidden[chunk].to(dtype), targets[chunk]
            logits = F.linear(part, matrix, offset).to(total.dtype)
            counted, norm = wanted != IGNORED, logits.logsumexp(-1)
            places = wanted.clamp_min(0)[:, None]
            total += ((norm - logits.gather(-1, places)[:, 0]) * counted).sum()
            if any(needs[:3]):
                d_logits = logits.sub_(norm[:, None]).exp_()
                d_logits.scatter_add_(-1, places, d_logits.new_full(places.shape, -1.0))
                d_logits *= counted[:, None]
                rounded = d_logits.to(dtype)
                if d_hidden is not None:
                    d_hidden[chunk] = rounded @ matrix
                if d_weight is not None:
                    d_weight += rounded.T @ part
                if d_bias is not None:
                    d_bias += d_logits.sum(0)
        ctx.save_for_backward(d_hidden, d_weight, d_bias)
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        pairs = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        scaled = (None if each is None else (each * cotangents[0]).to(dtype) for each, dtype in pairs)
        return *scaled, None, None, None


def chunked_cross_entropy(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, tokens: int) -> Tensor:
    """The sum over targets, (…), of -log softmax(W h + b); targets of -100 do not count.

    Under autocast the products are of its type; the softmax is in float32 at least.

    Args:
        hidden: (…, C). weight: (V, C). bias: (V,).
        tokens: whose logits are held at a time.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    flat, wanted = hidden.flatten(0, -2), targets.flatten()
    if device == "cpu":  # elsewhere, to know which count would wait for the device
        counted = wanted != IGNORED
        flat, wanted = flat[counted], wanted[counted]
    with torch.autocast(device, enabled=False):
        return _ChunkedCrossEntropy.apply(flat, weight, bias, wanted, tokens, dtype)


# -- in a job ----------------------------------------------------------------------------------------------------------


def head_of(model: nn.Module) -> nn.Module | None:
    """The linear layer, or the embedding that serves as one, that makes a model's logits; None where none is found."""
    if isinstance(model, GPT):
        return model.embed if model.head is None else model.head
    own: Any = getattr(model, "get_output_embeddings", None)
    found = own() if callable(own) else getattr(model, "lm_head", getattr(model, "head", None))
    return found if isinstance(found, nn.Linear) and type(found).forward is nn.Linear.forward else None


class LossInHead:
    """The head of a job's model computes the loss in training, where its weight is at hand: FSDP2 shards it again once
    the forward pass is over. The targets reach it through the job's forward."""

    def __init__(self, job: Job, tokens: int) -> None:
        head = head_of(job.module)
        assert head is not None
        _check_last(job, head)
        self.job, self.head, self.tokens = job, head, tokens
        self.targets: Tensor | None = None
        name = "logits" if isinstance(head, nn.Embedding) else "forward"
        self.own: Callable[[Tensor], Tensor] = getattr(head, name)
        if name == "forward":
            job.patch(head, self.compute)
        else:
            setattr(head, name, self.compute)
            job.exits.callback(delattr, head, name)
        self.forward = job.forward
        job.forward = self.with_targets
        job.exits.callback(setattr, job, "forward", self.forward)

    def with_targets(self, model: nn.Module, batch: Batch) -> Any:
        """The job's forward."""
        self.targets = targets_of(batch) if self.job.module.training and torch.is_grad_enabled() else None
        try:
            return self.forward(model, batch)
        finally:
            self.targets = None

    def compute(self, hidden: Tensor) -> Any:
        """The head's forward: logits, or in training the loss alone."""
        if self.targets is None:
            return self.own(hidden)
        if hidden.shape[:-1] != self.targets.shape:
            tokens, targets = tuple(hidden.shape[:-1]), tuple(self.targets.shape)
            said = f"tokens of the shape {tokens} reach the head, and targets have {targets}"
            raise ConfigError(said, hint="remove the table [memory.chunkedloss]")
        layer: Any = self.head
        bias = getattr(layer, "bias", None)
        return ChunkedTotal(chunked_cross_entropy(hidden, layer.weight, bias, self.targets, self.tokens))

    def loss(self, output: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """The job's loss; evaluation keeps the task's own."""
        targets, result = targets_of(batch), output if isinstance(output, ChunkedTotal) else output.logits
        self.job.trace.facts |= {"chunk_tokens": min(self.tokens, targets.numel()), "loss_tokens": targets.numel()}
        return result.total, (targets != IGNORED).sum()


@torch.no_grad()
def _check_last(job: Job, head: nn.Module) -> None:
    """Run two tokens through the model: what it returns must be what the head does.

    Raises:
        ConfigError: it changes its logits after the head (a cap, a scale), which would be lost.
    """
    if isinstance(job.module, GPT):
        return
    seen: list[Any] = []
    hook = head.register_forward_hook(lambda module, args, output: seen.append(output))
    modes = {module: module.training for module in job.module.modules()}
    try:
        job.module.eval()
        output = job.module(torch.tensor([[1, 2]], device=next(job.module.parameters()).device))
    finally:
        hook.remove()
        for module, training in modes.items():
            module.training = training
    logits = output if isinstance(output, Tensor) else output.logits
    alike = len(seen) == 1 and seen[0].shape == logits.shape
    if not alike or not (is_fake(logits) or torch.equal(seen[0], logits)):  # fake tensors have no numbers
        said = f"{type(job.module).__name__} changes its logits after the head, which `memory.chunkedloss` leaves out"
        raise ConfigError(said, hint="remove the table [memory.chunkedloss]")
