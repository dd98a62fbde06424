"""A fifth set of programs with planted faults, their twins, and clean programs, in the form of `planted`.

They are of the kind that people show when they ask why their training is slow. Like the two sets before, they were
written by somebody who knew neither the analyses nor what they had found, and the profiler was not run meanwhile. What
a fault costs was measured by CPU time (by wall time where the program waits), and a timer of lines of its own showed
that no line of a clean program takes more than half of the time.
"""

from __future__ import annotations

from benchmarks.profile.planted.program import FAULTS, programs

__all__ = ["CLEAN", "PLANTED"]

PLANTED = programs(__name__, FAULTS)

CLEAN = programs(__name__, ("clean_training", "clean_models", "clean_other"))
