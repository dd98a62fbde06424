"""Changes the model's logits before a token is drawn: biases, penalties for repetition, and masks of constraints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from shoestring.decode.request import Row


def changed(row: Row, drafted: Sequence[int], logits: Tensor) -> Tensor:
    """Apply a request's biases, penalties for presence and frequency, and constraint to logits (T, V).

    The repetition penalty is not applied here, but in `drawing.draw`.

    Args:
        drafted: T - 1 tokens that follow the text. The changes to a row of logits depend only on the tokens before it.
        logits: the model's logits after the text and after each drafted token; they are not modified.

    Raises:
        ConstraintError: the constraint allows no token, or can no longer be followed.
    """
    request, changes = row.request, row.request.changes
    bias = {token: value for token, value in changes.bias.items() if token < logits.shape[1]}
    if bias:
        tokens = torch.tensor(list(bias), dtype=torch.int64, device=logits.device)
        values = torch.tensor(list(bias.values()), dtype=logits.dtype, device=logits.device)
        logits = logits.index_add(1, tokens, values.expand(len(logits), -1))
    if changes.presence_penalty or changes.frequency_penalty:
        # A generated token is penalized once for its presence, and again for each of its occurrences.
        presence, frequency = changes.presence_penalty, changes.frequency_penalty
        counts = Counter(token for token in row.text if token < logits.shape[1])
        penalty = torch.zeros_like(logits)
        columns = torch.tensor(list(counts), dtype=torch.int64, device=logits.device)
        times = torch.tensor(list(counts.values()), dtype=logits.dtype, device=logits.device)
        penalty[:, columns] = presence + frequency * times
        for position, token in enumerate(drafted, start=1):
            if token < logits.shape[1]:
                penalty[position:, token] += frequency if counts[token] else presence + frequency
                counts[token] += 1
        logits = logits - penalty
    if request.constraint is not None:
        allowed = request.constraint.allowed(row.text, drafted, logits.shape[1])
        logits = logits.masked_fill(~allowed.to(logits.device), -torch.inf)
    return logits
