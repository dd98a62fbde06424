"""Selective distillation of a drafter, in a job: teacher, reference, the tokens that are selected, and the cache."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shoestring.core.feature import Phase, Reduction, Seam
from shoestring.core.frozen import Reference
from shoestring.core.task import Batch, Output
from shoestring.core.trace import span
from shoestring.decode.on_policy import OnPolicy
from shoestring.decode.selection import LEFT, RunningThreshold
from shoestring.models.distillation import KnownWords, counted, freeze_teacher, known_words, logits_of, token_losses
from shoestring.models.loading import outline
from shoestring.models.sample_cache import SampleCache, sample_keys

if TYPE_CHECKING:
    from shoestring.core.job import Job
    from shoestring.core.trace import Trace
    from shoestring.decode.distill import Distill

COMPUTED, CACHED = "samples that the teacher read", "samples of the teacher that were cached"
NARROW = 2**16
"""Words whose numbers take two bytes each in the cache."""


def install(job: Job, settings: Distill, seam: Seam) -> None:
    """Attach at MODEL, LOSS, and STEP."""
    attached = job.carry(settings, lambda: Distillation(job, settings))
    if seam is Seam.MODEL:
        attached.freeze()
    elif seam is Seam.LOSS:
        job.loss = attached.loss
        attached.begin_sampling()
    else:
        attached.follow()


def explained(job: Job, settings: Distill) -> str:
    """Who teaches, what that takes of memory, and what is selected and cached."""
    said = []
    for role in ("teacher", "reference"):
        if source := getattr(settings, role):
            module = job.frozen_modules.get(f"{settings.name}.{role}") or outline(source)
            parameters = [] if module is None else list(module.parameters())
            size = sum(parameter.numel() * parameter.element_size() for parameter in parameters) / 1e6
            count = f": {sum(map(torch.numel, parameters)):,} parameters, {size:,.1f} MB" if parameters else ""
            said.append(f"{role} `{source}`{count}")
    said.append(f"learns {f'{settings.fraction:.0%} of the' if settings.reference else 'all'} tokens")
    if settings.on_policy:
        said.append(f"samples the text of {settings.on_policy:.0%} of the steps itself")
    if settings.cache:
        words = f"the teacher's {settings.top_k} likeliest tokens and {settings.drawn} drawn ones"
        said.append(f"{words} are cached in `{settings.cache}`")
    return "; ".join(said)


def reduction(trace: Trace, settings: Distill) -> Reduction | None:
    """The samples that the teacher did not have to read."""
    computed, cached = (trace.facts.get(what, 0.0) for what in (COMPUTED, CACHED))
    if not computed + cached:
        return None
    cost = f"{settings.top_k} likeliest tokens and {settings.drawn} drawn ones in place of all; bytes on disk"
    return Reduction(
        unit="samples that the teacher reads", used=computed, without=computed + cached, measured=True, cost=cost
    )


class Distillation:
    """The loss of one job, in place of that of its task: the divergence from the teacher, of the selected tokens."""

    def __init__(self, job: Job, settings: Distill) -> None:
        self.job, self.settings = job, settings
        self.selected = RunningThreshold(settings.fraction, job.world.device)
        self.caches: dict[str, SampleCache] = {}
        self.own: OnPolicy | None = None

    def freeze(self) -> None:
        for role in ("teacher", "reference"):
            if source := getattr(self.settings, role):
                freeze_teacher(self.job, self._label(role), source)

    def begin_sampling(self) -> None:
        """Have the model read text of its own in the fraction of the steps that the settings ask for."""
        if self.settings.on_policy:
            self.own = OnPolicy(self.job, self.settings)

    def follow(self) -> None:
        """Set the threshold of the next step between the backward pass and the update of each one."""
        job = self.job
        alike = all(axis in job.replicas for axis in job.data_axes if job.world.axes.get(axis, 1) > 1)
        job.keep(self.settings.name, self.selected, across="same" if alike else "own")
        job.at(Phase.GRAD, lambda: self.selected.settle(job.world.group(job.replicas)))

    def loss(self, output: Output, batch: Batch) -> tuple[Tensor, Tensor]:
        """See `core.job.Job.loss`: the sum over the selected tokens, and their number.

        Of all tokens, as the released code of AdaSPEC divides by, the fraction would lower the learning rate as well.
        """
        settings, numbers, given = self.settings, self.job.numbers, batch
        batch = given if self.own is None else self.own.read(given)
        tokens, began = counted(batch), time.perf_counter()
        with torch.no_grad(), span("teacher", "compute"):
            teacher, reference = self._targets(batch, cached=bool(settings.cache) and batch is given)
        numbers["teacher_seconds"] = time.perf_counter() - began
        objective, temperature = settings.objective, settings.temperature
        found = token_losses(logits_of(output), teacher, objective=objective, temperature=temperature)
        weights, count = tokens.to(found.loss.dtype), tokens.sum()
        if reference is not None:
            selected = self.selected.select(found.divergence - reference, tokens)
            numbers["selected"] = selected.sum() / count
            weights = torch.where(selected, weights, LEFT * weights)
        for name, each in (("acceptance", found.acceptance), ("divergence", found.divergence)):
            numbers[name] = torch.where(tokens, each, 0).sum() / count
        return torch.where(tokens, weights * found.loss, 0).sum(), weights.sum()

    def _targets(self, batch: Batch, *, cached: bool) -> tuple[Tensor | KnownWords, Tensor | None]:
        """What the teacher says, and the divergence (...) of the reference from it, if there is a reference."""
        temperature = self.settings.temperature
        if not cached:
            if self.settings.cache:
                self._note(COMPUTED, len(counted(batch)))
            teacher = self._logits("teacher", batch)
            if not self.settings.reference:
                return teacher, None
            return teacher, token_losses(self._logits("reference", batch), teacher, temperature=temperature).divergence

        keys = sample_keys(batch)

        def known() -> dict[str, Tensor]:
            logits = self._logits("teacher", batch)
            narrow = torch.uint16 if logits.shape[-1] <= NARROW else torch.int32
            made = known_words(
                logits,
                min(self.settings.top_k, logits.shape[-1]),
                drawn=self.settings.drawn,
                seeds=[int.from_bytes(key[:7]) for key in keys],
                temperature=temperature,
            )
            tensors = {name: tensor for name, tensor in made._asdict().items() if tensor is not None}
            return {
                name: each.half() if each.is_floating_point() else each.to(narrow) for name, each in tensors.items()
            }

        teacher = KnownWords(**self._cached("teacher", keys, known))
        if not self.settings.reference:
            return teacher, None

        def divergence() -> dict[str, Tensor]:
            of = token_losses(self._logits("reference", batch), teacher, temperature=temperature)
            return {"divergence": of.divergence}

        return teacher, self._cached("reference", keys, divergence)["divergence"]

    def _cached(self, role: str, keys: list[bytes], compute: Any) -> dict[str, Tensor]:
        """What the cache has of these samples, on the job's device; else what `compute` gives, which is then cached.

        A batch of which any sample is missing is computed whole: its arithmetic does not depend on what is there.
        """
        cache = self._cache(role)
        missing = self._any(cache.missing(keys))
        if role == "teacher":
            self._note(COMPUTED if missing else CACHED, len(keys))
        if not missing:
            return {name: tensor.to(self.job.world.device) for name, tensor in cache.read(keys).items()}
        computed = compute()
        cache.write(keys, computed)
        return computed

    def _note(self, what: str, samples: int) -> None:
        facts = self.job.trace.facts
        facts[what] = facts.get(what, 0.0) + samples

    def _any(self, missing: bool) -> bool:
        """Whether samples are missing on any rank, where the teacher is sharded and runs on all ranks together."""
        if self.job.engine != "fsdp":
            return missing
        return any(answer == b"1" for answer in self.job.world.gather(b"1" if missing else b"0"))

    def _cache(self, role: str) -> SampleCache:
        """Opened at the first batch, under the job's autocast, whose type changes what a teacher says."""
        if role not in self.caches:
            kind = self.job.world.device.type
            autocast = str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else ""
            identity: Mapping[str, Any] = {
                "temperature": self.settings.temperature,
                "top_k": self.settings.top_k,
                "drawn": self.settings.drawn,
                "autocast": autocast,
                **{each: self._digest(each) for each in ("teacher", role)},
            }
            self.caches[role] = cache = SampleCache(Path(self.settings.cache), identity)
            self.job.exits.callback(cache.close)
        return self.caches[role]

    def _digest(self, role: str) -> str:
        reference = self.job.kept[f"frozen.{self._label(role)}"].state
        assert isinstance(reference, Reference)
        return reference.digest

    def _logits(self, role: str, batch: Batch) -> Tensor:
        module: nn.Module = self.job.frozen_modules[self._label(role)]
        return logits_of(self.job.forward(module, batch))

    def _label(self, role: str) -> str:
        return f"{self.settings.name}.{role}"
