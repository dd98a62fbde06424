"""Programs with planted faults, their twins without, and clean programs: what the analyses are judged by.

They were written by somebody who had not seen the analyses. `program.py` says what counts as right. The ten workloads
are not among the clean programs: like most code that is found, they are not free of the nine faults.
"""

from __future__ import annotations

from benchmarks.profile.planted.program import FAULTS, Clean, Planted, programs

__all__ = ["CLEAN", "PLANTED", "Clean", "Planted"]

PLANTED = programs(__name__, FAULTS)

CLEAN = programs(__name__, ("clean_training", "clean_other"))
