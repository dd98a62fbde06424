"""What [memory.budget] chooses: the settings of a run that stay below a peak of memory and cost the least time.

Peaks are predicted on fake tensors. Four of each way to hold the model's state, with the smallest micro-batches and
with and without recomputation, say roughly what every combination takes; those that seem to fit are predicted one by
one, from the one that costs the least time, until one does fit. Times are those of operators by what they compute and
move, at rates that are measured here.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import tomllib
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from shoestring.core.errors import ConfigError, ShoestringError
from shoestring.core.feature import Feature, Seam, arrange_mesh, check_owners
from shoestring.core.job import Job
from shoestring.core.task import cross_entropy
from shoestring.core.world import World
from shoestring.memory import Budget, Offload, OffloadActivations, Recompute, Zero
from shoestring.memory.predicted import predict
from shoestring.memory.settings.budget import Knob
from shoestring.memory.step_cost import CostedTensors, RecomputeLevel, levels, measure_rates
from shoestring.models.blocks import repeated
from shoestring.models.loading import build_model
from shoestring.naming import resolve
from shoestring.optim import AdamW, AdamW8bit
from shoestring.parallel import DDP, FSDP
from shoestring.report.figures import size
from shoestring.run import Run, parse
from shoestring.training.data_loading import is_own, model_arguments

log = logging.getLogger("shoestring")

GIB = 2**30
ROUGHLY = 1.05
"""What a peak that is not predicted itself may be wrong by."""
LINK = 1e9
"""Bytes/s between ranks, where nobody has measured them."""
EIGHT_BITS = 8.0
"""Times as long as AdamW's as a step with its state in 8 bits takes."""


_ACTIVATIONS = "memory.offloadactivations"

NOT_AT_ALL = RecomputeLevel((), 0, 0.0)


@dataclass(frozen=True)
class Way:
    """A way to hold parameters, gradients and optimizer state."""

    features: tuple[Feature, ...]
    said: str


class PeakBytes(NamedTuple):
    """Of a rank: at the peak of its device, infinite where features do not go together; and leased of its host."""

    device: float
    host: float = 0.0


@dataclass(frozen=True)
class MemoryChoice:
    """A combination of all that may be chosen."""

    way: Way
    accumulate: int
    blocks: int = 0
    level: RecomputeLevel = NOT_AT_ALL
    added: float = 0.0
    """Seconds that a step takes longer than with what the run file says, predicted."""
    roughly: float = 0.0
    """Bytes at the peak, roughly."""

    @property
    def features(self) -> tuple[Feature, ...]:
        recompute = (Recompute(blocks=self.blocks, keep=self.level.keep),) if self.blocks else ()
        return (*self.way.features, *recompute)

    def describe(self, run: Run, blocks: int) -> str:
        said = [self.way.said] if self.way.said else []
        if self.accumulate != run.settings.accumulate:
            said.append(f"{self.accumulate} micro-batches")
        if self.blocks:
            held = f" but for {', '.join(self.level.keep)}" if self.level.keep else ""
            said.append(f"recomputation of {self.blocks} of {blocks} blocks{held}")
        return ", ".join(said)


def within_budget(run: Run, world: World) -> Run:
    """The completed run with what its [memory.budget] chooses; as it is without one. Every rank calls it.

    Raises:
        ConfigError: nothing that may be chosen fits, and then the least that would do is said; or it cannot be known.
    """
    budget = next((feature for feature in run.features if isinstance(feature, Budget)), None)
    if budget is None or budget.chosen:
        return run
    if not dist.is_initialized():
        return BudgetSearch(run, world).within(budget)
    return replace(run, **_parts(world.decide(lambda: _elsewhere(run, world))))


def _elsewhere(run: Run, world: World) -> str:
    """The same in a process of its own: it imagines ranks, and this one has real ones."""
    command = [sys.executable, "-m", "shoestring.training.budget", str(world.size), str(world.local_size)]
    done = subprocess.run(command, input=run.dump(), capture_output=True, text=True, check=False)
    if done.returncode == ShoestringError.code:
        raise ShoestringError.from_parts(json.loads(done.stdout))
    if done.returncode:
        raise ConfigError(f"nothing could be chosen for `memory.budget`: {done.stderr.strip()[-500:]}")
    return done.stdout


def _parts(text: str) -> dict[str, Any]:
    """What a choice changes of a run, from the run's text."""
    chosen = parse(tomllib.loads(text))
    return {"settings": chosen.settings, "features": chosen.features}


