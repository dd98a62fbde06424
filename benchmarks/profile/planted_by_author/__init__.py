"""Programs with planted faults, and their twins, by the author of the analyses, who tuned them on these."""

from __future__ import annotations

from benchmarks.profile.planted.program import FAULTS, programs

_LATER = ("python_bound", "unjitted", "copies", "recomputation", "evaluation", "threads", "growing")
"""Of the second ten analyses."""

PLANTED = programs(__name__, (*FAULTS, *_LATER))
