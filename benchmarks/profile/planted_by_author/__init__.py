"""Programs with planted faults, and their twins, by the author of the analyses, who tuned them on these."""

from __future__ import annotations

from benchmarks.profile.planted_by_author import (
    communication,
    fusible,
    hotspot,
    imbalance,
    layout,
    loading,
    optimizers,
    retracing,
    synchronization,
)

_FAULTS = (hotspot, fusible, optimizers, imbalance, synchronization, loading, layout, retracing, communication)

PLANTED = [program for module in _FAULTS for program in module.PROGRAMS]
