"""Drafters of the quickstart's GPT at equal steps: by cross-entropy, by distillation, and by selective distillation.

Learning rates are tuned equally: each method, and each fraction, takes the best of four on a seed that is not reported.
The fraction of the tokens that is selected is chosen on three seeds, and what is reported comes from five fresh ones.
The reference of a seed is the draft of all-token KL of that seed: the same initial weights, the same order of the data.
The target's likeliest tokens are cached once, for all runs. Every run is stored as one JSON file and never made twice.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from benchmarks.harness import Bar, Measured, stored
from benchmarks.intervals import of_mean
from benchmarks.training import ended, recipe, train_to_end
from shoestring.decode import Distill

if TYPE_CHECKING:
    from torch import nn

    from shoestring.core.task import Batch

TARGET_STEPS, STEPS, BATCH = 1000, 400, 4
TUNING_SEED, CHOOSING, CONFIRMING = 100, (1, 2, 3), (21, 22, 23, 24, 25)
RATES = (3e-3, 6e-3, 1.2e-2, 2.4e-2)
FRACTIONS = (0.4, 0.6, 0.8)
DRAFT = {"dim": 64, "layers": 2, "heads": 2, "kv_heads": 2, "hidden": 176}
HELD_OUT = 128
"""Held-out samples on which acceptance is measured: 32,768 tokens, the same for all runs."""
OWN_SEEDS, OWN_RATE = (11,), 6e-3
"""Of the runs on text that the draft samples itself, which take several times as long: not tuned, at KL's rate."""
STUDENT_95 = 2.776
"""Two-sided 95% quantile of t with 4 degrees of freedom."""

METHODS: Mapping[str, Mapping[str, Any] | None] = {
    "cross-entropy": None,
    "kl": {},
    "tv": {"objective": "tv"},
    "hybrid": {"objective": "hybrid"},
    "on-policy": {"on_policy": 0.5},
}
"""The settings of [decode.distill] beside teacher, cache and reference, for all tokens."""


@dataclass
class Drafters:
    """All runs; `check` raises when the time is up."""

    folder: Path
    cache: Path
    """Where the target, its cached tokens and the references are, which are too large to be stored beside the rows."""
    steps: int = STEPS
    rates: tuple[float, ...] = RATES
    check: Callable[[], None] = field(default=lambda: None)

    @cached_property
    def target(self) -> Path:
        """The folder of the target's run; trained now if it was not before."""
        folder = self.cache / f"target-{TARGET_STEPS}"
        if not ended(folder):
            self.check()
            document = recipe(TARGET_STEPS, seed=0)
            document["run"] |= {"folder": str(folder), "resume": "auto"}
            train_to_end(document, self.check)
        return folder

    def run(self, method: str, rate: float, seed: int, fraction: float = 1.0) -> dict[str, float]:
        """Acceptance on held-out text and held-out nats a token; the run is made now if it was not before."""
        name = f"{method}-{fraction:g}-{rate:g}-{seed}-{self.steps}"
        return stored(self.folder / f"{name}.json", self.check, lambda: self._make(method, rate, seed, fraction))

    def _make(self, method: str, rate: float, seed: int, fraction: float) -> dict[str, float]:
        settings, reference = METHODS[method], ""
        if fraction < 1:
            reference = str(self.reference(seed))
        document = recipe(self.steps, seed=seed, rate=rate)
        document["run"] |= {"data": str(self.target / "train.tokens"), "batch": BATCH}
        document["model"] = DRAFT
        if settings is not None:
            cached = {"teacher": str(self.target), "cache": str((self.cache / "teacher").absolute())}
            selection = {"reference": reference, "fraction": fraction}
            document["decode"] = {"distill": {**settings, **cached, **selection}}
        with TemporaryDirectory() as scratch:
            kept = self._reference(rate, seed) if (method, fraction) == ("kl", 1.0) else Path(scratch) / "run"
            document["run"] |= {"folder": str(kept), "resume": "auto"}
            metrics = train_to_end(document, self.check)
            return {"acceptance": held_out(kept, self.target), "nats": metrics["held_out_loss"]}

    def reference(self, seed: int) -> Path:
        """The folder of the draft of all-token KL."""
        rate = self.rate("kl")
        folder = self._reference(rate, seed)
        self.run("kl", rate, seed)
        if not ended(folder):  # stored, and its model is not in this cache
            self._make("kl", rate, seed, 1.0)
        return folder

    def _reference(self, rate: float, seed: int) -> Path:
        return self.cache / f"reference-{rate:g}-{seed}-{self.steps}"

    def rate(self, method: str, fraction: float = 1.0) -> float:
        """The best learning rate of a method on the seed for tuning."""
        return max(self.rates, key=lambda rate: self.run(method, rate, TUNING_SEED, fraction)["acceptance"])

    def acceptance(self, method: str, fraction: float = 1.0, seeds: Sequence[int] = CONFIRMING) -> list[float]:
        """One for each seed, in percent."""
        rate = self.rate(method, fraction)
        return [100 * self.run(method, rate, seed, fraction)["acceptance"] for seed in seeds]

    @cached_property
    def fraction(self) -> float:
        """The fraction below 1 with the highest mean acceptance on the seeds for choosing."""
        return max(FRACTIONS, key=lambda share: statistics.fmean(self.acceptance("kl", share, CHOOSING)))


