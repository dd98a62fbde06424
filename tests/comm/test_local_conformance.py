"""Replicas that train on their own, held to the contract of all features."""

from __future__ import annotations

from typing import ClassVar

import pytest

from shoestring.comm import DiLoCo, FedAvg, LocalSGD, SparseLoCo
from shoestring.testing import Case, FeatureSuite

REPLICAS = {"parallel.fsdp": "both keep the models of all ranks together"}


@pytest.mark.slow
class TestLocalSGD(FeatureSuite):
    feature = LocalSGD(every=3, start=1)
    exact_across_ranks = False
    representative = False
    tolerance = 0.1


class TestDiLoCo(FeatureSuite):
    feature = DiLoCo(every=3, outer_lr=0.5, outer_momentum=0.5)
    exact_across_ranks = False
    tolerance = 0.15
    clashes: ClassVar = REPLICAS

    @pytest.mark.slow  # comm.PowerSGD meets the other areas in the quick tests
    def test_composes(self, case: Case) -> None:
        super().test_composes(case)


@pytest.mark.slow
class TestFedAvg(FeatureSuite):
    """Each rank is a client. A turn begins without momentum, so it learns less in a step."""

    feature = FedAvg(every=3, proximal=0.01, private=("blocks.1.norm.*",))
    exact_across_ranks = False
    tolerance = 0.5
    clashes: ClassVar = REPLICAS


@pytest.mark.slow
class TestSparseLoCo(FeatureSuite):
    feature = SparseLoCo(every=3)
    exact_across_ranks = False
    tolerance = 0.15
    clashes: ClassVar = REPLICAS
