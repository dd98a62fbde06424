"""A feature for tests that reads each text of a batch as a pair: its first half is chosen, its second half rejected."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from shoestring.core.feature import Feature, Seam
from shoestring.core.task import cross_entropy
from shoestring.data.preferences import ANSWERS, KINDS


@dataclass(frozen=True, kw_only=True)
class Paired(Feature):
    """Numbers the answers of batches that have none."""

    rated: bool = False
    """Whether a sample is one rated answer and one to another prompt, in place of a pair."""

    seams: ClassVar = (Seam.STEP,)

    def apply(self, attachments, seam):
        """Evaluation keeps the loss of the text, by which the suite compares jobs."""
        forward, loss, own = attachments.forward, attachments.loss, attachments.task_loss

        def numbered(batch):
            return self.numbered(batch) if attachments.module.training else batch

        attachments.forward = lambda model, batch: forward(model, numbered(batch))
        attachments.exits.callback(setattr, attachments, "forward", forward)
        attachments.loss = lambda output, batch: loss(output, numbered(batch))
        attachments.task_loss = cross_entropy
        attachments.exits.callback(setattr, attachments, "task_loss", own)

    def numbered(self, batch):
        targets = batch["targets"]
        half = torch.arange(targets.shape[1], device=targets.device) >= targets.shape[1] // 2
        kinds = torch.where(half, 2 if self.rated else 1, 0).expand(len(targets), -1)
        if self.rated:  # every other answer is undesirable
            odd = (torch.arange(len(targets), device=targets.device) % 2 == 1)[:, None]
            kinds = torch.where(odd & (kinds == 0), 1, kinds)
        assert kinds.max() < KINDS
        # Answers are numbered by the tokens themselves, one place before the targets.
        return {**batch, ANSWERS: torch.cat((kinds[:, :1], kinds[:, :-1]), 1)}
