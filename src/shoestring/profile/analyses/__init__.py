"""Analyses: functions from a profile to findings. `find` runs all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from shoestring.profile.findings import Finding, by_gain
from shoestring.profile.recording import Profile

Analysis = Callable[[Profile], Iterable[Finding]]

ANALYSES: tuple[Analysis, ...] = ()


def find(profile: Profile) -> list[Finding]:
    """All findings in a profile, the largest gain first."""
    return by_gain(finding for analysis in ANALYSES for finding in analysis(profile))
