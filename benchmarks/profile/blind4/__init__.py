"""A fourth set of programs with planted faults, their twins, and clean programs, in the form of `planted`.

Like the set before, they were written by somebody who knew neither the analyses nor what they had found. Nothing was
profiled while they were written; what each fault costs was measured by CPU time (by wall time where the program waits).
"""

from __future__ import annotations

from benchmarks.profile.planted.program import FAULTS, programs

__all__ = ["CLEAN", "PLANTED"]

PLANTED = programs(__name__, FAULTS)

CLEAN = programs(__name__, ("clean_training", "clean_models", "clean_other"))
