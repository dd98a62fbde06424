"""On-policy distillation: in some steps the drafter learns from text that it has sampled itself (Agarwal et al., 2024).

A drafter that is trained only on the data never sees text that continues its own mistakes, but it meets such text
whenever it drafts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from shoestring.core.errors import ConfigError
from shoestring.core.task import IGNORED, Batch, Output
from shoestring.core.trace import span
from shoestring.decode.adapter import Adapter, adapt
from shoestring.decode.engine import Engine
from shoestring.decode.randomness import Purpose, key, uniform
from shoestring.decode.request import Request
from shoestring.decode.settings.generation import Sampling
from shoestring.models.distillation import counted
from shoestring.models.sample_cache import sample_keys

if TYPE_CHECKING:
    from shoestring.core.attachments import Attachments
    from shoestring.decode.distill import Distill

LABELS = "labels"
"""Transformers' name for targets that are not shifted: the prediction at position t is scored against label t + 1."""


class Texts(NamedTuple):
    """The texts of a batch, and which of their tokens count in the loss."""

    tokens: Tensor
    """(B, T + 1), int64: the inputs and the last target; (B, T) if the targets are not shifted."""
    counted: Tensor
    """Whether each token counts in the loss: bool, of the shape of `tokens`. The first token of a text never counts."""


class OnPolicy:
    """Replaces the text of the batch by text that the job's model samples, in a fraction of the steps.

    The number of a step alone decides whether the step samples text, and the random numbers depend only on the sample
    and the number of the step. A resumed run therefore samples the same texts in the same steps, and neither gradient
    accumulation nor the number of ranks changes them.
    """

    def __init__(self, attachments: Attachments, settings: Distill) -> None:
        self.attachments, self.settings = attachments, settings
        self._forward = attachments.forward
        self._adapter: Adapter | None = None
        self._newest: tuple[Batch, Batch] | None = None
        attachments.forward = self.forward

    def forward(self, model: nn.Module, batch: Batch) -> Output:
        """Run the model on a batch, after replacing the batch's text if this step samples (see
        `core.job.Job.forward`)."""
        attachments, began = self.attachments, time.perf_counter()
        if model is not attachments.model or not model.training:  # a teacher's pass, or an evaluation
            return self._forward(model, batch)
        self._newest = None
        if uniform(0, Purpose.TEXT, attachments.progress.step) < self.settings.on_policy:
            with span("sampling", "compute"):
                self._newest = batch, self.written(batch)
            attachments.numbers["sampling_seconds"] = time.perf_counter() - began
        return self._forward(model, self.read(batch))

    def read(self, batch: Batch) -> Batch:
        """The batch that the model has read in place of `batch`: the version with sampled text if there is one, else
        `batch` itself."""
        return self._newest[1] if self._newest is not None and self._newest[0] is batch else batch

    def written(self, batch: Batch) -> Batch:
        """Copy a batch; after the prompt of each sample, sampled tokens replace the tokens that count in the loss."""
        texts = texts_of(batch)
        width, least = texts.tokens.shape[1], max(1, round(self.settings.prompt_fraction * texts.tokens.shape[1]))
        keys = [int.from_bytes(digest[:7]) for digest in sample_keys(batch)]
        requests: dict[int, Request] = {}
        for row, (tokens, flags) in enumerate(zip(texts.tokens.tolist(), texts.counted.tolist(), strict=True)):
            begin = max(least, flags.index(True)) if True in flags else width
            end = width - flags[::-1].index(True) if True in flags else 0
            if begin < end:
                sampling = Sampling(seed=key(keys[row], Purpose.TEXT, self.attachments.progress.step) >> 1)
                requests[row] = Request(tokens=tokens[:begin], max_new=end - begin, sampling=sampling)
        tokens, counts = texts.tokens.clone(), texts.counted.clone()
        for row, text in zip(requests, self._continued(list(requests.values()), width - 1), strict=True):
            begin = len(requests[row].tokens)
            tokens[row, begin : begin + len(text)] = tokens.new_tensor(text)
            counts[row, :begin] = False
        return _batch(batch, Texts(tokens, counts))

    def _continued(self, requests: list[Request], context: int) -> list[list[int]]:
        """Sample a continuation of each prompt, all in one batch."""
        if not requests:
            return []
        if self._adapter is None or self._adapter.context < context:
            self._adapter = adapt(self.attachments.module, context)
        engine = Engine(self._adapter, slots=len(requests), room=context)
        try:
            rows = [engine.submit(request) for request in requests]
            while engine.busy:
                engine.step()
        finally:
            engine.close()
            torch.clear_autocast_cache()  # weights cached here, outside of autograd, would get no gradient
        for row in rows:
            if row.error is not None:
                raise row.error
        return [row.text for row in rows]


def texts_of(batch: Batch) -> Texts:
    """Extract the texts of a batch whose targets are the next tokens of its inputs.

    Raises:
        ConfigError: the targets are not the next tokens of the inputs, or the batch does not hold token ids (B, T).
    """
    entries, first, second = _entries(batch)
    inputs, targets, counts = entries[first], entries[second], counted(batch)
    if inputs.ndim != 2 or inputs.shape != targets.shape:
        raise ConfigError("on-policy distillation needs batches of token ids (B, T)", hint="set on_policy = 0")
    none = torch.zeros_like(counts[:, :1])
    if second == LABELS:
        return Texts(inputs, torch.cat((none, counts[:, :-1]), 1))
    if (inputs[:, 1:] != targets[:, :-1])[counts[:, :-1]].any():
        raise ConfigError(
            "on-policy distillation continues text, but the targets are not the tokens that follow the inputs",
            hint="set on_policy = 0",
        )
    return Texts(torch.cat((inputs, targets[:, -1:].clamp_min(0)), 1), torch.cat((none, counts), 1))


def _batch(like: Batch, texts: Texts) -> Batch:
    """Build a batch of texts with the structure of `like`."""
    entries, first, second = _entries(like)
    targets = torch.where(texts.counted, texts.tokens, IGNORED)
    if second == LABELS:
        entries |= {first: texts.tokens, second: targets}
    else:
        entries |= {first: texts.tokens[:, :-1], second: targets[:, 1:]}
    return entries if isinstance(like, Mapping) else tuple(entries.values())


def _entries(batch: Batch) -> tuple[dict[Any, Tensor], Any, Any]:
    """The entries of a batch, and the names of its inputs and its targets, by the rules of `core.task`."""
    entries = dict(batch) if isinstance(batch, Mapping) else dict(enumerate(batch))
    first, second = (
        next(name for name in names if name in entries)
        for names in (("inputs", "input_ids", 0), ("targets", LABELS, 1))
    )
    return entries, first, second
