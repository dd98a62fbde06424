"""The conformance suite for pytest: subclass `FeatureSuite`, give a feature, run pytest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from shoestring.checkpoint import Tiered
from shoestring.comm import BF16
from shoestring.core.feature import Feature
from shoestring.graph import Compile
from shoestring.memory import Recompute
from shoestring.optim import Clip
from shoestring.parallel import FSDP
from shoestring.precision import Autocast
from shoestring.testing import clauses
from shoestring.testing.case import Case, NotApplicableError
from shoestring.testing.pool import Pool

_SHARED = pytest.StashKey[dict[str, Any]]()

REPRESENTATIVES: tuple[Feature, ...] = (
    Autocast(dtype="bf16"),
    Recompute(),
    Compile(backend="eager"),
    FSDP(),
    BF16(),
    Clip(max_norm=0.5),
    Tiered(),
)
"""One feature an area, which every other area's features are tried with."""


class FeatureSuite:
    """What every feature must keep to. A subclass gives the feature, and declares what differs from the defaults.

    class TestHalve(FeatureSuite):
        feature = Halve(share=0.5)
        tolerance = 0.1
    """

    feature: ClassVar[Feature]
    """The setting under test, one that changes something; a fixture of this name serves as well."""
    tolerance: ClassVar[float] = 0.02
    """Nats a token by which the held-out loss may end above that without the feature."""
    steps: ClassVar[int] = 60
    """Steps after which that is compared."""
    ranks: ClassVar[tuple[int, ...]] = (1, 2)
    """The numbers of ranks it works on."""
    exact_across_ranks: ClassVar[bool] = True
    """Two ranks compute what one does, but for the order of sums."""
    reshards: ClassVar[bool] = True
    """What it keeps survives a change of the number of ranks."""
    returns_model: ClassVar[bool] = True
    """The model is as it was once the job is closed; False where torch cannot undo it (`fully_shard`)."""
    stays: ClassVar[Sequence[str]] = ()
    """What a library that it uses takes once for the whole process and keeps, e.g. "the thread `tqdm_monitor`"."""
    representative: ClassVar[bool] = True
    """Try it with the representative of every other area."""
    companions: ClassVar[Sequence[Feature]] = ()
    """Features without which it cannot work."""
    partners: ClassVar[Sequence[Feature]] = REPRESENTATIVES
    """The representatives; those of its own area are left out."""
    clashes: ClassVar[Mapping[str, str]] = {}
    """Partners (`area.technique`) that it must refuse, each with the reason."""
    model: ClassVar[str] = "shoestring.testing.jobs:tiny"
    """`module:callable` that makes the model from a dropout rate, the same at every call; tokens in, logits out."""

    @pytest.fixture
    def case(self, request: pytest.FixtureRequest, tmp_path: Path) -> Case:
        declared = getattr(self, "feature", None)
        feature = declared if isinstance(declared, Feature) else request.getfixturevalue("feature")
        names = ("tolerance", "steps", "ranks", "exact_across_ranks", "reshards", "returns_model", "stays")
        names += ("representative", "companions", "partners", "clashes", "model")
        declarations = {name: getattr(self, name) for name in names}
        return Case(feature=feature, folder=tmp_path, **shared(request.config), **declarations)

    def test_neutral_is_absence(self, case: Case) -> None:
        check(clauses.neutral_is_absence, case)

    def test_resumes_bitwise(self, case: Case) -> None:
        check(clauses.resumes_bitwise, case)

    def test_resumes_on_other_ranks(self, case: Case) -> None:
        check(clauses.resumes_on_other_ranks, case)

    def test_round_trips_through_toml(self, case: Case) -> None:
        check(clauses.round_trips_through_toml, case)

    def test_explains_its_fields(self, case: Case) -> None:
        check(clauses.explains_its_fields, case)

    def test_one_rank_equals_two(self, case: Case) -> None:
        check(clauses.one_rank_equals_two, case)

    def test_converges(self, case: Case) -> None:
        check(clauses.converges, case)

    def test_refuses_before_it_takes(self, case: Case) -> None:
        check(clauses.refuses_before_it_takes, case)

    def test_releases_what_it_takes(self, case: Case) -> None:
        check(clauses.releases_what_it_takes, case)

    def test_attaches_to_a_foreign_loop(self, case: Case) -> None:
        check(clauses.attaches_to_a_foreign_loop, case)

    def test_exports_what_it_computes(self, case: Case) -> None:
        check(clauses.exports_what_it_computes, case)

    def test_imports_no_other_area(self, case: Case) -> None:
        check(clauses.imports_no_other_area, case)

    def test_composes(self, case: Case) -> None:
        check(clauses.composes, case)


def check(clause: clauses.Clause, case: Case) -> None:
    """Run one clause as a test; one that says nothing about the feature is skipped with its reason."""
    try:
        clause(case)
    except NotApplicableError as reason:
        pytest.skip(f"{reason}")


def shared(config: pytest.Config) -> dict[str, Any]:
    """What all cases of one test session share: its pool, which is stopped at the end, and runs without the feature."""
    if _SHARED not in config.stash:
        pool = Pool(2)
        config.stash[_SHARED] = {"pool": pool, "baselines": {}}
        config.add_cleanup(pool.close)
    return config.stash[_SHARED]
