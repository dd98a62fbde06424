"""Generated folders, requests and records of strangers: none waits, none is a traceback, none gets out.

200 of them, or a thousand with SHOESTRING_ALL_CASES in the environment.
"""

import os
import shutil

import pytest

from tests.hostile.frame import run_cases, run_traced_cases
from tests.hostile.kinds import KINDS

CASES = 1000 if "SHOESTRING_ALL_CASES" in os.environ else 200
TRACED = CASES // 10


def share(total, kind):
    """The seeds of a kind: as many of each, and one more of the first where that does not add up."""
    number, names = list(KINDS).index(kind), len(KINDS)
    return range(total // names + (number < total % names))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_cases_end_in_success_or_one_line(kind, tmp_path):
    assert run_cases(kind, share(CASES, kind), tmp_path) == []


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("strace"), reason="needs strace")
def test_cases_open_nothing_outside(tmp_path):
    assert run_traced_cases([(kind, seed) for kind in KINDS for seed in share(TRACED, kind)], tmp_path) == []
