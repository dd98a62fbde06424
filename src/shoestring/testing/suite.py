"""The conformance suite for pytest: subclass `FeatureSuite`, set its `feature`, and run pytest."""

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
"""One representative feature per area; features of the other areas are tested together with it."""


class FeatureSuite:
    """The tests that every feature must pass. A subclass sets the feature, and overrides defaults that do not fit it.

    class TestHalve(FeatureSuite):
        feature = Halve(share=0.5)
        tolerance = 0.1
    """

    feature: ClassVar[Feature]
    """Feature under test, with settings that have an effect; a subclass may define it as a fixture instead."""
    tolerance: ClassVar[float] = 0.02
    """Number of nats per token by which the feature may raise the held-out loss."""
    steps: ClassVar[int] = 60
    """Number of training steps after which held-out losses are compared."""
    ranks: ClassVar[tuple[int, ...]] = (1, 2)
    """Numbers of ranks to test."""
    exact_across_ranks: ClassVar[bool] = True
    """Whether two ranks compute the same as one rank, apart from the order of sums."""
    reshards: ClassVar[bool] = True
    """Whether a run may be resumed on another number of ranks."""
    returns_model: ClassVar[bool] = True
    """Whether closing the job restores the model; False if torch cannot undo a change, such as `fully_shard`."""
    stays: ClassVar[Sequence[str]] = ()
    """Resources that a library takes once per process and never releases, such as "the thread `tqdm_monitor`"."""
    representative: ClassVar[bool] = True
    """Whether to test the feature together with the representative of every other area."""
    companions: ClassVar[Sequence[Feature]] = ()
    """Features that the feature under test needs in order to work."""
    partners: ClassVar[Sequence[Feature]] = REPRESENTATIVES
    """Representatives to test the feature with; the representative of its own area is left out."""
    clashes: ClassVar[Mapping[str, str]] = {}
    """Maps each partner (`area.technique`) that must be refused beside the feature to the reason."""
    model: ClassVar[str] = "shoestring.testing.jobs:tiny"
    """Function that builds the model, written as `module:callable`. The function takes a dropout rate, and returns the
    same weights at every call. The model maps tokens to logits."""

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
    """Run one clause as a test; skip it if it does not apply to the feature."""
    try:
        clause(case)
    except NotApplicableError as reason:
        pytest.skip(f"{reason}")


def shared(config: pytest.Config) -> dict[str, Any]:
    """Return what all cases of a test session share: the pool, and the results of runs without the feature."""
    if _SHARED not in config.stash:
        pool = Pool(2)
        config.stash[_SHARED] = {"pool": pool, "baselines": {}}
        config.add_cleanup(pool.close)
    return config.stash[_SHARED]