def rows(ask: Callable[[], Drafters]) -> list[Bar]:
    """Every bar of distillation."""
    more = "points of acceptance on held-out text (E sum of min(p, q)), mean of 5 paired seeds,"

    def bar(name: str, what: str, value: float, measure: Callable[[Drafters], Measured], base: str) -> Bar:
        return Bar(
            f"decode.{name}", what, ">=", value,
            measure=lambda _: measure(ask()), baseline=base, seeds=CONFIRMING, kind="drawn",
        )  # fmt: skip

    return [
        bar(
            "distill-selective",
            "points of acceptance on held-out text (E sum of min(p, q)) that selective distillation adds to all-token "
            "KL at equal steps; mean of 5 paired seeds; +2 is the stretch",
            0.5,
            selective,
            "all-token KL, tuned equally",
        ),
        Bar(
            "decode.distill-on-policy",
            "points of acceptance on held-out text that learning from its own text in half of the steps adds to "
            f"all-token KL at equal steps and KL's learning rate; {len(OWN_SEEDS)} seed, no confirmation",
            ">=",
            0.0,
            measure=lambda _: own_text(ask()),
            baseline="all-token KL on the data",
            seeds=OWN_SEEDS,
            kind="drawn",
        ),
        Bar(
            "decode.distill-cached",
            "error of the gradient of KL from what the cache keeps of the teacher by default, as a share of the norm "
            "of the gradient of all words; 4,096 held-out tokens, at a trained draft",
            "<=",
            0.1,
            measure=lambda _: words_known(ask()),
            baseline="the likeliest words alone",
            kind="exact",
        ),
        bar(
            "distill-kl",
            f"{more} all-token KL above cross-entropy",
            0.0,
            lambda drafters: over("kl", "cross-entropy", drafters),
            "plain cross-entropy, tuned equally",
        ),
        bar(
            "distill-objective",
            f"{more} the better of total variation and the hybrid above all-token KL",
            0.0,
            objectives,
            "all-token KL, tuned equally",
        ),
    ]


