"""The search of [memory.budget]: the fastest settings with which a run's peak of memory stays within the budget.

Peaks are predicted on fake tensors. Predicting every combination of settings would take too long. So the search
predicts only four peaks for each way to store the model's state (two micro-batch sizes, with and without
recomputation), and interpolates the peaks of all other combinations. Combinations whose interpolated peak fits
are then predicted one by one, the fastest first, until a predicted peak fits. The time of an operator is
computed from its operations and bytes, at rates measured on this machine.
"""

from __future__ import annotations

import json
import logging
import sys
import tomllib
from collections.abc import Container, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache, cached_property
from itertools import chain
from typing import Any, NamedTuple

import torch

from shoestring import figures
from shoestring.core.errors import ConfigError, ShoestringError
from shoestring.core.feature import Feature, Seam, arrange_mesh, check_owners, resolve_all
from shoestring.core.job import Job, attachments_of
from shoestring.core.world import World
from shoestring.memory import Budget, Offload, OffloadActivations, Recompute, Zero
from shoestring.memory.predicted import device_type, predict
from shoestring.memory.settings.budget import BudgetChoice, Knob
from shoestring.memory.step_cost import CostedTensors, RecomputeLevel, levels, measure_rates
from shoestring.models.blocks import repeated
from shoestring.optim import AdamW, AdamW8bit
from shoestring.parallel import DDP, FSDP
from shoestring.run import Run, parse
from shoestring.training.data_loading import outlined_data
from shoestring.training.user_code import import_user_code

log = logging.getLogger("shoestring")

GIB = 2**30
ROUGHLY = 1.05
"""Factor by which an interpolated peak may exceed the budget before the search skips the combination."""
GIGABIT = 125e6
"""Assumed bandwidth for gathering weights, in bytes/s, if there are no ranks that could measure it."""
EIGHT_BITS = 8.0
"""Duration of an optimizer step of 8-bit AdamW, relative to a step of AdamW."""


_ACTIVATIONS = "memory.offloadactivations"

NOT_AT_ALL = RecomputeLevel((), 0, 0.0)


@dataclass(frozen=True)
class Way:
    """A way to store parameters, gradients and optimizer state: sharded, offloaded or rounded."""

    features: tuple[Feature, ...]
    label: str
    """Names of the added features, for messages; empty for the run's own features."""


class PeakBytes(NamedTuple):
    """Memory of a rank in bytes: its peak on the device (infinite if features conflict), and its host-memory leases."""

    device: float
    host: float = 0.0


@dataclass(frozen=True)
class MemoryChoice:
    """One candidate: a combination of settings that the search may choose."""

    way: Way
    accumulate: int
    blocks: int = 0
    level: RecomputeLevel = NOT_AT_ALL
    added: float = 0.0
    """Predicted additional seconds of a step, compared to a step with the run file's own settings."""
    roughly: float = 0.0
    """Interpolated peak of a rank in bytes, before the peak is predicted."""

    @property
    def features(self) -> tuple[Feature, ...]:
        recompute = (Recompute(blocks=self.blocks, saved_operators=self.level.keep),) if self.blocks else ()
        return (*self.way.features, *recompute)

    def describe(self, run: Run, blocks: int) -> str:
        words = [self.way.label] if self.way.label else []
        if self.accumulate != run.settings.accumulate:
            words.append(f"{self.accumulate} micro-batches")
        if self.blocks:
            held = f" but for {', '.join(self.level.keep)}" if self.level.keep else ""
            words.append(f"recomputation of {self.blocks} of {blocks} blocks{held}")
        return ", ".join(words)


