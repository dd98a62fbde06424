"""Analyses of profiles: functions that take a prepared profile and return findings. `find` runs all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from shoestring.profile.analyses.accelerator import copies_alone, launch_bound
from shoestring.profile.analyses.communication import exposed_communication
from shoestring.profile.analyses.copies import repeated_copies
from shoestring.profile.analyses.drift import drifts
from shoestring.profile.analyses.evaluation import kept_gradients
from shoestring.profile.analyses.fusible import fusible_chains
from shoestring.profile.analyses.growth import growths
from shoestring.profile.analyses.hotspot import hotspots
from shoestring.profile.analyses.imbalance import imbalances
from shoestring.profile.analyses.layout import conversions
from shoestring.profile.analyses.loading import loading_stalls
from shoestring.profile.analyses.optimizer import unfused_optimizers
from shoestring.profile.analyses.python_bound import python_bound
from shoestring.profile.analyses.reading import Reading
from shoestring.profile.analyses.recomputation import recomputations
from shoestring.profile.analyses.retracing import retracings
from shoestring.profile.analyses.synchronization import synchronizations
from shoestring.profile.analyses.threads import too_many_threads
from shoestring.profile.analyses.unjitted import unjitted
from shoestring.profile.findings import Finding, by_gain
from shoestring.profile.recording import Profile

Analysis = Callable[[Reading], Iterable[Finding]]

ANALYSES: dict[str, Analysis] = {
    "hotspot": hotspots,
    "fusible": fusible_chains,
    "optimizer": unfused_optimizers,
    "imbalance": imbalances,
    "synchronization": synchronizations,
    "loading": loading_stalls,
    "layout": conversions,
    "retracing": retracings,
    "communication": exposed_communication,
    "python": python_bound,
    "unjitted": unjitted,
    "copies": repeated_copies,
    "recomputation": recomputations,
    "evaluation": kept_gradients,
    "threads": too_many_threads,
    "growth": growths,
    "drift": drifts,
    "launches": launch_bound,
    "overlap": copies_alone,
}


def find(profile: Profile) -> list[Finding]:
    """Run all analyses on a profile, and return the findings, the largest gain first."""
    reading = Reading(profile)
    return by_gain(finding for analysis in ANALYSES.values() for finding in analysis(reading))
