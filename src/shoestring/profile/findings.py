"""What an analysis finds in a profile: what is wrong, at which line, how that is known, and what to change."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shoestring.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One finding. Pages and summaries show them before all else, the one with the largest gain first."""

    title: str
    """What is wrong, as a short phrase: "the optimizer updates each parameter by itself"."""
    file: str
    """Path of the file with the line, as the tree has it; empty if it is no single line's doing."""
    line: int
    """Line to change, from 1; 0 if `file` is empty."""
    evidence: str
    """What was measured, as a sentence with numbers."""
    advice: str
    """What to change, as a sentence."""
    gain: tuple[float, float] | None = None
    """Least and most of the profiled time that the change saves, as fractions of it; None where it has no figure."""
    expected: float = 0.0
    """Part of the profiled time that the change is expected to save, where it is too uncertain to be told, too."""
    limit: bool = False
    """Whether that is only a limit, because what else there is to do decides how much of a wait can be hidden."""
    nodes: tuple[int, ...] = ()
    """Nodes of the tree that show it; the page marks them in the flame graph."""

    def __post_init__(self) -> None:
        if self.gain is not None and not 0 <= self.gain[0] <= self.gain[1] < 1:
            raise ConfigError(f"a finding that saves {self.gain} of the time", hint="0 <= least <= most < 1")

    @property
    def saving(self) -> str:
        """What the change saves, in words; empty where it has no figure."""
        if self.gain is None:
            return ""
        least, most = (f"{100 * share:.{2 if share < 0.995 else 3}g}%" for share in self.gain)
        factors = (f"{1 / (1 - share):.2f}x" for share in self.gain)
        share = least if least == most else f"{least} to {most}"
        return f"saves {share} of the time ({' to '.join(dict.fromkeys(factors))} as fast)"


def by_gain(findings: Iterable[Finding]) -> list[Finding]:
    """The findings that are expected to save most first."""

    def saved(finding: Finding) -> float:
        return finding.expected or (finding.gain[0] if finding.gain else 0.0)

    return sorted(findings, key=saved, reverse=True)