class BudgetSearch:
    """All that a completed run may be changed to, and the peaks of that; in a process without ranks.

    Raises:
        ConfigError: the shapes of the run's data are not known.
    """

    def __init__(self, run: Run, world: World) -> None:
        if is_own(run):
            raise ConfigError("`memory.budget` knows the shapes of text only", hint="choose by hand, with `check`")
        self.run = run
        self.world = arrange_mesh(world, run.features)
        self.loss = resolve(run.settings.loss, "run.loss") if run.settings.loss else cross_entropy
        self.others = tuple(each for each in run.features if not isinstance(each, Budget))
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.readers = self.world.ranks_over(("hosts", "local"))
        self.samples = run.settings.batch // self.readers
        model = self._model()
        self.blocks = len(repeated(model))
        self.weights = sum(each.nbytes for each in model.parameters())
        self.predicted = cache(self._predicted)
        self.rates = measure_rates(self.device)

    def within(self, budget: Budget) -> Run:
        """The run with the choice that costs the least time among those that fit.

        Raises:
            ConfigError: none does.
        """
        if budget.gib <= 0:
            raise ConfigError(f"`{budget.name}.gib` must be positive, got {budget.gib}")
        log.info("choosing what fits into %g GiB; a large model takes a minute", budget.gib)
        room, least = budget.gib * GIB, MemoryChoice(Way((), ""), 1, roughly=float("inf"))
        for rounding in (False, True):
            for choice in self.choices(budget.allow, rounding):
                least = min(least, choice, key=lambda choice: choice.roughly)
                if choice.roughly <= ROUGHLY * room:
                    peak = self.peak(choice.features, choice.accumulate)
                    if peak <= room:
                        return self._with(choice, budget, peak)
        peak = self.peak(least.features, least.accumulate)
        raise ConfigError(
            f"`{budget.name}.gib` of {budget.gib:g} cannot be met: a rank takes at least {size(int(peak))}"
            + (f", with {said}" if (said := least.describe(self.run, self.blocks)) else ""),
            hint=f"gib = {-(-peak // (GIB / 1000)) / 1000:g} would do; a shorter `data.sequence` takes less, too",
        )

    def _model(self) -> torch.nn.Module:
        with torch.device("meta"):
            return build_model(
                self.run.settings.model, self.run.model, model_arguments(self.run), self.run.settings.seed
            )

    def peak(self, features: tuple[Feature, ...], accumulate: int) -> float:
        """Bytes at the peak of a rank; infinite where features do not go together."""
        return self.predicted(features, accumulate).device

    def _predicted(
        self, features: tuple[Feature, ...], accumulate: int, live: CostedTensors | None = None
    ) -> PeakBytes:
        model = self._model()
        resolved = [feature.resolve(self.world) for feature in features]
        job = Job(model, world=self.world)
        job.features = tuple(resolved)
        try:
            check_owners(resolved)
            for feature in resolved:
                feature.check(job)
        except ConfigError:
            return PeakBytes(float("inf"))
        shape = max(self.samples // accumulate, 1), self.run.data.sequence
        try:
            found = predict(model, resolved, self.loss, shape, ranks=self.world.size, accumulate=accumulate, live=live)
            return PeakBytes(found.peak, found.host)
        except Exception as error:
            if features == self.others:
                raise ConfigError(f"the peak cannot be predicted: {type(error).__name__}: {error}") from error
            return PeakBytes(float("inf"))

    @cached_property
    def step(self) -> CostedTensors:
        """A micro-batch of the run as it is."""
        block = ""
        if self.blocks:
            model = self._model()
            first = repeated(model)[0]
            block = next(name for name, module in model.named_modules() if module is first)
        live = CostedTensors(self.rates, block)
        self._predicted(self.others, self.run.settings.accumulate, live)
        return live

    def ways(self, allow: Container[Knob], rounding: bool) -> Iterator[Way]:
        """Those that may be chosen, with the optimizer's state as it is or in 8 bits."""
        plain = not any(Seam.SHARD in each.seams and not isinstance(each, DDP) for each in self.others)
        alone = tuple(each for each in self.others if not isinstance(each, DDP))
        found = [Way(self.others, "")]
        if plain and self.readers > 1 and "zero" in allow:
            found.append(Way((*alone, Zero()), "memory.zero"))
        if plain and self.readers > 1 and "fsdp" in allow:
            found.append(Way((*alone, FSDP()), "parallel.fsdp"))
        if plain and self.device != "cpu" and "offload" in allow:
            found.append(Way((*alone, Offload()), "memory.offload"))
        if self.device != "cpu" and "activations" in allow and self.blocks > 1 and not self._on(OffloadActivations):
            found += [Way((*way.features, OffloadActivations()), _and(way.said, _ACTIVATIONS)) for way in found]
        for way in found:
            rounded = tuple(_rounded(each) for each in way.features)
            if not rounding:
                yield way
            elif "8bit" in allow and rounded != way.features:
                yield Way(rounded, _and(way.said, "optim.adamw8bit"))

    def choices(self, allow: Container[Knob], rounding: bool) -> list[MemoryChoice]:
        """Combinations from the one that adds the least time to a step: with state as it is, or in 8 bits."""
        start = self.run.settings.accumulate
        counts = [n for n in range(start, self.samples + 1) if self.samples % n == 0]
        if "accumulate" not in allow:
            counts = [start]
        recomputes = "recompute" in allow and self.blocks and not self._on(Recompute)
        ways = levels(self.step.calls[: self.step.needed]) if recomputes else []
        found = list(chain.from_iterable(self._of(way, counts, ways) for way in self.ways(allow, rounding)))
        return sorted(found, key=lambda choice: (round(choice.added, 4), choice.blocks, choice.accumulate))

    def _of(self, way: Way, counts: Sequence[int], levels: Sequence[RecomputeLevel]) -> Iterator[MemoryChoice]:
        start = self.run.settings.accumulate
        held = self._line(way.features, counts)
        recomputed = self._line((*way.features, Recompute()), counts) if levels else held
        state = self._seconds_of_state(way) - self._seconds_of_state(Way(self.others, ""))
        state += self._seconds_of_activations(way, counts[-1])
        pass_again = 3 * self.weights / self.rates.copied + self.step.operators * self.rates.launch
        choosing = len(self.step.calls) * self.rates.chosen
        for accumulate in counts:
            added = state + (accumulate - start) * pass_again
            share = start / accumulate  # of the samples of the micro-batch whose cost is known
            yield MemoryChoice(way, accumulate, added=added, roughly=held(accumulate))
            for level in levels:
                for blocks in range(1, self.blocks + 1):
                    part = blocks / self.blocks
                    peak = held(accumulate) * (1 - part) + recomputed(accumulate) * part + blocks * level.nbytes * share
                    again = blocks * (level.seconds * share + (choosing if level.keep else 0.0)) * accumulate
                    yield MemoryChoice(way, accumulate, blocks, level, added + again, peak)

    def _line(self, features: tuple[Feature, ...], counts: Sequence[int]) -> Any:
        """Bytes by the number of micro-batches, from those of one sample and of two where there may be several."""
        fewest, most = self.samples // counts[-1], self.samples // counts[0]
        low = self.peak(features, counts[-1])
        if most == fewest:
            return lambda _: low
        other = counts[-2]
        slope = (self.peak(features, other) - low) / (self.samples // other - fewest)
        return lambda accumulate: low + slope * (self.samples // accumulate - fewest)

    def _seconds_of_state(self, way: Way) -> float:
        """Of a step of the optimizer and of what is exchanged, as far as ways differ in it."""
        ranks = self.readers if any(isinstance(each, Zero | FSDP) for each in way.features) else 1
        seconds = 7 * self.weights / self.rates.copied / ranks
        if any(isinstance(each, AdamW8bit) for each in way.features):
            seconds *= EIGHT_BITS
        if any(isinstance(each, FSDP) for each in way.features):
            seconds += self.weights / LINK  # gathered once more for the backward pass
        if any(isinstance(each, Offload) for each in way.features):
            seconds += 2 * self.weights / self.rates.host
        return seconds

    def _seconds_of_activations(self, way: Way, accumulate: int) -> float:
        """Of a step: how much longer the copies of activations take than the forward and the backward pass."""
        without = tuple(each for each in way.features if not isinstance(each, OffloadActivations))
        if without == way.features or self._on(OffloadActivations):
            return 0.0
        micro = self.predicted(way.features, accumulate).host - self.predicted(without, accumulate).host
        copied = max(accumulate * micro, 0.0) / self.rates.host  # down, and as long up
        computed = self.run.settings.accumulate * self.step.seconds
        return max(copied - computed / 3, 0.0) + max(copied - 2 * computed / 3, 0.0)

    def _on(self, kind: type[Feature]) -> bool:
        """Whether the run file says so already."""
        return any(isinstance(each, kind) for each in self.others)

    def _with(self, choice: MemoryChoice, budget: Budget, peak: float) -> Run:
        """The run with a choice."""
        without = self.peak(self.others, self.run.settings.accumulate)
        settled = replace(
            budget,
            chosen=choice.describe(self.run, self.blocks) or "nothing: it fits as it is",
            predicted_gib=float(f"{peak / GIB:.4g}"),
            without_gib=float(f"{without / GIB:.4g}"),
            added=round(choice.added / (self.run.settings.accumulate * self.step.seconds), 4),
        )
        settings = replace(self.run.settings, accumulate=choice.accumulate)
        return replace(self.run, settings=settings, features=(*choice.features, settled)).completed(self.world)


def _and(said: str, more: str) -> str:
    return f"{said}, {more}" if said else more


def _rounded(feature: Feature) -> Feature:
    if type(feature) is not AdamW:
        return feature
    return AdamW8bit(**{each.name: getattr(feature, each.name) for each in fields(feature)})


def main(arguments: Sequence[str]) -> int:
    """Choose for the run on standard input, for so many ranks of which so many are on this host."""
    ranks, local = map(int, arguments)
    run = parse(tomllib.loads(sys.stdin.read()))
    try:
        print(within_budget(run, World(size=ranks, local_size=local)).dump())
    except ShoestringError as error:
        print(json.dumps(error.parts()))
        return error.code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
