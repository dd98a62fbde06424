"""Computes losses inside a language model's output layer (head), so that the logits of a whole batch never exist in
memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shoestring._torch import is_fake
from shoestring.core.attachments import Attachments
from shoestring.core.errors import ConfigError
from shoestring.core.task import Batch
from shoestring.models.distillation import targets_of
from shoestring.models.gpt import GPT

Compute = Callable[[Tensor, Tensor, Tensor | None, Tensor], Any]
"""(hidden (B, T, C), weight (V, C), bias (V,) or None, targets (B, T)) -> the value that the model returns in place of
logits."""


def head_of(model: nn.Module) -> nn.Module | None:
    """The layer that computes a model's logits: a plain linear layer, or a tied embedding; None if there is none."""
    if isinstance(model, GPT):
        return model.embed if model.head is None else model.head
    own: Any = getattr(model, "get_output_embeddings", None)
    head = own() if callable(own) else getattr(model, "lm_head", getattr(model, "head", None))
    return head if isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward else None


class LossInHead:
    """Replaces the forward pass of a model's head by a call of `compute` with the hidden states, the weight and the
    targets.

    The loss is computed inside the head's forward pass because FSDP2 gathers the weight before that pass and shards it
    again afterwards.

    Args:
        wanted: (model, batch) -> whether the head computes the loss in this forward pass; otherwise it computes logits.
        remove: hint in error messages that says how to turn this loss off.

    Raises:
        ConfigError: the model changes its logits after the head.
    """

    def __init__(
        self, attachments: Attachments, compute: Compute, wanted: Callable[[nn.Module, Batch], bool], remove: str
    ) -> None:
        head = head_of(attachments.module)
        assert head is not None
        if not returns_head(attachments.module, head):
            kind = type(attachments.module).__name__
            raise ConfigError(
                f"{kind} changes its logits after the head, which a loss computed in the head would leave out",
                hint=remove,
            )
        self.attachments, self.head, self.inner, self.wanted, self.remove = attachments, head, compute, wanted, remove
        self.targets: Tensor | None = None  # targets of the micro-batch whose forward pass runs
        name = "logits" if isinstance(head, nn.Embedding) else "forward"
        self.own: Callable[[Tensor], Tensor] = getattr(head, name)
        if name == "forward":
            attachments.patch(head, self.compute)
        else:
            setattr(head, name, self.compute)
            attachments.exits.callback(delattr, head, name)
        self.forward = attachments.forward
        attachments.forward = self.with_targets
        attachments.exits.callback(setattr, attachments, "forward", self.forward)

    def with_targets(self, model: nn.Module, batch: Batch) -> Any:
        """The job's forward pass; while it runs, `targets` holds the targets of the batch, so that the head computes
        the loss."""
        self.targets = targets_of(batch) if self.wanted(self.attachments.module, batch) else None
        try:
            return self.forward(model, batch)
        finally:
            self.targets = None

    def compute(self, hidden: Tensor) -> Any:
        """The head's forward pass: returns logits, or the result of `inner` if there are targets."""
        if self.targets is None:
            return self.own(hidden)
        if hidden.shape[:-1] != self.targets.shape:
            tokens, targets = tuple(hidden.shape[:-1]), tuple(self.targets.shape)
            message = f"tokens of the shape {tokens} reach the head, and targets have {targets}"
            raise ConfigError(message, hint=self.remove)
        layer: Any = self.head
        return self.inner(hidden, layer.weight, getattr(layer, "bias", None), self.targets)


@torch.no_grad()
def returns_head(model: nn.Module, head: nn.Module) -> bool:
    """Whether the model returns the output of its head unchanged, without a cap or a scale; found out by running the
    model on two tokens."""
    if isinstance(model, GPT):
        return True
    outputs: list[Any] = []
    hook = head.register_forward_hook(lambda module, args, output: outputs.append(output))
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        output = model(torch.tensor([[1, 2]], device=next(model.parameters()).device))
    finally:
        hook.remove()
        for module, training in modes.items():
            module.training = training
    logits = output if isinstance(output, Tensor) else output.logits
    alike = len(outputs) == 1 and outputs[0].shape == logits.shape
    return alike and (is_fake(logits) or torch.equal(outputs[0], logits))  # fake tensors have no values
