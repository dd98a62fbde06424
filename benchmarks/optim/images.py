"""Steps to a test accuracy on Fashion-MNIST, at batches up to 16,384.

The target is fixed first: the mean, less one standard deviation, of what tuned SGD with Nesterov momentum reaches with
batches of 256. A batch four times as large usually has half as many steps, so runs have as many samples as they may
need. A method has eight trials at each batch, on a seed of their own: learning rates around the best one of the batch
before (up to 1,024, those of batches of 256 scaled up), on a grid that grows until the best is inside it,
then longer runs until one gets there, and finer rates and shorter runs where one does. What counts is the first
evaluation at or above the target, of fresh seeds; one that does not get there begins again with a longer run. AdaScale
has no trials, and no second try: it takes the setting of the small batch.
Every step is of micro-batches of 256, so that batch norm sees as many images whatever the batch, as it would on as many
ranks.

Trials and targets are judged by the test images, for every method alike: what is compared is steps, not accuracies.
Two methods differ where Welch's test on the steps of the fresh seeds says p < 0.01; otherwise they tie.

Every run is stored as one JSON file and never made twice, so a contest that was stopped continues where it was.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import stored
from benchmarks.intervals import of_unpaired_ratio
from benchmarks.rows import Bar, Measured
from shoestring.core.compose import compose
from shoestring.core.feature import Feature
from shoestring.core.job import Job, attachments_of
from shoestring.core.world import World
from shoestring.data.images import Images, fashion_mnist
from shoestring.data.loader import Loader
from shoestring.models.images import small, smoothed
from shoestring.optim import LAMB, LARS, SGD, AdamW, AdaScale, Schedule

BATCH = 256
BATCHES = (256, 1024, 4096, 16384)
SEEDS, TARGET_SEEDS, TUNING_SEED = (7, 8, 9), (16, 17, 18, 19, 20), 101
SAMPLES = 60_000
EPOCHS = 2.0
"""Of a run with batches of 256: 0.45 TFLOP."""
LENGTHS = (0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0)
"""Of other runs with the same batch, over the usual."""
WIDTHS, STRIDE = (16, 32), 4
"""Of the network, small so that 250 runs are a matter of hours."""
TRIALS = 8
SIGNIFICANT = 0.01
LOOKS = 24
"""Evaluations of a run, of which those of its last half are made."""

Build = Callable[[float, float], Feature]
"""(learning rate, batch over 256) -> an optimizer."""

METHODS: Mapping[str, tuple[Build, Sequence[float], float]] = {
    "nesterov": (lambda lr, scale: SGD(lr=lr, weight_decay=5e-4), (0.025, 0.05, 0.1, 0.2), 1.0),
    "lars": (lambda lr, scale: _lars(lr, scale, "none"), (1.0, 2.0, 4.0, 8.0), 1.0),
    "lars-dynamic": (lambda lr, scale: _lars(lr, scale, "dynamic"), (1.0, 2.0, 4.0, 8.0), 1.0),
    "lamb": (lambda lr, scale: LAMB(lr=lr, weight_decay=0.01), (0.004, 0.008, 0.016, 0.032), 0.5),
    "adamw": (
        lambda lr, scale: AdamW(lr=lr, weight_decay=0.05, betas=(0.9, 0.99)),
        (1e-3, 2e-3, 4e-3, 8e-3),
        0.5,
    ),
}
"""What builds each, the first learning rates for batches of 256, and the power of the batch that they grow with."""


def _lars(lr: float, scale: float, clip: Any) -> LARS:
    vector_lr = 0.1 * min(scale, 8)
    return LARS(
        lr=lr,
        vector_lr=vector_lr,
        trust_coefficient=0.01,
        weight_decay=5e-4,
        nesterov=True,
        ratio_clip=clip,
        bound_warmup=10,
    )


def methods(batch: int) -> list[str]:
    """Names of those that are compared at a batch; at the small one AdaScale would be Nesterov."""
    return [*METHODS, *(["adascale"] if batch > BATCH else [])]


def steps_of(batch: int, length: float) -> int:
    """Steps of a run of `length` times the usual one with this batch."""
    return max(1, round(EPOCHS * length * SAMPLES / (BATCH * batch) ** 0.5))


def trained(method: str, lr: float, batch: int, length: float, seed: int) -> dict[str, Any]:
    """Test accuracies by step, of a run of `length` times the usual number of steps.

    A run with AdaScale makes as many steps as its gain asks for, and so takes more samples.
    """
    torch.manual_seed(seed)
    train, test = fashion_mnist()
    scale = batch / BATCH
    total, features = steps_of(batch, length), []
    if method == "adascale":  # the small batch's steps and learning rate
        total = steps_of(BATCH, length)
        features = [SGD(lr=lr, weight_decay=5e-4), AdaScale(scale=scale)]
    else:
        features = [METHODS[method][0](lr, scale)]
    schedule = Schedule(shape="trapezoid", warmup=max(1, total // 10), cooldown=0.9, final=0.0)
    job = Job(small(widths=WIDTHS, stride=STRIDE), world=World(), loss=smoothed)
    job.progress.total = total
    compose(job, [*features, schedule])
    loader = Loader(train, batch=batch, accumulate=round(scale), seed=seed)
    accuracies: dict[int, float] = {}
    every, gains, step = looks_every(batch, length), [], 0
    for batches in loader:
        step += 1
        job.step(*batches)
        gains.append(float(job.numbers.get("gain", 1.0)))
        over = job.progress.done
        if over or (job.progress.position > total / 2 and step % every == 0):
            accuracies[step] = accuracy(job, test)
        if over:
            break
    job.close()
    noise = float(job.numbers.get("noise_scale", 0.0)) * BATCH
    return {"accuracies": accuracies, "steps": step, "gain": statistics.fmean(gains), "noise_scale": noise}


def looks_every(batch: int, length: float) -> int:
    """Steps between two evaluations."""
    return max(1, steps_of(batch, length) // LOOKS)


def accuracy(job: Job, images: Images) -> float:
    with attachments_of(job).evaluating():
        found = [attachments_of(job).module(part).argmax(-1) for part in images.images.split(1000)]
    return float((torch.cat(found) == images.labels).float().mean())


def listed(steps: Sequence[int | None]) -> str:
    return ", ".join(str(each or "never") for each in steps)


@dataclass(eq=False)
class Contest:
    """All runs; `check` raises when the time is up."""

    folder: Path
    check: Callable[[], None] = field(default=lambda: None)

    def run(self, method: str, lr: float, batch: int, length: float, seed: int) -> dict[str, Any]:
        path = self.folder / f"{method}-{batch}-{lr:g}-{length:g}-{seed}.json"
        return stored(path, self.check, lambda: trained(method, lr, batch, length, seed))

    def last(self, *run: Any) -> float:
        """Its last accuracy; 0 where it diverged."""
        return list(self.run(*run)["accuracies"].values())[-1]

    @cached_property
    def small_rate(self) -> float:
        """The best learning rate of Nesterov at the small batch, of eight or more: the best is not at an edge."""
        rates = sorted(rate * factor for rate in METHODS["nesterov"][1] for factor in (1, 2**0.5))
        while True:
            best = max(rates, key=lambda lr: self.last("nesterov", lr, BATCH, 1.0, TUNING_SEED))
            if best not in (rates[0], rates[-1]):
                return best
            rates = sorted([*rates, best * (2**0.5 if best == rates[-1] else 0.5**0.5)])

    @cached_property
    def target(self) -> float:
        found = [self.last("nesterov", self.small_rate, BATCH, 1.0, seed) for seed in TARGET_SEEDS]
        return statistics.fmean(found) - statistics.stdev(found)

    def steps(self, *run: Any) -> int | None:
        """Steps to the target; None where a run does not get there."""
        reached = [int(step) for step, found in self.run(*run)["accuracies"].items() if found >= self.target]
        return min(reached, default=None)

    @cache  # noqa: B019  (a contest lives as long as the process)
    def tuned(self, method: str, batch: int) -> tuple[float, float]:
        """Learning rate and length that get to the target in the fewest steps, of eight trials."""
        trials: dict[tuple[float, float], tuple[float, float]] = {}

        def attempt(lr: float, length: float) -> None:
            reached = self.steps(method, lr, batch, length, TUNING_SEED)
            ends = -self.last(method, lr, batch, length, TUNING_SEED)
            trials[lr, length] = (float("inf") if reached is None else reached, ends)

        for lr in self.first_rates(method, batch):
            attempt(lr, 1.0)
        while len(trials) < TRIALS:
            best, length = min(trials, key=trials.__getitem__)
            known, at = sorted({lr for lr, _ in trials}), LENGTHS.index(length)
            got = trials[best, length][0] < float("inf")
            if best in (known[0], known[-1]):
                attempt(best * (2 if best == known[-1] else 0.5), length)
            elif not got and (best, longer := LENGTHS[min(at + 2, len(LENGTHS) - 1)]) not in trials:
                attempt(best, longer)
            elif got and at and (best, LENGTHS[at - 1]) not in trials:
                attempt(best, LENGTHS[at - 1])
            else:
                attempt((best * known[known.index(best) + 1]) ** 0.5, length)
        return min(trials, key=trials.__getitem__)

    def first_rates(self, method: str, batch: int) -> list[float]:
        """Around the best rate of the batch before; up to 1,024, those of the small batch scaled up."""
        if batch <= 1024:
            _, rates, power = METHODS[method]
            return [rate * (batch / BATCH) ** power for rate in rates]
        before = self.tuned(method, BATCHES[BATCHES.index(batch) - 1])[0]
        return [before / 2, before, before * 2]

    def fresh(self, method: str, batch: int) -> list[int | None]:
        """Steps to the target of the fresh seeds, each in the shortest run that gets there, if any does."""
        return [self.needed(*self.setting(method, batch), seed) for seed in SEEDS]

    def needed(self, method: str, lr: float, batch: int, length: float, seed: int) -> int | None:
        """Steps in a run of this length, or in the next longer one that gets there."""
        longer = [] if method == "adascale" else [each for each in LENGTHS if each > length]
        found = (self.steps(method, lr, batch, each, seed) for each in (length, *longer))
        return next((steps for steps in found if steps is not None), None)

    def setting(self, method: str, batch: int) -> tuple[str, float, int, float]:
        """Method, learning rate, batch and length of the runs that count."""
        lr, length = (self.small_rate, 1.0) if method == "adascale" else self.tuned(method, batch)
        return method, lr, batch, length

    def p_value(self, better: str, other: str, batch: int) -> float:
        """Of Welch's one-sided test that one method needs fewer steps; 1 where a run of either does not get there.

        Steps are known to an evaluation's distance only, which counts as a variance of distance^2 / 12.
        """
        from scipy.stats import ttest_ind_from_stats

        numbers: list[float] = []
        for method in (better, other):
            found = [each for each in self.fresh(method, batch) if each is not None]
            if len(found) < len(SEEDS):
                return 1.0
            apart = looks_every(batch, self.setting(method, batch)[-1])
            numbers += [statistics.fmean(found), (statistics.variance(found) + apart**2 / 12) ** 0.5, len(found)]
        return float(ttest_ind_from_stats(*numbers, equal_var=False, alternative="less").pvalue)

    def table(self, batch: int) -> dict[str, list[int | None]]:
        return {method: self.fresh(method, batch) for method in methods(batch)}

    # -- rows ----------------------------------------------------------------------------------------------------------

    def beside_nesterov(self, batch: int) -> Measured:
        """Steps of Nesterov over those of LARS, geometric means over the seeds that must all reach the target."""
        table = self.table(batch)
        said = [f"{method} {listed(found)}" for method, found in table.items()]
        apart = [
            f"{method} needs {'fewer' if better == method else 'more'} than nesterov, p = {p:.2g}"
            for method in table
            if method != "nesterov"
            for better, other in ((method, "nesterov"), ("nesterov", method))
            if (p := self.p_value(better, other, batch)) < SIGNIFICANT
        ]
        note = f"target {self.target:.4f}; steps to it of seeds {SEEDS}: {'; '.join(said)}"
        note += f"; {'; '.join(apart) or 'none differs from nesterov'} (Welch, p < {SIGNIFICANT})"
        nesterov, lars = ([steps for steps in table[method] if steps] for method in ("nesterov", "lars"))
        if len(lars) < len(SEEDS):
            return Measured(0.0, note)
        return of_unpaired_ratio(nesterov, lars, note) if len(nesterov) == len(SEEDS) else Measured(1e6, note)

    def adascale_reaches(self) -> Measured:
        """Of the fresh seeds at batches up to 16 times the small one, those that reach the target with one setting."""
        found = {batch: self.fresh("adascale", batch) for batch in BATCHES if BATCH < batch <= 16 * BATCH}
        every = [each for steps in found.values() for each in steps]
        said = "; ".join(f"{batch}: {listed(steps)}" for batch, steps in found.items())
        share = sum(each is not None for each in every) / len(every)
        return Measured(
            share, f"target {self.target:.4f}, learning rate {self.small_rate:g}; steps at each batch: {said}"
        )


def rows(contest: Callable[[], Contest]) -> list[Bar]:
    return [
        *(
            Bar(
                f"optim.images-{batch}",
                f"steps to the target with batches of {batch} by tuned Nesterov SGD over those by tuned LARS",
                ">=",
                1.0,
                measure=lambda _, batch=batch: contest().beside_nesterov(batch),
                baseline="SGD with Nesterov momentum, linear scaling and warm-up",
                seeds=SEEDS,
                kind="drawn",
            )
            for batch in BATCHES
        ),
        Bar(
            "optim.images-adascale",
            "share of seeds that AdaScale brings to the target with the small batch's setting, batches up to 16 times",
            ">=",
            1.0,
            measure=lambda _: contest().adascale_reaches(),
            seeds=SEEDS,
            kind="exact",
        ),
    ]