def interval(mine: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """The mean of five paired differences, and its two-sided interval of 95%."""
    gaps = [one - other for one, other in zip(mine, theirs, strict=True)]
    mean, half = statistics.fmean(gaps), STUDENT_95 * statistics.stdev(gaps) / len(gaps) ** 0.5
    return mean, mean - half, mean + half


def selective(drafters: Drafters) -> Measured:
    fraction = drafters.fraction
    mine, theirs = drafters.acceptance("kl", fraction), drafters.acceptance("kl")
    mean, low, high = interval(mine, theirs)
    chosen = ", ".join(
        f"{share:g}: {statistics.fmean(drafters.acceptance('kl', share, CHOOSING)):.2f}%" for share in (*FRACTIONS, 1.0)
    )
    note = f"{mean:+.2f} points [{low:+.2f}, {high:+.2f}]: {statistics.fmean(mine):.2f}% at fraction {fraction:g} and "
    note += f"rate {drafters.rate('kl', fraction):g}, {statistics.fmean(theirs):.2f}% at rate {drafters.rate('kl'):g}; "
    note += f"by fraction, on the seeds for choosing: {chosen}; the target's likeliest tokens and a sample are cached"
    return Measured(mean, note, (low, high))


def over(method: str, other: str, drafters: Drafters) -> Measured:
    mine, theirs = drafters.acceptance(method), drafters.acceptance(other)
    mean, low, high = interval(mine, theirs)
    means = f"{statistics.fmean(mine):.2f}% and {statistics.fmean(theirs):.2f}%"
    return Measured(mean, f"{method} {mean:+.2f} points over {other}: {means}", (low, high))


def objectives(drafters: Drafters) -> Measured:
    found = [over(method, "kl", drafters) for method in ("tv", "hybrid")]
    best = max(found, key=lambda each: each.value)
    return Measured(best.value, "; ".join(each.note for each in found), best.interval)


def own_text(drafters: Drafters) -> Measured:
    mine, theirs = (
        [100 * drafters.run(method, OWN_RATE, seed)["acceptance"] for seed in OWN_SEEDS]
        for method in ("on-policy", "kl")
    )
    gaps = [one - other for one, other in zip(mine, theirs, strict=True)]
    each = ", ".join(f"{one:.2f}% and {other:.2f}%" for one, other in zip(mine, theirs, strict=True))
    note = f"with and without: {each}; acceptance after text of the data"
    return of_mean(gaps, note) if len(gaps) > 1 else Measured(gaps[0], note)


def words_known(drafters: Drafters) -> Measured:
    """How far gradients of all weights are off from those of all words, as a share of their norm."""
    import torch

    from shoestring.models.distillation import KnownWords, known_words, token_losses

    draft, target, text = opened(drafters.reference(TUNING_SEED), drafters.target)
    batches = [next(text)["inputs"] for _ in range(2)]
    tokens = torch.cat(batches)
    with torch.no_grad():
        wanted = target(tokens)

    def gradient(teacher: torch.Tensor | KnownWords) -> torch.Tensor:
        draft.zero_grad()
        token_losses(draft(tokens), teacher).loss.mean().backward()
        return torch.cat([weight.grad.flatten() for weight in draft.parameters() if weight.grad is not None])

    whole = gradient(wanted)
    settings = Distill()
    sampled = known_words(wanted, settings.top_k, drawn=settings.drawn, seeds=range(len(tokens)))
    forms = {f"{settings.top_k} words and {settings.drawn} drawn": sampled}
    for count in (64, 256):
        merged = known_words(wanted, count)
        divided = merged.log_probabilities.clone()
        divided[..., -1] = -torch.inf
        forms |= {f"{count} words, one outcome": merged}
        forms |= {f"{count} words, divided by their mass": KnownWords(merged.words, divided)}
    errors = {name: float((gradient(form) - whole).norm() / whole.norm()) for name, form in forms.items()}
    return Measured(next(iter(errors.values())), "; ".join(f"{name}: {error:.1%}" for name, error in errors.items()))


def opened(draft: Path, target: Path) -> tuple[nn.Module, nn.Module, Iterator[Batch]]:
    """Draft, target, and the held-out text that they are compared on."""
    from shoestring.data.loader import sweep
    from shoestring.data.tokens import TokenDataset
    from shoestring.models.loading import open_model

    text = TokenDataset(target / "held_out.tokens", 256, pad_last=True)
    return open_model(str(draft)), open_model(str(target)), sweep(text, batch=8, limit=HELD_OUT)


def held_out(draft: Path, target: Path) -> float:
    """E Σ min(p, q) of a draft on held-out text of its target."""
    from shoestring.models.distillation import acceptance

    total, count = acceptance(*opened(draft, target))
    return total / count
