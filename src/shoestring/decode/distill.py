"""Settings of the distillation of drafters; does not import torch.

This module is outside of the subpackage `settings` to avoid circular imports: distillation depends on generation, and
generation depends on `settings`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from shoestring.core.errors import ConfigError, ConflictError
from shoestring.core.feature import Curve, Feature, Reduction, Seam, Table

if TYPE_CHECKING:
    from shoestring.core.attachments import Attachments
    from shoestring.core.trace import Trace


@dataclass(frozen=True, kw_only=True)
class Distill(Feature):
    """Train a drafter by distillation. The loss is the drafter's divergence from its teacher, the model that it drafts
    for, over all tokens or only over tokens that the drafter can still learn (AdaSPEC, Hu et al., 2025)."""

    teacher: str = ""
    """Model that the drafter drafts for, with the same tokenizer: a run folder, a model folder or `hf:NAME`."""
    reference: str = ""
    """Drafter that was already distilled on all tokens, with which tokens are selected. The loss then counts only the
    tokens on which the trained drafter's divergence from the teacher exceeds the reference's by the most. Without a
    reference, every token counts; `shoestring distill` trains the reference first."""
    fraction: float = 0.4
    """Fraction of the tokens that are selected if there is a reference. A smaller fraction spends the drafter's
    capacity on fewer tokens; 1 selects all."""
    objective: Literal["kl", "reverse_kl", "tv", "hybrid"] = "kl"
    """Divergence from the teacher: forward Kullback-Leibler (`kl`), `reverse_kl`, which spends the drafter's capacity
    on the teacher's likeliest tokens, total variation (`tv`), which is the probability that a draft is rejected, or
    `hybrid`, which turns from `kl` to `tv` as acceptance grows."""
    temperature: float = 1.0
    """Temperature of the teacher's and the drafter's distributions; above 1, the teacher's small probabilities count
    for more."""
    on_policy: float = 0.0
    """Fraction of the steps that train on text sampled by the drafter itself, with its present weights, as a
    continuation of the first tokens of each sample (λ of generalized knowledge distillation, Agarwal et al., 2024). The
    teacher always reads such text, even if its outputs for the sample are cached. A larger fraction trains more on the
    kind of text that the drafter will draft; a step that samples takes several times as long."""
    prompt_fraction: float = 0.25
    """Fraction of a sample's tokens that form the prompt in a step that samples; the drafter samples the rest. The
    whole prompt of a chat, which does not count in the loss, is always part of this prompt."""
    cache_folder: str = ""
    """Folder that stores the teacher's outputs for each sample, so that later epochs and runs need not run the teacher.
    A relative path lies in the run folder; an absolute path can be shared by several runs. By default nothing is
    stored."""
    top_k: int = 32
    """Number of likeliest tokens of each distribution that are cached with their probabilities; each takes 4
    bytes (6 if the vocabulary is larger than 65,536)."""
    drawn: int = 64
    """Number of further tokens that are drawn at random from each distribution and cached; each takes 2 bytes (4 if the
    vocabulary is larger than 65,536). In `kl`, the drawn tokens stand for all tokens outside the top_k; more of them
    make gradients less noisy. 0 treats all tokens outside the top_k as one outcome, as `tv` always does."""

    @property
    def seams(self) -> tuple[Seam, ...]:  # pyrefly: ignore[bad-override]
        """The seams at which the feature is attached; STEP only to select tokens, because each step updates the
        threshold."""
        return (Seam.MODEL, Seam.LOSS, Seam.STEP) if self.reference else (Seam.MODEL, Seam.LOSS)

    @property
    def tokenizer_of(self) -> str:
        return self.teacher

    def placed(self, folder: Path) -> Self:
        return replace(self, cache_folder=str(folder / self.cache_folder)) if self.cache_folder else self

    def check(self, attachments: Attachments) -> None:
        if not self.teacher:
            raise ConfigError(f"`{self.name}.teacher` names no model", hint="name the model to draft for")
        for name, is_valid, rule in (
            ("fraction", 0 < self.fraction <= 1, "must lie in (0, 1]"),
            ("temperature", 0 < self.temperature < math.inf, "must be positive"),
            ("on_policy", 0 <= self.on_policy <= 1, "must lie in [0, 1]"),
            ("prompt_fraction", 0 <= self.prompt_fraction < 1, "must lie in [0, 1)"),
        ):
            if not is_valid:
                raise ConfigError(f"`{self.name}.{name}` {rule}, got {getattr(self, name)}")
        if self.on_policy and attachments.divided == "parameters":
            raise ConflictError(
                f"`{self.name}.on_policy` generates with the whole model on each rank, and FSDP shards it",
                hint="train with [parallel.ddp], or set on_policy = 0",
            )
        for name, least in (("top_k", 1), ("drawn", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"`{self.name}.{name}` must be at least {least}, got {getattr(self, name)}")
        for other in attachments.features:
            if other is not self and Seam.LOSS in other.seams:
                raise ConflictError(
                    f"`{self.name}` trains on the teacher alone, and `{other.name}` changes the loss too",
                    hint=f"remove the table [{self.name}] or [{other.name}]",
                )
        from shoestring.models.distillation import check_vocabulary

        for role, source in (("teacher", self.teacher), ("reference", self.reference)):
            if source:
                check_vocabulary(attachments.module, source, f"{self.name}.{role}")

    def apply(self, attachments: Attachments, seam: Seam) -> None:
        from shoestring.decode.drafter_training import install

        install(attachments, self, seam)

    def explain(self, attachments: Attachments) -> str:
        from shoestring.decode.drafter_training import explained

        return explained(attachments, self)

    def reduction(self, trace: Trace) -> Reduction | None:
        from shoestring.decode.drafter_training import reduction

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
