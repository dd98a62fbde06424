"""Split operators keep to what every feature must keep to."""

from __future__ import annotations

import pytest

from shoestring.graph import Split
from shoestring.testing import FeatureSuite
from tests.graph.split_training import write_cluster


@pytest.mark.slow
class TestSplit(FeatureSuite):
    model = "tests.graph.split_training:small"
    returns_model = False
    representative = False  # clipping and checkpoints are tested beside it in test_split_training.py

    @pytest.fixture
    def feature(self, tmp_path):
        return Split(cluster=write_cluster(tmp_path / "cluster.toml", 2), order="traced")

    @pytest.mark.all_cases  # test_split_training.py resumes on one rank, and compares losses with those of one rank
    def test_resumes_on_other_ranks(self, case):
        super().test_resumes_on_other_ranks(case)

    @pytest.mark.all_cases
    def test_converges(self, case):
        super().test_converges(case)
