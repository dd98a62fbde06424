"""The quickstart's GPT, trained and then made 2:4: at once, with a fixed mask, and by AST.

The dense model trains once, on 20 million tokens, and every fine-tuning starts from it, with a tenth of its steps. Runs
are stored as the contest's are; the dense run, in the cache, writes checkpoints and continues if it was stopped.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.harness import OutOfBudget, stored
from benchmarks.intervals import of_mean
from benchmarks.rows import Bar, Measured
from benchmarks.sparse.contest import TUNING_SEED, nats_of
from benchmarks.training import recipe, train_to_end

TOKENS_A_STEP = 8 * 256
PRETRAINING = 20_000_000 // TOKENS_A_STEP
SEEDS = (1, 2, 3)
RATES = (4e-4, 1e-3, 2.5e-3)
FIXED = {"refresh": 10**9, "masked_decay": 0.0}  # the mask that pruning at once takes, and nothing that moves it
WAYS: Mapping[str, Mapping[str, Any] | None] = {"continued": None, "ast": {}, "fixed": FIXED}
"""The settings of [sparse.ast]; None trains the dense model on. Learning rates are tuned for each."""
WITHOUT: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "ast-wanda": ("ast", {"metric": "wanda"}),
    "ast-without-slorb": ("ast", {"slorb": 0}),
    "ast-paper": ("ast", {"masked_decay": 6e-5, "masked_decay_scale": "none"}),
    "fixed-plain": ("fixed", FIXED | {"distillation": 0.0, "slorb": 0}),
}
"""Settings that differ in one thing from a way, with whose learning rate and first seed they run once."""


@dataclass
class FineTuning:
    """All runs; `check` raises when the time is up."""

    folder: Path
    cache: Path
    """Where the dense model is kept, which is too large to be stored beside the rows."""
    steps: int = PRETRAINING
    rates: tuple[float, ...] = RATES
    check: Callable[[], None] = field(default=lambda: None)

    @cached_property
    def dense(self) -> Path:
        """The folder of the dense run; trained now, or further, if it is not finished."""
        folder = self.cache / f"pretrained-{self.steps}"

        def make() -> dict[str, float]:
            document = recipe(self.steps, seed=0)
            document["run"] |= {"folder": str(folder), "resume": "auto"}
            document["checkpoint"] = {"tiered": {}}
            train_to_end(document, self.check)
            return {"steps": self.steps}

        stored(folder.with_suffix(".json"), self.check, make)
        return folder

    def at_once(self, metric: str) -> float:
        """Held-out nats a byte of the dense model, pruned without training; of itself where the metric is `dense`."""
        return stored(
            self.folder / f"{metric}-{self.steps}.json", self.check, lambda: {"nats": pruned(self.dense, metric)}
        )["nats"]

    def run(self, way: str, rate: float, seed: int) -> float:
        """Held-out nats a byte after a tenth of the steps."""
        steps = self.steps // 10
        settings = WITHOUT[way][1] if way in WITHOUT else WAYS[way]

        def make() -> dict[str, float]:
            return {"nats": tuned(self.dense, settings, rate, seed, steps)}

        return stored(self.folder / f"{way}-{rate:g}-{seed}-{steps}.json", self.check, make)["nats"]

    def rate(self, way: str) -> float:
        """The learning rate that is best on a seed of its own."""
        return min(self.rates, key=lambda rate: self.run(way, rate, TUNING_SEED))

    def nats(self, way: str) -> list[float]:
        """One for each seed."""
        return [self.run(way, self.rate(way), seed) for seed in SEEDS]

    def recovered(self, way: str) -> list[float]:
        """The share of what pruning at once costs, against the dense model continued, that fine-tuning wins back."""
        once = self.at_once("magnitude")
        return [
            (once - mine) / (once - dense) for mine, dense in zip(self.nats(way), self.nats("continued"), strict=True)
        ]

    @property
    def differing(self) -> dict[str, float]:
        """Nats a byte that settings of `WITHOUT` cost beyond the way that they differ from, on the first seed.

        Without those that there is no time for: no bar is about them.
        """
        found = {}
        for name, (way, _) in WITHOUT.items():
            with suppress(OutOfBudget):
                found[name] = self.run(name, self.rate(way), SEEDS[0]) - self.nats(way)[0]
        return found

    @property
    def table(self) -> str:
        once = {name: self.at_once(name) for name in ("dense", "magnitude", "wanda")}
        said = [f"{name} {value:.4f}" for name, value in once.items()]
        said += [f"{way} {statistics.fmean(self.nats(way)):.4f}" for way in WAYS]
        return "nats a byte, held out: " + ", ".join(said)


def pruned(dense: Path, metric: str) -> float:
    from shoestring.verbs.prune import prune
    from shoestring.verbs.settings import OneShotPruning

    with TemporaryDirectory() as folder:
        source = dense
        if metric != "dense":
            source = Path(folder) / "pruned"
            prune(str(dense), source, OneShotPruning(method="wanda" if metric == "wanda" else "magnitude"))
        return held_out(source)


def held_out(model: Path) -> float:
    """Nats a byte of the model in a folder on the recipe's held-out text."""
    from shoestring.core.trace import Trace
    from shoestring.core.world import World
    from shoestring.run import parse
    from shoestring.training.build import build_job
    from shoestring.training.data_loading import open_data
    from shoestring.training.evaluation import evaluate
    from shoestring.training.user_code import import_user_code

    with TemporaryDirectory() as folder:
        run = parse(starting_from(model, recipe(1, seed=0)), name="held out")
        code = import_user_code(run)
        data = open_data(run, World(), Path(folder), code)
        with build_job(run, code, World(), data, Trace()) as job:
            return evaluate(job, run.settings, data).values["held_out_bits_per_byte"] * math.log(2)


