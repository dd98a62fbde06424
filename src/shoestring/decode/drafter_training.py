"""Selective distillation of a drafter as part of a job: teacher, reference, selection of tokens, and cache."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shoestring import figures
from shoestring.core.feature import Phase, Reduction, Seam
from shoestring.core.frozen import Reference
from shoestring.core.task import Batch, Output
from shoestring.core.trace import span
from shoestring.decode.on_policy import OnPolicy
from shoestring.decode.selection import LEFT, RunningThreshold
from shoestring.models.distillation import KnownWords, counted, freeze_teacher, known_words, logits_of, token_losses
from shoestring.models.loading import outline
from shoestring.models.sample_cache import SampleCache, must_compute, sample_keys

if TYPE_CHECKING:
    from shoestring.core.attachments import Attachments
    from shoestring.core.trace import Trace
    from shoestring.decode.distill import Distill

COMPUTED, CACHED = "samples that the teacher read", "samples of the teacher that were cached"
NARROW = 2**16
"""Largest vocabulary whose token ids fit into two bytes each in the cache."""


def install(attachments: Attachments, settings: Distill, seam: Seam) -> None:
    """Attach distillation to a job; called at the seams MODEL and LOSS, and at STEP if tokens are selected."""
    attached = attachments.carry(settings, lambda: Distillation(attachments, settings))
    if seam is Seam.MODEL:
        attached.freeze()
    elif seam is Seam.LOSS:
        attachments.loss = attached.loss
        attached.begin_sampling()
    else:
        attached.follow()


def explained(attachments: Attachments, settings: Distill) -> str:
    """A description for `shoestring check`: teacher and reference with their memory, which tokens are selected, and
    what is cached."""
    parts = []
    for role in ("teacher", "reference"):
        if source := getattr(settings, role):
            module = attachments.frozen_modules.get(f"{settings.name}.{role}") or outline(source)
            parameters = [] if module is None else list(module.parameters())
            size = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
            count = f": {sum(map(torch.numel, parameters)):,} parameters, {figures.memory(size)}" if parameters else ""
            parts.append(f"{role} `{source}`{count}")
    parts.append(f"learns {f'{figures.percent(settings.fraction)} of the' if settings.reference else 'all'} tokens")
    if settings.on_policy:
        parts.append(f"samples the text of {figures.percent(settings.on_policy)} of the steps itself")
    if settings.cache_folder:
        words = f"the teacher's {settings.top_k} likeliest tokens and {settings.drawn} drawn ones"
        parts.append(f"{words} are cached in `{settings.cache_folder}`")
    return "; ".join(parts)


def reduction(trace: Trace, settings: Distill) -> Reduction | None:
    """How many samples the teacher has read, and how many it would have read without the cache; None if no samples were
    counted."""
    computed, cached = (trace.facts.get(what, 0.0) for what in (COMPUTED, CACHED))
    if not computed + cached:
        return None
    cost = f"{settings.top_k} likeliest tokens and {settings.drawn} drawn ones in place of all; bytes on disk"
    return Reduction(
        unit="samples that the teacher reads", used=computed, without=computed + cached, measured=True, cost=cost
    )


class Distillation:
    """Replaces the loss of a job's task by the divergence from the teacher over the selected tokens."""

    def __init__(self, attachments: Attachments, settings: Distill) -> None:
        self.attachments, self.settings = attachments, settings
        self.selected = RunningThreshold(settings.fraction, attachments.world.device)
        self.caches: dict[str, SampleCache] = {}
        self.own: OnPolicy | None = None

    def freeze(self) -> None:
        """Load the teacher and the reference as frozen models."""
        for role in ("teacher", "reference"):
            if source := getattr(self.settings, role):
                freeze_teacher(self.attachments, self._label(role), source)

    def begin_sampling(self) -> None:
        """Replace text by samples from the model itself in a fraction `on_policy` of the steps."""
        if self.settings.on_policy:
            self.own = OnPolicy(self.attachments, self.settings)

    def follow(self) -> None:
        """Register the update of the selection threshold, after the backward pass of each step."""
        attachments = self.attachments
        alike = all(
            axis in attachments.replicas for axis in attachments.data_axes if attachments.world.axes.get(axis, 1) > 1
        )
        attachments.keep(self.settings.name, self.selected, across="same" if alike else "own")
        attachments.at(Phase.GRAD, lambda: self.selected.settle(attachments.world.group(attachments.replicas)))

    def loss(self, output: Output, batch: Batch) -> tuple[Tensor, Tensor]:
        """Compute the sum of the loss over the selected tokens, and their number (see `core.job.Job.loss`).

        The job divides the sum by the number of selected tokens. The released code of AdaSPEC divides by the number of
        all tokens, and so a smaller fraction also lowers its effective learning rate.
        """
        settings, numbers, original = self.settings, self.attachments.numbers, batch
        batch = original if self.own is None else self.own.read(original)
        tokens, began = counted(batch), time.perf_counter()
        with torch.no_grad(), span("teacher", "compute"):
            teacher, reference = self._targets(batch, cached=bool(settings.cache_folder) and batch is original)
        numbers["teacher_seconds"] = time.perf_counter() - began
        objective, temperature = settings.objective, settings.temperature
        losses = token_losses(logits_of(output), teacher, objective=objective, temperature=temperature)
        weights, count = tokens.to(losses.loss.dtype), tokens.sum()
        if reference is not None:
            selected = self.selected.select(losses.divergence - reference, tokens)
            numbers["selected"] = selected.sum() / count
            weights = torch.where(selected, weights, LEFT * weights)
        for name, values in (("acceptance", losses.acceptance), ("divergence", losses.divergence)):
            numbers[name] = torch.where(tokens, values, 0).sum() / count
        return torch.where(tokens, weights * losses.loss, 0).sum(), weights.sum()

    def _targets(self, batch: Batch, *, cached: bool) -> tuple[Tensor | KnownWords, Tensor | None]:
        """The teacher's distributions, and the reference's divergence from the teacher for each token; the latter is
        None without a reference."""
        temperature = self.settings.temperature
        if not cached:
            if self.settings.cache_folder:
                self._note(COMPUTED, len(counted(batch)))
            teacher = self._logits("teacher", batch)
            if not self.settings.reference:
                return teacher, None
            return teacher, token_losses(self._logits("reference", batch), teacher, temperature=temperature).divergence

        keys = sample_keys(batch)

        def known() -> dict[str, Tensor]:
            logits = self._logits("teacher", batch)
            narrow = torch.uint16 if logits.shape[-1] <= NARROW else torch.int32
            words = known_words(
                logits,
                min(self.settings.top_k, logits.shape[-1]),
                drawn=self.settings.drawn,
                seeds=[int.from_bytes(key[:7]) for key in keys],
                temperature=temperature,
            )
            tensors = {name: tensor for name, tensor in words._asdict().items() if tensor is not None}
            return {
                name: tensor.half() if tensor.is_floating_point() else tensor.to(narrow)
                for name, tensor in tensors.items()
            }

        teacher = KnownWords(**self._cached("teacher", keys, known))
        if not self.settings.reference:
            return teacher, None

        def divergence() -> dict[str, Tensor]:
            losses = token_losses(self._logits("reference", batch), teacher, temperature=temperature)
            return {"divergence": losses.divergence}

        return teacher, self._cached("reference", keys, divergence)["divergence"]

    def _cached(self, role: str, keys: list[bytes], compute: Any) -> dict[str, Tensor]:
        """Read the tensors of some samples from the cache to the job's device, or compute and cache the tensors of the
        whole batch.

        If any sample is missing, the whole batch is computed, so that results do not depend on which samples are
        cached.
        """
        cache = self._cache(role)
        missing = must_compute(cache, keys, self.attachments)
        if role == "teacher":
            self._note(COMPUTED if missing else CACHED, len(keys))
        if not missing:
            return {name: tensor.to(self.attachments.world.device) for name, tensor in cache.read(keys).items()}
        computed = compute()
        cache.write(keys, computed)
        return computed

    def _note(self, what: str, samples: int) -> None:
        facts = self.attachments.trace.facts
        facts[what] = facts.get(what, 0.0) + samples

    def _cache(self, role: str) -> SampleCache:
        """The cache of the teacher or the reference; it is opened at the first batch, under the job's autocast."""
        if role not in self.caches:
            kind = self.attachments.world.device.type
            autocast = str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else ""
            identity: dict[str, Any] = {
                "temperature": self.settings.temperature,
                "top_k": self.settings.top_k,
                "drawn": self.settings.drawn,
                "autocast": autocast,  # the data type of autocast changes the logits
            }
            for owner in ("teacher", role):
                reference = self.attachments.kept[f"frozen.{self._label(owner)}"].state
                assert isinstance(reference, Reference)
                identity[owner] = reference.digest
            self.caches[role] = cache = SampleCache(Path(self.settings.cache_folder), identity)
            self.attachments.exits.callback(cache.close)
        return self.caches[role]

    def _logits(self, role: str, batch: Batch) -> Tensor:
        module: nn.Module = self.attachments.frozen_modules[self._label(role)]
        return logits_of(self.attachments.forward(module, batch))

    def _label(self, role: str) -> str:
        return f"{self.settings.name}.{role}"