class BudgetSearch:
    """Searches for the fastest settings within a budget; works only in a process without a process group.

    Args:
        run: the run, with the default features that `Run.completed` adds.
        gathered: bytes of weights that ranks can gather per second.

    Raises:
        ConfigError, DataError: the model or the data does not exist.
    """

    def __init__(self, run: Run, world: World, gathered: float = GIGABIT) -> None:
        self.run, self.gathered = run, gathered
        self.world = arrange_mesh(world, run.features)
        self.code = import_user_code(run, skip=("run.evaluate", "run.sinks"))
        self.arguments, self.data = outlined_data(run, self.code)
        self.others = tuple(feature for feature in run.features if not isinstance(feature, Budget))
        self.device = device_type()
        self.readers = self.world.ranks_over(("hosts", "local"))
        self.samples = run.settings.batch // self.readers
        model = self._model()
        self.blocks = len(repeated(model))
        self.weights = sum(parameter.nbytes for parameter in model.parameters())
        self.predicted = cache(self._predicted)
        self.rates = measure_rates(self.device)

    def within(self, budget: Budget) -> BudgetChoice:
        """Return the fastest choice that fits into the budget.

        Raises:
            ConfigError: no choice fits.
        """
        budget.check_limit()
        log.info("choosing settings that fit into %g GiB; this takes a minute for a large model", budget.gib)
        room, least = budget.gib * GIB, MemoryChoice(Way((), ""), 1, roughly=float("inf"))
        for rounding in (False, True):
            for choice in self.choices(budget.allow, rounding):
                least = min(least, choice, key=lambda choice: choice.roughly)
                if choice.roughly <= ROUGHLY * room:
                    peak = self.peak(choice.features, choice.accumulate)
                    if peak <= room:
                        return self._describe_choice(choice, peak)
        peak = self.peak(least.features, least.accumulate)
        raise ConfigError(
            f"`{budget.name}.gib` of {budget.gib:g} cannot be met: a rank takes at least {figures.memory(int(peak))}"
            + (f", with {words}" if (words := least.describe(self.run, self.blocks)) else ""),
            hint=f"gib = {-(-peak // (GIB / 1000)) / 1000:g} is enough; a shorter `data.sequence` also lowers the peak",
        )

    def _model(self) -> torch.nn.Module:
        with torch.device("meta"):
            return self.code.model.build(self.arguments)

    def peak(self, features: tuple[Feature, ...], accumulate: int) -> float:
        """Predicted peak of a rank in bytes; infinite if features conflict."""
        return self.predicted(features, accumulate).device

    def _predicted(
        self, features: tuple[Feature, ...], accumulate: int, live: CostedTensors | None = None
    ) -> PeakBytes:
        model = self._model()
        resolved = resolve_all(features, self.world)
        job = Job(model, world=self.world)
        attachments_of(job).features = resolved
        try:
            check_owners(resolved)
            for feature in resolved:
                feature.check(attachments_of(job))
        except ConfigError:
            return PeakBytes(float("inf"))
        shape = max(self.samples // accumulate, 1), self.run.data.sequence
        try:
            prediction = predict(
                model,
                resolved,
                self.code.loss,
                shape,
                ranks=self.world.size,
                accumulate=accumulate,
                live=live,
                forward=self.code.forward,
                batch=self.data.first_batch(shape[0]) if self.data else None,
            )
            return PeakBytes(prediction.peak, prediction.host)
        except Exception as error:
            if features == self.others:
                raise ConfigError(f"the peak cannot be predicted: {type(error).__name__}: {error}") from error
            return PeakBytes(float("inf"))

    @cached_property
    def step(self) -> CostedTensors:
        """The operators, tensors and costs of one micro-batch, with the run file's own settings."""
        block = ""
        if self.blocks:
            model = self._model()
            first = repeated(model)[0]
            block = next(name for name, module in model.named_modules() if module is first)
        live = CostedTensors(self.rates, block)
        self._predicted(self.others, self.run.settings.accumulate, live)
        return live

    def ways(self, allow: Container[Knob], rounding: bool) -> Iterator[Way]:
        """Yield the ways to store the model's state that the search may choose from.

        Args:
            rounding: if True, yield only ways with 8-bit optimizer state; if False, only ways without it.
        """
        replaceable = (DDP(), DDP(hosts="leave"))  # the defaults; DDP with other settings is the user's own choice
        plain = not any(Seam.SHARD in feature.seams and feature not in replaceable for feature in self.others)
        alone = tuple(feature for feature in self.others if not isinstance(feature, DDP))
        ways = [Way(self.others, "")]
        if plain and self.readers > 1 and "zero" in allow:
            ways.append(Way((*alone, Zero()), "memory.zero"))
        if plain and self.readers > 1 and "fsdp" in allow:
            ways.append(Way((*alone, FSDP()), "parallel.fsdp"))
        if plain and self.device != "cpu" and "offload" in allow:
            ways.append(Way((*alone, Offload()), "memory.offload"))
        if self.device != "cpu" and "activations" in allow and self.blocks > 1 and not self._on(OffloadActivations):
            ways += [Way((*way.features, OffloadActivations()), _and(way.label, _ACTIVATIONS)) for way in ways]
        for way in ways:
            in_8_bits = tuple(rounded(feature) for feature in way.features)
            if not rounding:
                yield way
            elif "8bit" in allow and in_8_bits != way.features:
                yield Way(in_8_bits, _and(way.label, "optim.adamw8bit"))

    def choices(self, allow: Container[Knob], rounding: bool) -> list[MemoryChoice]:
        """All combinations of settings, sorted by the time that they add to a step, shortest first.

        Args:
            rounding: if True, return only combinations with 8-bit optimizer state; if False, only those without it.
        """
        start = self.run.settings.accumulate
        counts = [n for n in range(start, self.samples + 1) if self.samples % n == 0]
        if "accumulate" not in allow:
            counts = [start]
        recomputes = "recompute" in allow and self.blocks and not self._on(Recompute)
        ways = levels(self.step.calls[: self.step.needed]) if recomputes else []
        choices = list(chain.from_iterable(self._combinations(way, counts, ways) for way in self.ways(allow, rounding)))
        return sorted(choices, key=lambda choice: (round(choice.added, 4), choice.blocks, choice.accumulate))

    def _combinations(
        self, way: Way, counts: Sequence[int], levels: Sequence[RecomputeLevel]
    ) -> Iterator[MemoryChoice]:
        start = self.run.settings.accumulate
        held = self._line(way.features, counts)
        recomputed = self._line((*way.features, Recompute()), counts) if levels else held
        state = self._seconds_of_state(way) - self._seconds_of_state(Way(self.others, ""))
        state += self._seconds_of_activations(way, counts[-1])
        pass_again = 3 * self.weights / self.rates.copied + self.step.operators * self.rates.launch
        choosing = len(self.step.calls) * self.rates.chosen
        for accumulate in counts:
            added = state + (accumulate - start) * pass_again
            share = start / accumulate  # size of a micro-batch, relative to the size with the run file's own settings
            yield MemoryChoice(way, accumulate, added=added, roughly=held(accumulate))
            for level in levels:
                for blocks in range(1, self.blocks + 1):
                    part = blocks / self.blocks
                    peak = held(accumulate) * (1 - part) + recomputed(accumulate) * part + blocks * level.nbytes * share
                    again = blocks * (level.seconds * share + (choosing if level.keep else 0.0)) * accumulate
                    yield MemoryChoice(way, accumulate, blocks, level, added + again, peak)

    def _line(self, features: tuple[Feature, ...], counts: Sequence[int]) -> Any:
        """Return a function: number of micro-batches -> peak in bytes, interpolated linearly in micro-batch size."""
        fewest, most = self.samples // counts[-1], self.samples // counts[0]
        low = self.peak(features, counts[-1])
        if most == fewest:
            return lambda _: low
        other = counts[-2]
        slope = (self.peak(features, other) - low) / (self.samples // other - fewest)
        return lambda accumulate: low + slope * (self.samples // accumulate - fewest)

    def _seconds_of_state(self, way: Way) -> float:
        """Seconds of an optimizer step and its communication; times that are equal for all ways are left out."""
        ranks = self.readers if any(isinstance(feature, Zero | FSDP) for feature in way.features) else 1
        # AdamW reads weights, gradients and both moments, and writes weights and both moments: 7 times the weights.
        seconds = 7 * self.weights / self.rates.copied / ranks
        if any(isinstance(feature, AdamW8bit) for feature in way.features):
            seconds *= EIGHT_BITS
        if any(isinstance(feature, FSDP) for feature in way.features):
            seconds += self.weights / self.gathered  # FSDP gathers the weights once more for the backward pass
        if any(isinstance(feature, Offload) for feature in way.features):
            seconds += 2 * self.weights / self.rates.host
        return seconds

    def _seconds_of_activations(self, way: Way, accumulate: int) -> float:
        """Seconds by which copies of offloaded activations exceed the forward and backward passes that overlap them."""
        without = tuple(feature for feature in way.features if not isinstance(feature, OffloadActivations))
        if without == way.features or self._on(OffloadActivations):
            return 0.0
        micro = self.predicted(way.features, accumulate).host - self.predicted(without, accumulate).host
        copied = max(accumulate * micro, 0.0) / self.rates.host  # copies to the host; copies back take as long
        computed = self.run.settings.accumulate * self.step.seconds
        return max(copied - computed / 3, 0.0) + max(copied - 2 * computed / 3, 0.0)

    def _on(self, kind: type[Feature]) -> bool:
        """Whether the run file has a feature of this kind."""
        return any(isinstance(feature, kind) for feature in self.others)

    def _describe_choice(self, choice: MemoryChoice, peak: float) -> BudgetChoice:
        without = self.peak(self.others, self.run.settings.accumulate)
        before = {feature.name: feature for feature in self.others}
        after = {feature.name: feature for feature in choice.features}
        in_8_bits = any(isinstance(feature, AdamW8bit) for feature in choice.features if feature.name not in before)
        adamw = {AdamW().name, AdamW8bit().name} if in_8_bits else set[str]()
        return BudgetChoice(
            chosen=choice.describe(self.run, self.blocks) or "nothing: it fits as it is",
            accumulate=choice.accumulate,
            replaced=tuple(sorted(before.keys() - after.keys() - adamw)),
            added_features={name: asdict(feature) for name, feature in after.items() if name not in {*before, *adamw}},
            rounded=in_8_bits,
            predicted_gib=float(f"{peak / GIB:.4g}"),
            without_gib=float(f"{without / GIB:.4g}"),
            added=round(choice.added / (self.run.settings.accumulate * self.step.seconds), 4),
        )


def _and(label: str, more: str) -> str:
    return f"{label}, {more}" if label else more


def rounded(feature: Feature) -> Feature:
    """Return 8-bit AdamW with the same settings if the feature is AdamW; return any other feature unchanged."""
    if type(feature) is not AdamW:
        return feature
    return AdamW8bit(**{setting.name: getattr(feature, setting.name) for setting in fields(feature)})


def main(arguments: Sequence[str]) -> int:
    """Read a run file from standard input, and print the choice of [memory.budget] for it as JSON.

    Args:
        arguments: number of ranks, number of ranks per host, and bytes of weights that ranks can gather per second.
    """
    ranks, local, gathered = int(arguments[0]), int(arguments[1]), float(arguments[2])
    run = parse(tomllib.loads(sys.stdin.read()))
    try:
        (budget,) = (feature for feature in run.features if isinstance(feature, Budget))
        print(json.dumps(asdict(BudgetSearch(run, World(size=ranks, local_size=local), gathered).within(budget))))
    except ShoestringError as error:
        print(json.dumps(error.parts()))
        return error.code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
