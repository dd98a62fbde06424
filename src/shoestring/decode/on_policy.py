"""On-policy distillation: in some steps the drafter learns from text that it has sampled itself (Agarwal et al., 2024).

A drafter that reads the data alone never sees what follows its own mistakes, and when it drafts, it reads little else.
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
from shoestring.decode.settings import Sampling
from shoestring.models.distillation import counted
from shoestring.models.sample_cache import sample_keys

if TYPE_CHECKING:
    from shoestring.core.job import Job
    from shoestring.decode.distill import Distill

LABELS = "labels"
"""Transformers' name of targets that are the inputs themselves: position t is scored against label t + 1."""


class Texts(NamedTuple):
    """The text of each sample of a batch, and which of its tokens count."""

    tokens: Tensor
    """(B, T + 1), int64: the inputs, and the last target where it is not one of them."""
    counted: Tensor
    """(B, T + 1), bool; the first token of a text never counts."""


class OnPolicy:
    """Has the job's model read its own text in place of the batch's, in a fraction of the steps.

    Which steps those are follows from their numbers, and what is sampled from the sample and the number of the step: a
    run that resumes repeats it, and neither accumulation nor the number of ranks changes it.
    """

    def __init__(self, job: Job, settings: Distill) -> None:
        self.job, self.settings = job, settings
        self._forward = job.forward
        self._adapter: Adapter | None = None
        self._newest: tuple[Batch, Batch] | None = None
        job.forward = self.forward

    def forward(self, model: nn.Module, batch: Batch) -> Output:
        """See `core.job.Job.forward`."""
        job, began = self.job, time.perf_counter()
        if model is not job.model or not model.training:  # a teacher, or an evaluation
            return self._forward(model, batch)
        self._newest = None
        if uniform(0, Purpose.TEXT, job.progress.step) < self.settings.on_policy:
            with span("sampling", "compute"):
                self._newest = batch, self.written(batch)
            job.numbers["sampling_seconds"] = time.perf_counter() - began
        return self._forward(model, self.read(batch))

    def read(self, batch: Batch) -> Batch:
        """What the model has read in place of the newest `batch`: itself, or its own text."""
        return self._newest[1] if self._newest is not None and self._newest[0] is batch else batch

    def written(self, batch: Batch) -> Batch:
        """The batch with the drafter's own tokens in place of those that count, behind the prompt of each sample."""
        texts = texts_of(batch)
        width, least = texts.tokens.shape[1], max(1, round(self.settings.prompt * texts.tokens.shape[1]))
        keys = [int.from_bytes(each[:7]) for each in sample_keys(batch)]
        requests: dict[int, Request] = {}
        for row, (tokens, flags) in enumerate(zip(texts.tokens.tolist(), texts.counted.tolist(), strict=True)):
            begin = max(least, flags.index(True)) if True in flags else width
            end = width - flags[::-1].index(True) if True in flags else 0
            if begin < end:
                sampling = Sampling(seed=key(keys[row], Purpose.TEXT, self.job.progress.step) >> 1)
                requests[row] = Request(tokens=tokens[:begin], max_new=end - begin, sampling=sampling)
        tokens, counts = texts.tokens.clone(), texts.counted.clone()
        for row, text in zip(requests, self._continued(list(requests.values()), width - 1), strict=True):
            begin = len(requests[row].tokens)
            tokens[row, begin : begin + len(text)] = tokens.new_tensor(text)
            counts[row, :begin] = False
        return _batch(batch, Texts(tokens, counts))

    def _continued(self, requests: list[Request], context: int) -> list[list[int]]:
        """What the drafter samples behind each prompt, all at the same time."""
        if not requests:
            return []
        if self._adapter is None or self._adapter.context < context:
            self._adapter = adapt(self.job.module, context)
        engine = Engine(self._adapter, slots=len(requests), room=context)
        try:
            rows = [engine.submit(request) for request in requests]
            while engine.busy:
                engine.step()
        finally:
            engine.close()
            torch.clear_autocast_cache()  # what was cast here, outside of autograd, has no gradient
        for row in rows:
            if row.error is not None:
                raise row.error
        return [row.text for row in rows]


def texts_of(batch: Batch) -> Texts:
    """The texts of a batch whose targets are the tokens that follow its inputs.

    Raises:
        ConfigError: they are other ones, or the batch has another form.
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
            "on-policy distillation continues text, and the targets are not the tokens that follow the inputs",
            hint="set on_policy = 0",
        )
    return Texts(torch.cat((inputs, targets[:, -1:].clamp_min(0)), 1), torch.cat((none, counts), 1))


def _batch(like: Batch, texts: Texts) -> Batch:
    """A batch of the form of `like`."""
    entries, first, second = _entries(like)
    targets = torch.where(texts.counted, texts.tokens, IGNORED)
    if second == LABELS:
        entries |= {first: texts.tokens, second: targets}
    else:
        entries |= {first: texts.tokens[:, :-1], second: targets[:, 1:]}
    return entries if isinstance(like, Mapping) else tuple(entries.values())


def _entries(batch: Batch) -> tuple[dict[Any, Tensor], Any, Any]:
    """The entries of a batch, and the names of those that the model reads and that count, as `core.task` takes them."""
    entries = dict(batch) if isinstance(batch, Mapping) else dict(enumerate(batch))
    first, second = (
        next(name for name in names if name in entries)
        for names in (("inputs", "input_ids", 0), ("targets", LABELS, 1))
    )
    return entries, first, second
