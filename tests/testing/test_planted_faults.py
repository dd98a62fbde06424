"""Each clause fails on the fault made for it, for that reason; and every other clause passes on that fault.

The quick tests try two of the other clauses with each fault, by turns; the slow one tries them all.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import faulty
import faulty_importer
import faulty_loader
import pytest

from shoestring.core.feature import Feature
from shoestring.optim import Clip
from shoestring.parallel import FSDP
from shoestring.testing import CLAUSES, Case, NotApplicableError
from shoestring.testing.clauses import Clause
from shoestring.testing.suite import shared


class Fault(NamedTuple):
    feature: Feature
    clause: str
    reason: str  # a pattern in the message
    declared: dict[str, Any] = {}  # noqa: RUF012  (read only)


# What cannot resume bit for bit alone, cannot on other ranks or in company either: those clauses build on it.
ALONE = {"reshards": False, "representative": False}

FAULTS = [
    Fault(faulty.Rounds(), "neutral_is_absence", "neutral on 1 rank.*losses differ", {"tolerance": 1.0}),
    Fault(faulty.Forgets(), "resumes_bitwise", "resumed on 1 rank.*loss", ALONE | {"tolerance": 0.1}),
    Fault(faulty.Mislabels(), "resumes_bitwise", '`seen` is kept as "same", but differs between ranks'),
    Fault(faulty.StartsAfresh(), "resumes_on_other_ranks", "from 1 to 2 ranks: losses differ by", {"tolerance": 0.1}),
    Fault(faulty.Unwritable(), "round_trips_through_toml", r"Unwritable\(bound=None\) does not survive a run file"),
    Fault(faulty.Speechless(), "explains_its_fields", "the field `unexplained` has no text"),
    Fault(
        faulty.Unscaled(), "one_rank_equals_two", "2 ranks and 1: losses differ by",
        {"reshards": False, "tolerance": 1.0},
    ),
    Fault(faulty.Ascends(), "converges", r"diverges|held-out loss after \d+ steps is .* more than the tolerance"),
    Fault(faulty.Grabs(), "refuses_before_it_takes", "changed before all features were checked: a tensor of 4000"),
    Fault(faulty.Encroaches(), "refuses_before_it_takes", "takes OPTIM without declaring it"),
    Fault(faulty.LeavesHook(), "releases_what_it_takes", r"ended normally.*a hook \(forward_hooks\) on the model"),
    Fault(faulty.LeavesPatch(), "releases_what_it_takes", "ended in forward.*a patched `forward` of `embedding`"),
    Fault(faulty.LeavesThread(), "releases_what_it_takes", "ended in forward.*the thread `companion`"),
    Fault(faulty.Strays(), "releases_what_it_takes", "the file notes/1.txt outside of the run's folder"),
    Fault(faulty.NeedsTheJob(), "attaches_to_a_foreign_loop", "it does nothing there", {"tolerance": 1.0}),
    Fault(
        faulty.KeepsToItself(), "exports_what_it_computes", r"in the job and .* with the exported weights",
        {"tolerance": 0.01, "steps": 2},
    ),
    Fault(faulty_importer.Peeks(), "imports_no_other_area", r"faulty_importer.py:\d+ imports the area `comm`"),
    Fault(faulty_loader.Heavy(), "imports_no_other_area", "loads torch"),
    Fault(faulty.Whole(), "composes", "with parallel.fsdp: .*DTensor"),
    Fault(
        Clip(max_norm=0.5), "composes", "with parallel.fsdp: runs, although it should be refused: no reason",
        {"clashes": {"parallel.fsdp": "no reason"}, "tolerance": 0.1, "partners": (FSDP(),)},
    ),
]  # fmt: skip


each_fault = pytest.mark.parametrize(
    "fault", FAULTS, ids=lambda fault: f"{type(fault.feature).__name__}-{fault.clause}"
)


@pytest.mark.slow
@each_fault
def test_fails_the_clause_it_breaks(fault: Fault, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    first = 2 * FAULTS.index(fault)
    others = [CLAUSES[number % len(CLAUSES)] for number in (first, first + 1)]
    some = [clause for clause in CLAUSES if clause.__name__ == fault.clause or clause in others]
    fails_only_its_own(fault, some, request, tmp_path)


@pytest.mark.slow
@pytest.mark.share(4)
@each_fault
def test_fails_no_other_clause(fault: Fault, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    fails_only_its_own(fault, CLAUSES, request, tmp_path)


def fails_only_its_own(fault: Fault, clauses: Sequence[Clause], request: pytest.FixtureRequest, folder: Path) -> None:
    declared = {"partners": (FSDP(), Clip(max_norm=0.5)), **fault.declared}
    case = Case(feature=fault.feature, folder=folder, **shared(request.config), **declared)
    failures = {}
    for clause in clauses:
        try:
            clause(case)
        except NotApplicableError:
            continue
        except AssertionError as error:
            failures[clause.__name__] = f"{error}"
    assert list(failures) == [fault.clause], failures
    assert re.search(fault.reason, failures[fault.clause], re.DOTALL)


def test_every_clause_has_a_fault() -> None:
    assert {clause.__name__ for clause in CLAUSES} == {fault.clause for fault in FAULTS}
