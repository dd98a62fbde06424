"""The settings of generation: how tokens are sampled and drafted ahead, and how a drafter learns; free of torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self, get_args

from shoestring.core.errors import ConfigError, ConflictError
from shoestring.core.feature import Curve, Feature, Reduction, Seam, Table

if TYPE_CHECKING:
    from shoestring.core.job import Job
    from shoestring.core.trace import Trace

Verification = Literal["token", "block", "invariant"]
Passes = Literal["auto", "plain", "graphs", "compiled"]

LOOKUP, SKIP = "lookup", "skip"
"""Drafters that are no model's name: prompt lookup, and the model itself without some of its sublayers."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is sampled from the model's logits.

    The order is: repetition penalty, temperature, top-k, top-p, min-p; each sees what the ones before it left.

    Raises:
        ConfigError: a value out of range.
    """

    temperature: float = 1.0
    """Sampling temperature, which divides the logits: lower is more predictable, 0 takes the likeliest token."""
    top_k: int = 0
    """Number of likeliest tokens to sample from; 0 samples from all."""
    top_p: float = 1.0
    """Total probability of the likeliest tokens to sample from (nucleus sampling); 1 samples from all."""
    min_p: float = 0.0
    """Least probability of a token that may be sampled, as a fraction of the likeliest token's; 0 samples from all."""
    repetition_penalty: float = 1.0
    """Penalty on tokens that the prompt or the text already holds: their logits are divided by it where positive and
    multiplied by it where negative; 1 is no penalty, larger values repeat less."""
    seed: int = 0
    """Seed of the sampling; the same seed gives the same text."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            _refuse("temperature", self.temperature, "give 0 for the likeliest token, or a positive number")
        if self.top_k < 0:
            _refuse("top_k", self.top_k, "give 0 for all tokens, or a positive number")
        if not 0 < self.top_p <= 1:
            _refuse("top_p", self.top_p, "give a number above 0, at most 1")
        if not 0 <= self.min_p <= 1:
            _refuse("min_p", self.min_p, "give a number from 0 to 1")
        if not 0 < self.repetition_penalty < math.inf:
            _refuse("repetition_penalty", self.repetition_penalty, "give a positive number; 1 is no penalty")
        if not 0 <= self.seed < 2**63:
            _refuse("seed", self.seed, "give an integer from 0, below 2**63")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken, so that nothing is drawn."""
        return self.temperature == 0 or self.top_k == 1


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """Speculative decoding: a cheap drafter proposes tokens, and the model verifies several of them in one pass.

    Whatever the drafter proposes, the text follows the model's own distribution.

    Raises:
        ConfigError: a value out of range.
    """

    drafter: str = ""
    """Proposes the tokens: the name or folder of a smaller model with the same vocabulary, `lookup` (continuations of
    repeated passages of the prompt and the text) or `skip` (the model itself without some sublayers); by default
    nothing is drafted."""
    drafter_dtype: Literal["own", "model"] = "own"
    """Data type of the weights of a smaller model that drafts: that of its files (`own`), or that of the model that
    verifies (`model`); the narrower one is read faster."""
    draft_length: int = 0
    """Number of tokens to draft before each pass of the model; 0 chooses it from measured acceptance and cost, and
    drafts nothing where that is faster."""
    max_draft_length: int = 16
    """Largest number of tokens to draft before one pass; bounds the automatic choice and the memory of a pass."""
    verification: Verification = "invariant"
    """Rule that decides which drafted tokens stay. Each keeps the model's distribution: `invariant` also gives, at the
    same seed, the text that the model gives without drafts; `token` and `block` may give another text of the same
    distribution and accept somewhat more tokens of a drafter that samples, `block` the most."""

    def __post_init__(self) -> None:
        if self.max_draft_length < 1:
            _refuse("max_draft_length", self.max_draft_length, "give a positive number")
        if not 0 <= self.draft_length <= self.max_draft_length:
            _refuse("draft_length", self.draft_length, f"give 0 to choose it, or up to {self.max_draft_length}")
        if self.verification not in get_args(Verification):
            _refuse("verification", self.verification, "give `token`, `block` or `invariant`")
        if self.drafter_dtype not in ("own", "model"):
            _refuse("drafter_dtype", self.drafter_dtype, "give `own` or `model`")


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
    text, and no cache is used for it. A larger one trains for what is drafted, and such steps take several times as
    long."""
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
    def seams(self) -> tuple[Seam, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
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


def _refuse(name: str, value: object, hint: str) -> None:
    raise ConfigError(f"{name} is {value}", hint=hint)
