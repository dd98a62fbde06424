"""Programs with planted faults, and their twins, by the author of the analyses, who tuned them on these."""

from __future__ import annotations

from benchmarks.profile.planted_by_author import (
    communication,
    copies,
    evaluation,
    fusible,
    growing,
    hotspot,
    imbalance,
    layout,
    loading,
    optimizers,
    python_bound,
    recomputation,
    retracing,
    synchronization,
    threads,
    unjitted,
)

_FAULTS = (hotspot, fusible, optimizers, imbalance, synchronization, loading, layout, retracing, communication)
_FAULTS += (python_bound, unjitted, copies, recomputation, evaluation, threads, growing)

PLANTED = [program for module in _FAULTS for program in module.PROGRAMS]
