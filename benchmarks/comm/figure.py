"""What a run of the contest comes to: steps, seconds, and the efficiency that is their product."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import geometric_mean

from benchmarks.comm.curves import efficiency
from benchmarks.comm.methods import Method
from benchmarks.comm.pace import Pace


@dataclass(frozen=True)
class Figure:
    """A method at a rate: the steps of DDP that a step is worth at each mark, by seed, and what a step takes."""

    method: Method
    worth: dict[int, tuple[float, ...]]
    bounded: frozenset[int]
    """Marks that a seed did not reach in the steps that it was given: worth no more than this."""
    free: float
    pace: Pace
    optimizer: float = 1.0
    """Steps of DDP with AdamW that a step of DDP with this method's optimizer is worth, at the last mark."""
    arithmetic: float = 0.0
    """Seconds by which this method's optimizer makes a step longer than AdamW does. Larger batches take as long."""

    def needed(self, mark: int) -> float:
        """Steps to DDP's loss at a mark."""
        return mark / geometric_mean(self.worth[mark])

    @property
    def seconds(self) -> float:
        """Of a step, on average up to the last mark."""
        needed = self.needed(max(self.worth))
        return self.pace.elapsed(needed) / needed

    def efficiency(self, mark: int) -> float:
        """1 is DDP on a network that costs nothing."""
        return efficiency((mark, self.free), (1.0, self.pace.elapsed(self.needed(mark))))

    @property
    def value(self) -> float:
        """At the last mark."""
        return self.efficiency(max(self.worth))

    def __str__(self) -> str:
        settings = ", ".join(f"{name} {value}" for name, value in self.method.settings.items())
        marks = "; ".join(
            f"{'at most ' if mark in self.bounded else ''}{', '.join(f'{each:.3f}' for each in worth)} at {mark}"
            for mark, worth in self.worth.items()
        )
        alone = times = ""
        if self.method.optimizer != "adamw":
            alone = f", of which the optimizer alone {self.optimizer:.3f}"
            rest = self.value * self.seconds / (self.seconds - self.arithmetic)
            times = f", of which {self.arithmetic:.3g} s are the optimizer's arithmetic (without it {rest:.3f})"
        times = f"{self.free:.3g} s a step without communication, {self.seconds:.3g} s with{times}"
        return f"{self.method.name} ({settings or 'no settings'}; lr {self.method.lr:g}): worth {marks}{alone}; {times}"
