"""What was decided, and the price that was predicted for it and for everything else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from shoestring.core.cluster import Cluster
from shoestring.core.simulate import makespan
from shoestring.core.trace import Trace


class Priced(Protocol):
    """Something that may be chosen, because what it would do to a step can be computed."""

    def predict(self, trace: Trace, cluster: Cluster) -> Trace:
        """One step as it would be, from the `trace` of one without it; what is done every n-th step counts 1/n."""
        ...


@dataclass(frozen=True)
class Plan:
    """A decision. `predicted` has the seconds a step of every candidate, those preferred at equal price first."""

    choice: str
    reason: str
    predicted: dict[str, float]

    @property
    def seconds(self) -> float:
        return self.predicted[self.choice]


def choose(candidates: Mapping[str, Priced], trace: Trace, cluster: Cluster, *, margin: float) -> Plan:
    """The first candidate, unless another one is faster by more than `margin` of its time; then the fastest of all,
    or one before it whose time is within half of the margin."""
    predicted = {name: makespan(each.predict(trace, cluster)) for name, each in candidates.items()}
    first, best = next(iter(predicted)), min(predicted, key=predicted.__getitem__)
    if predicted[best] >= predicted[first] * (1 - margin):
        return Plan(first, f"nothing else is more than {margin:.0%} faster", predicted)
    close = next(name for name, seconds in predicted.items() if seconds <= predicted[best] * (1 + margin / 2))
    gain = predicted[first] / predicted[close]
    return Plan(close, f"{gain:.2f}x as fast as {first}", predicted)
