"""Techniques to come, held to the whole contract beside a codec and the checkpoint cache; core knows none of them."""

from __future__ import annotations

from typing import ClassVar

import pytest
from prototypes import Adapter, ShardedState, Smooth, Sparse

from shoestring.checkpoint import Tiered
from shoestring.comm import PowerSGD
from shoestring.testing import FeatureSuite, clauses
from shoestring.testing.case import ViolationError

PARTNERS = (PowerSGD(rank=2), Tiered())


class TestSparse(FeatureSuite):
    feature = Sparse()
    tolerance = 0.1
    partners: ClassVar = PARTNERS


class TestAdapter(FeatureSuite):
    feature = Adapter()
    tolerance = 0.3
    partners: ClassVar = PARTNERS


class TestSmooth(FeatureSuite):
    feature = Smooth()
    tolerance = 0.8
    partners: ClassVar = PARTNERS


class TestShardedState(FeatureSuite):
    feature = ShardedState()
    ranks: ClassVar = (2,)
    reshards = False
    partners: ClassVar = (Tiered(),)


class DenseMaster(Sparse):
    """Exports the master in place of what it computes with: the fault that the clause is for."""

    def export(self, weights, kept):
        return weights


class TestFault(FeatureSuite):
    feature = DenseMaster(part="p")
    partners: ClassVar = ()

    @pytest.fixture(autouse=True)
    def only_exports(self, request):
        if request.node.name != "test_exports_what_it_computes":
            pytest.skip("one clause is looked at")

    def test_exports_what_it_computes(self, case):
        with pytest.raises(ViolationError, match="`export` does not give"):
            clauses.exports_what_it_computes(case)
