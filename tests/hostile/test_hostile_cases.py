"""Generated folders, requests and records of strangers: none waits, none is a traceback, none gets out.

48 of them, or a thousand with SHOESTRING_ALL_CASES in the environment.
"""

import shutil

import pytest

from tests.hostile.frame import run_cases, run_traced_cases
from tests.hostile.kinds import KINDS
from tests.shares import share

CASES = share(1000, 32)
TRACED = CASES // 10


def seeds_of(kind, total):
    """The seeds of a kind: as many of each, and one more of the first where that does not add up."""
    number, names = list(KINDS).index(kind), len(KINDS)
    return range(total // names + (number < total % names))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_cases_end_in_success_or_one_line(kind, tmp_path):
    assert run_cases(kind, seeds_of(kind, CASES), tmp_path) == []


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("strace"), reason="needs strace")
def test_cases_open_nothing_outside(tmp_path):
    assert run_traced_cases([(kind, seed) for kind in KINDS for seed in seeds_of(kind, TRACED)], tmp_path) == []
