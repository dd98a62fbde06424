"""Settings of the chunked cross-entropy, which never holds the logits of a whole batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from shoestring.core.errors import ConfigError, ConflictError
from shoestring.core.feature import Feature, Reduction, Seam

if TYPE_CHECKING:
    from shoestring.core.attachments import Attachments
    from shoestring.core.trace import Trace


@dataclass(frozen=True, kw_only=True)
class ChunkedLoss(Feature):
    """Cross-entropy in chunks of tokens: the head and the loss are computed, forward and backward, for some tokens at a
    time, so that the logits of a whole batch, often the largest tensor, are never held in memory."""

    tokens: int = 1024
    """Number of tokens whose logits are held at a time; fewer tokens take less memory and, below some hundred, more
    time."""

    seams: ClassVar = (Seam.MODEL, Seam.LOSS)

    def check(self, attachments: Attachments) -> None:
        from shoestring.core.task import cross_entropy
        from shoestring.models.loss_in_head import head_of

        if self.tokens < 1:
            raise ConfigError(f"`{self.name}.tokens` must be at least 1, got {self.tokens}")
        if attachments.loss is not cross_entropy:
            raise ConfigError(f"`{self.name}` computes the cross-entropy, and this run has a loss of its own")
        for other in attachments.features:
            if other is not self and Seam.LOSS in other.seams:
                raise ConflictError(f"`{other.name}` needs logits for its loss, which `{self.name}` never holds")
        if head_of(attachments.module) is None:
            hint = "it must be `head`, `lm_head`, or what `get_output_embeddings` returns"
            raise ConfigError(f"`{self.name}` finds no linear head in {type(attachments.module).__name__}", hint=hint)

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        from shoestring.memory.chunked_loss import ChunkedLossInHead

        in_head = attachments.carry(self, lambda: ChunkedLossInHead(attachments, self.tokens))
        if seam is Seam.LOSS:
            attachments.loss = in_head.loss

    def reduction(self, trace: Trace) -> Reduction | None:
        used, without = trace.facts.get("chunk_tokens", 0), trace.facts.get("loss_tokens", 0)
        return Reduction(
            unit="tokens whose logits are held",
            used=used,
            without=without,
            measured=True,
            cost="none but the launches of more, smaller kernels",
        )
