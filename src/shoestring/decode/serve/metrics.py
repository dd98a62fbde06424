"""The server's metrics, in the text format of Prometheus."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

FIRST_TOKEN = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
WHOLE = (0.01, 0.05, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
Labels = tuple[tuple[str, str], ...]


class Tally:
    """A counter with one count for each combination of labels."""

    def __init__(self) -> None:
        self.counts: Counter[Labels] = Counter()

    def add(self, **labels: str) -> None:
        self.counts[tuple(labels.items())] += 1


class Histogram:
    """A histogram of values.

    Args:
        bounds: upper bounds of the buckets, in ascending order.
    """

    def __init__(self, bounds: Iterable[float]) -> None:
        self.bounds = tuple(bounds)
        self.buckets = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.buckets[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def samples(self) -> Iterator[tuple[str, Labels, float]]:
        """Yield the histogram's samples in Prometheus' format: suffix of the name, labels and value."""
        total = 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.buckets, strict=True):
            total += count
            yield "_bucket", (("le", bound),), total
        yield "_sum", (), self.sum
        yield "_count", (), total


class Metrics:
    """Metrics of requests and texts."""

    def __init__(self) -> None:
        self.requests = Tally()
        self.endings = Tally()
        self.first_token = Histogram(FIRST_TOKEN)
        self.per_token = Histogram(PER_TOKEN)
        self.whole = Histogram(WHOLE)

    def text(self, counters: Mapping[str, tuple[str, float]], gauges: Mapping[str, tuple[str, float]]) -> str:
        """All metrics in the text format of Prometheus.

        Args:
            counters: help text and value of further counters, by name.
            gauges: help text and present value of each gauge, by name.
        """
        lines: list[str] = []
        for kind, table in (("counter", counters), ("gauge", gauges)):
            for name, (help_text, value) in table.items():
                lines += _block(name, kind, help_text, [("", (), value)])
        for name, help_text, tally in (
            ("requests_total", "HTTP requests by path and status.", self.requests),
            ("texts_total", "Texts by the reason for which they ended.", self.endings),
        ):
            lines += _block(name, "counter", help_text, [("", labels, n) for labels, n in sorted(tally.counts.items())])
        for name, help_text, histogram in (
            ("time_to_first_token_seconds", "Time from a request to the first token of each text.", self.first_token),
            ("time_per_token_seconds", "Mean time of each further token of a text.", self.per_token),
            ("text_seconds", "Time from a request to the end of each text.", self.whole),
        ):
            lines += _block(name, "histogram", help_text, histogram.samples())
        return "\n".join(lines) + "\n"


def _block(name: str, kind: str, help_text: str, samples: Iterable[tuple[str, Labels, float]]) -> list[str]:
    """Build the lines of one metric."""
    name = f"shoestring_{name}"
    lines = [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"]
    for suffix, labels, value in samples:
        inner = ",".join(f'{key}="{text}"' for key, text in labels)
        lines.append(f"{name}{suffix}{{{inner}}} {value:.12g}" if inner else f"{name}{suffix} {value:.12g}")
    return lines
