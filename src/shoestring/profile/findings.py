"""Findings of analyses of a profile: a problem, the line that causes it, the evidence, and what to change."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shoestring.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A problem that an analysis found. Pages and summaries show findings first, ordered by gain."""

    title: str
    """What is wrong, as a short phrase such as "the optimizer updates each parameter by itself"."""
    file: str
    """Path of the source file, as in the tree; empty if no single line causes the problem."""
    line: int
    """Line to change, from 1; 0 if `file` is empty."""
    evidence: str
    """What was measured, as a sentence with numbers."""
    advice: str
    """What to change, as a sentence."""
    gain: tuple[float, float] | None = None
    """Smallest and largest likely saving, as fractions of the profiled time; None if the saving cannot be estimated."""
    expected: float = 0.0
    """Expected saving as a fraction of the profiled time; findings are ordered by it. Also set for findings whose
    `gain` is None."""
    limit: bool = False
    """Whether the saving is an upper limit, because it depends on how much waiting other work of the program can
    overlap."""
    nodes: tuple[int, ...] = ()
    """Nodes of the tree that show the problem; the page marks them in the flame graph."""

    def __post_init__(self) -> None:
        if self.gain is not None and not 0 <= self.gain[0] <= self.gain[1] < 1:
            raise ConfigError(f"the gain of a finding is {self.gain}", hint="give fractions: 0 <= least <= most < 1")

    @property
    def saving(self) -> str:
        """Describe `gain` in words; empty if `gain` is None."""
        if self.gain is None:
            return ""
        least, most = (f"{100 * share:.{2 if share < 0.995 else 3}g}%" for share in self.gain)
        factors = (f"{1 / (1 - share):.2f}x" for share in self.gain)
        share = least if least == most else f"{least} to {most}"
        return f"saves {share} of the time ({' to '.join(dict.fromkeys(factors))} as fast)"


def by_gain(findings: Iterable[Finding]) -> list[Finding]:
    """Sort findings by expected saving, the largest first."""

    def saved(finding: Finding) -> float:
        return finding.expected or (finding.gain[0] if finding.gain else 0.0)

    return sorted(findings, key=saved, reverse=True)
