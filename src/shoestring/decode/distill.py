"""The settings of the distillation of drafters; free of torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from shoestring.core.errors import ConfigError, ConflictError
from shoestring.core.feature import Curve, Feature, Reduction, Seam, Table

if TYPE_CHECKING:
    from shoestring.core.job import Job
    from shoestring.core.trace import Trace


@dataclass(frozen=True, kw_only=True)
class Distill(Feature):
    """Train a drafter by distillation: the loss is the divergence from the model that it drafts for, the teacher, of
    all tokens or of those that still can be learned (AdaSPEC, Hu et al., 2025)."""

    teacher: str = ""
    """Model that the drafter drafts for, with the same tokenizer: a run folder, a model folder or `hf:NAME`."""
    reference: str = ""
    """Drafter that was distilled on all tokens, by which tokens are selected: those whose divergence from the teacher
    is most above the reference's. Without one every token counts; `shoestring distill` makes it first."""
    fraction: float = 0.4
    """Fraction of the tokens that are selected, where there is a reference; a smaller one spends the drafter's capacity
    on fewer tokens. 1 selects all."""
    objective: Literal["kl", "reverse_kl", "tv", "hybrid"] = "kl"
    """Divergence from the teacher: forward Kullback-Leibler (`kl`), `reverse_kl`, which spends the drafter's capacity
    on the teacher's likeliest tokens, total variation (`tv`), which is the probability that a draft is rejected, or
    `hybrid`, which turns from `kl` to `tv` as acceptance grows."""
    temperature: float = 1.0
    """Temperature of both distributions: above 1, the teacher's small probabilities count for more."""
    on_policy: float = 0.0
    """Fraction of the steps that learn from text which the drafter samples itself, with its present weights, behind the
    first tokens of each sample (λ of generalized knowledge distillation, Agarwal et al., 2024); the teacher reads that
    text, whatever is cached. A larger one trains for what is drafted, and such steps take several times as long."""
    prompt: float = 0.25
    """Fraction of a sample that the drafter is given where it samples the rest. A chat's prompt, which does not count,
    is given whole."""
    cache: str = ""
    """Folder that keeps what the teacher says on disk by sample, so that later epochs and runs do without the
    teacher; a relative path lies in the run folder, an absolute one is shared by runs. By default nothing is kept."""
    top_k: int = 32
    """Number of likeliest tokens that the cache keeps of each distribution, with their probabilities: 4 bytes each
    (6 above 65,536 words)."""
    drawn: int = 64
    """Number of other tokens that the cache draws at random from each distribution, 2 bytes each (4 above 65,536
    words): they stand for all others in `kl`. More make gradients less noisy. 0 takes all others as one outcome, as
    `tv` does in any case."""

    @property
    def seams(self) -> tuple[Seam, ...]:  # pyrefly: ignore[bad-override]
        """STEP where tokens are selected, by a threshold that follows the steps."""
        return (Seam.MODEL, Seam.LOSS, Seam.STEP) if self.reference else (Seam.MODEL, Seam.LOSS)

    def placed(self, folder: Path) -> Self:
        return replace(self, cache=str(folder / self.cache)) if self.cache else self

    def check(self, job: Job) -> None:
        if not self.teacher:
            raise ConfigError(f"`{self.name}.teacher` names no model", hint="name the model to draft for")
        if not 0 < self.fraction <= 1:
            raise ConfigError(f"`{self.name}.fraction` must lie in (0, 1], got {self.fraction}")
        if not 0 < self.temperature < math.inf:
            raise ConfigError(f"`{self.name}.temperature` must be positive, got {self.temperature}")
        if not 0 <= self.on_policy <= 1:
            raise ConfigError(f"`{self.name}.on_policy` must lie in [0, 1], got {self.on_policy}")
        if not 0 <= self.prompt < 1:
            raise ConfigError(f"`{self.name}.prompt` must lie in [0, 1), got {self.prompt}")
        if self.on_policy and job.engine == "fsdp":
            raise ConflictError(
                f"`{self.name}.on_policy` generates with the whole model on each rank, and FSDP shards it",
                hint="train with [parallel.ddp], or set on_policy = 0",
            )
        for name, least in (("top_k", 1), ("drawn", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"`{self.name}.{name}` must be at least {least}, got {getattr(self, name)}")
        for other in job.features:
            if other is not self and Seam.LOSS in other.seams:
                raise ConflictError(
                    f"`{self.name}` trains on the teacher alone, and `{other.name}` changes the loss too",
                    hint=f"remove the table [{self.name}] or [{other.name}]",
                )
        from shoestring.models.distillation import check_vocabulary

        for role, source in (("teacher", self.teacher), ("reference", self.reference)):
            if source:
                check_vocabulary(job.module, source, f"{self.name}.{role}")

    def apply(self, job: Job, seam: Seam) -> None:
        from shoestring.decode.distillation import install

        install(job, self, seam)

    def explain(self, job: Job) -> str:
        from shoestring.decode.distillation import explained

        return explained(job, self)

    def reduction(self, trace: Trace) -> Reduction | None:
        from shoestring.decode.distillation import reduction

        return reduction(trace, self)

    def report_items(self, trace: Trace) -> Sequence[Table | Curve]:
        shares = {"acceptance": "probability that a draft is accepted"}
        shares |= {"selected": "share of tokens selected"} if self.reference else {}
        sampling = {"sampling_seconds": "a micro-batch of the drafter's own text"}
        return (
            Curve(title="Acceptance of drafts in training", metrics=shares),
            Curve(title="Divergence from the teacher", metrics={"divergence": "all tokens"}, unit="nats a token"),
            Curve(title="Time of the teacher", metrics={"teacher_seconds": "a micro-batch"}, unit="s"),
            *([Curve(title="Time of sampling", metrics=sampling, unit="s")] if self.on_policy else []),
        )
