"""A second set of programs with planted faults, and of clean ones, which the first sets had no part in.

They were written, and committed, by somebody who had seen neither the analyses nor their tests, after the analyses had
been mended with what was found in `planted`. Of each analysis' faults one was drawn by lot for a final examination,
and ten of the clean programs: `EXAMINATION`. What was found in these was told nobody before the analyses were done.
"""

from __future__ import annotations

import random

from benchmarks.profile.planted.program import FAULTS, programs

PLANTED = programs(__name__, FAULTS)

CLEAN = programs(__name__, ("clean_training", "clean_other"))


def _drawn() -> frozenset[str]:
    lot = random.Random(20261123)
    faults = [lot.choice([program.name for program in programs(__name__, [module])]) for module in FAULTS]
    return frozenset([*faults, *lot.sample([program.name for program in CLEAN], 10)])


EXAMINATION = _drawn()
