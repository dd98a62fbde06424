"""Programs with planted faults, their twins without, and clean programs: what the analyses are judged by.

They were written by somebody who had not seen the analyses. `program.py` says what counts as right. The ten workloads
are not among the clean programs: like most code that is found, they are not free of the nine faults.
"""

from __future__ import annotations

from benchmarks.profile.planted import (
    clean_other,
    clean_training,
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
from benchmarks.profile.planted.program import Clean, Planted

__all__ = ["CLEAN", "PLANTED", "Clean", "Planted"]

_FAULTS = (hotspot, fusible, optimizers, imbalance, synchronization, loading, layout, retracing, communication)

PLANTED = [program for module in _FAULTS for program in module.PROGRAMS]

CLEAN = [*clean_training.PROGRAMS, *clean_other.PROGRAMS]