def tuned(dense: Path, settings: Mapping[str, Any] | None, rate: float, seed: int, steps: int) -> float:
    document = starting_from(dense, recipe(steps, seed=seed, rate=rate))
    return nats_of(document | ({} if settings is None else {"sparse": {"ast": dict(settings)}}))


def starting_from(model: Path, document: dict[str, Any]) -> dict[str, Any]:
    document["run"]["model"] = str(model)
    document["data"] |= {"tokenizer": "model"}
    return document


def rows(ask: Callable[[], FineTuning]) -> list[Bar]:
    """Every bar of fine-tuning."""
    what = "of what pruning at once by magnitude costs against the dense model continued on the same tokens"

    def bar(name: str, what: str, op: Any, value: float, measure: Callable[[FineTuning], Measured], base: str) -> Bar:
        return Bar(
            f"sparse.{name}", what, op, value, measure=lambda _: measure(ask()), baseline=base, seeds=SEEDS,
            kind="drawn",
        )  # fmt: skip

    return [
        bar(
            "ast-recovery",
            f"share {what} that AST recovers with a tenth of the tokens of pre-training; mean of 3 seeds",
            ">=",
            0.8,
            recovery,
            "dense, continued",
        ),
        bar(
            "ast-fixed",
            "nats a byte, AST less fine-tuning with a fixed mask, equal otherwise; the largest of 3 paired seeds",
            "<=",
            0.0,
            against_fixed,
            "a fixed mask",
        ),
    ]


def recovery(tuning: FineTuning) -> Measured:
    shares = tuning.recovered("ast")
    each = ", ".join(f"{share:.2f}" for share in shares)
    differing = ", ".join(f"{name} {nats:+.4f}" for name, nats in tuning.differing.items()) or "not run"
    return of_mean(
        shares,
        f"seeds {each}; fixed mask {statistics.fmean(tuning.recovered('fixed')):.2f}; {tuning.table};"
        f" on one seed, against the same with one thing changed: {differing}",
    )


def against_fixed(tuning: FineTuning) -> Measured:
    gaps = [mine - theirs for mine, theirs in zip(tuning.nats("ast"), tuning.nats("fixed"), strict=True)]
    return Measured(max(gaps), f"mean {statistics.fmean(gaps):+.4f}", of_mean(gaps).interval)
