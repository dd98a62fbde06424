"""Steps and time to AdamW's loss, on the GPT, the data and the batch of the quickstart.

A run of 600 steps is about what the quickstart makes in its minutes on two cores. Each optimizer has six trials on a
seed of its own: learning rates at that length, on a grid that grows until the best is inside it. AdamW's mean held-out
loss over the fresh seeds is the target, and what counts is the shortest run that gets there in the mean of the same
seeds. Every run decays its learning rate over its own length, except schedule-free ones, which keep it.

Every run is stored as one JSON file and never made twice, so a contest that was stopped continues where it was.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Bar, Measured, NotRun, paired, stored
from benchmarks.rows import Kind
from benchmarks.training import recipe, train_to_end
from shoestring.core.compose import compose
from shoestring.core.feature import Feature
from shoestring.core.job import Job
from shoestring.core.world import World
from shoestring.models.gpt import tiny
from shoestring.optim import AdamW, Clip, Muon, ScheduleFree

STEPS = 600
SEEDS, TUNING_SEED = (1, 2, 3), 100
TRIALS = 6
LENGTHS = (0.5, 0.6, 0.7, 0.85, 1.0, 1.2, 1.4)
"""Of runs, over AdamW's."""
METHODS: Mapping[str, tuple[str, Sequence[float]]] = {
    "adamw": ("adamw", (2e-3, 4e-3, 8e-3, 1.6e-2)),
    "muon": ("muon", (2e-3, 4e-3, 8e-3, 1.6e-2)),
    "schedule-free": ("schedulefree", (4e-3, 8e-3, 1.6e-2, 3.2e-2)),
}
"""Name of the table in a run file, and the first learning rates."""
NEVER, ROUNDS = 10.0, 12


def run_file(method: str, rate: float, length: float, seed: int) -> dict[str, Any]:
    """The quickstart's with a method's optimizer, for `length` times the usual steps."""
    document = recipe(round(STEPS * length), seed=seed)
    recipes = document["optim"]
    settings = recipes.pop("adamw") | {"lr": rate}
    if method == "schedule-free":
        recipes["schedule"]["shape"] = "constant"
    if method != "adamw":
        settings.pop("betas")  # each method's own
    recipes[METHODS[method][0]] = settings
    return document


def trained(method: str, rate: float, length: float, seed: int, check: Callable[[], None]) -> dict[str, Any]:
    """Held-out bits a byte after a run."""
    document = run_file(method, rate, length, seed)
    with tempfile.TemporaryDirectory() as folder:
        document["run"]["folder"] = f"{folder}/run"
        metrics = train_to_end(document, check)
    return {"bits": metrics["held_out_bits_per_byte"], "steps": round(STEPS * length)}


@dataclass
class Contest:
    """All runs; `check` raises when the time is up."""

    folder: Path
    check: Callable[[], None] = field(default=lambda: None)

    def bits(self, method: str, rate: float, length: float, seed: int) -> float:
        """Held-out bits a byte."""
        path = self.folder / f"{method}-{rate:g}-{length:g}-{seed}.json"
        return stored(path, self.check, lambda: trained(method, rate, length, seed, self.check))["bits"]

    def rate(self, method: str) -> float:
        """The best learning rate of six."""
        trials = {rate: self.bits(method, rate, 1.0, TUNING_SEED) for rate in METHODS[method][1]}
        while True:
            best, known = min(trials, key=trials.__getitem__), sorted(trials)
            if best in (known[0], known[-1]):
                following = best * (2 if best == known[-1] else 0.5)
            elif len(trials) < TRIALS:
                following = (best * known[known.index(best) + 1]) ** 0.5
            else:
                return best
            trials[following] = self.bits(method, following, 1.0, TUNING_SEED)

    @cached_property
    def adamw(self) -> list[float]:
        rate = self.rate("adamw")
        return [self.bits("adamw", rate, 1.0, seed) for seed in SEEDS]

    def needed(self, method: str) -> tuple[float, list[float]]:
        """Length of the shortest runs that get there in the mean of the fresh seeds, and the bits of each."""
        rate = self.rate(method)
        tried: dict[float, list[float]] = {}
        low, middle, high = -1, LENGTHS.index(1.0), len(LENGTHS)
        while high - low > 1:
            length = LENGTHS[middle]
            tried[length] = [self.bits(method, rate, length, seed) for seed in SEEDS]
            there = statistics.fmean(tried[length]) <= statistics.fmean(self.adamw)
            low, high = (low, middle) if there else (middle, high)
            middle = (low + high) // 2
        return (LENGTHS[high], tried[LENGTHS[high]]) if high < len(LENGTHS) else (NEVER, tried[LENGTHS[-1]])

    # -- rows ----------------------------------------------------------------------------------------------------------

    def steps(self, method: str) -> Measured:
        from scipy.stats import ttest_ind

        length, found = self.needed(method)
        p = float(ttest_ind(found, self.adamw, equal_var=False, alternative="less").pvalue)
        sides = (("adamw", 1.0, self.adamw), (method, length, found))
        said = "; ".join(
            f"{name} {'more' if size == NEVER else round(STEPS * size)} steps at {self.rate(name):g}:"
            f" {', '.join(f'{each:.4f}' for each in bits)}"
            for name, size, bits in sides
        )
        return Measured(length, f"held-out bits a byte, seeds {SEEDS}: {said}; p = {p:.2g} that it is below (Welch)")

    def seconds(self, method: str) -> Measured | NotRun:
        length, _ = self.needed(method)
        if length == NEVER:
            return NotRun(f"{method} does not reach AdamW's loss")
        step = step_time(method)
        return Measured(length * step.median, f"{length:g} of the steps; a step takes {step} of AdamW's")


def step_time(method: str) -> Any:
    """Of a whole training step over AdamW's, on the same batches."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(2048, (8, 257), generator=generator)
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    features: Mapping[str, Feature] = {"adamw": AdamW(), "muon": Muon(), "schedule-free": ScheduleFree()}

    def stepper(name: str) -> Callable[[], object]:
        torch.manual_seed(0)
        job = compose(Job(tiny(), world=World()), [features[name], Clip(max_norm=1.0)])
        return partial(job.step, batch)

    return paired(stepper(method), stepper("adamw"), rounds=ROUNDS)


def rows(contest: Callable[[], Contest]) -> list[Bar]:
    def bar(name: str, what: str, bound: float, measure: Callable[[Contest], Measured | NotRun], kind: Kind) -> Bar:
        return Bar(
            f"optim.text-{name}",
            f"{what} to AdamW's held-out loss on the quickstart's GPT, over AdamW's",
            "<=",
            bound,
            measure=lambda _: measure(contest()),
            baseline="AdamW with the quickstart's schedule, learning rate tuned",
            seeds=SEEDS,
            peers=("torch",),
            kind=kind,
        )

    found: list[Bar] = []
    for method, title in (("muon", "Muon"), ("schedule-free", "schedule-free AdamW")):
        found.append(bar(method, f"steps of {title}", 0.9, lambda each, method=method: each.steps(method), "drawn"))
        timed = bar(
            f"{method}-time", f"time of {title}", 0.9, lambda each, method=method: each.seconds(method), "timed"
        )
        found.append(timed)
    return found
