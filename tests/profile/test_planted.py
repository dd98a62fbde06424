"""Planted programs compute the same as their twins, name lines of their own, and there are enough of each kind."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.profile import planted_by_author
from benchmarks.profile.planted import CLEAN, PLANTED
from benchmarks.profile.planted.program import Planted

SLOW = {"retracing", "communication"}


def numbers(result):
    parts = result if isinstance(result, list | tuple) else [result]
    return np.concatenate([np.asarray(part, np.float64).ravel() for part in parts])


def cases(programs):
    def slow(program):
        return program.framework == "jax" or getattr(program, "analysis", "") in SLOW

    return [pytest.param(each, id=each.name, marks=[pytest.mark.slow] if slow(each) else []) for each in programs]


@pytest.mark.parametrize("program", cases(PLANTED))
def test_a_planted_program_and_its_twin_compute_the_same(program):
    pytest.importorskip(program.framework)
    steps = 3
    torch.set_num_threads(1)
    faulty = numbers(program.run(steps))
    np.testing.assert_allclose(numbers(program.fixed(steps)), faulty, rtol=2e-3, atol=2e-4)
    assert np.isfinite(faulty).all()
    assert np.ptp(faulty) > 0


OTHER_WIDTHS = "recompile-each-width"  # its fault is that the widths differ, and so do the sums
SAME = [each for each in planted_by_author.PLANTED if each.name != OTHER_WIDTHS]


@pytest.mark.slow
@pytest.mark.parametrize("program", [pytest.param(each, id=each.name) for each in SAME])
def test_the_authors_programs_and_their_twins_compute_the_same(program):
    pytest.importorskip(program.framework)
    torch.set_num_threads(1)
    faulty = numbers(program.run(4))
    np.testing.assert_allclose(numbers(program.fixed(4)), faulty, rtol=2e-3, atol=2e-4)
    assert program.lines


@pytest.mark.parametrize("program", cases(CLEAN))
def test_a_clean_program_computes_finite_numbers_that_do_not_depend_on_what_ran_before(program):
    pytest.importorskip(program.framework)
    first = numbers(program.run(2))
    assert np.isfinite(first).all()
    np.testing.assert_array_equal(numbers(program.run(2)), first)


def test_each_analysis_has_programs_of_its_own_and_each_fault_a_line():
    assert len({program.name for program in [*PLANTED, *CLEAN]}) == len(PLANTED) + len(CLEAN)
    kinds = Counter(program.analysis for program in PLANTED)
    assert len(kinds) == 9
    assert min(kinds.values()) >= 3
    assert len(CLEAN) >= 20
    taken = Counter(place for program in PLANTED for place in program.lines)
    assert set(taken.values()) == {1}
    for program in PLANTED:
        assert program.lines, program.name
        for file, line in program.lines:
            text = Path(file).read_text().splitlines()[line - 1]
            assert text.endswith(f"# fault: {program.name}")
            assert text.split("#")[0].strip(), "the fault is code"


def test_a_fault_whose_name_begins_with_another_is_not_taken_for_it():
    program = Planted("adamw-for", "optimizer", int, int, 1, "benchmarks.profile.planted.optimizers")
    assert program.lines == []
