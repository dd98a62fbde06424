"""Exchanges at every step, held to the contract of all features: one of each kind of state that they keep."""

from __future__ import annotations

from typing import ClassVar

import pytest

from shoestring.comm import DGC, Dense, PowerSGD, Quantize, TopK, Transport
from shoestring.testing import Case, FeatureSuite


class CodecSuite(FeatureSuite):
    """One of many that attach alike: between two ranks, without a partner from every other area."""

    ranks = (2,)
    exact_across_ranks = False
    representative = False


@pytest.mark.slow
class TestDense(FeatureSuite):
    feature = Dense(transport=Transport(parts=3, channels=2))
    representative = False


class TestPowerSGD(FeatureSuite):
    feature = PowerSGD(rank=4)
    clashes: ClassVar = {"parallel.fsdp": "nothing is left to exchange"}
    exact_across_ranks = False
    tolerance = 0.1

    @pytest.mark.slow  # it compiles
    def test_composes(self, case: Case) -> None:
        super().test_composes(case)


@pytest.mark.slow
class TestQuantize(CodecSuite):
    feature = Quantize(bits=4, group_size=64, rounding="nearest", feedback=True)
    tolerance = 0.1


@pytest.mark.slow
class TestTopK(CodecSuite):
    feature = TopK(density=0.1)
    tolerance = 0.5


@pytest.mark.slow
class TestDGC(FeatureSuite):
    feature = DGC(lr=0.2, density=0.2, warmup=10)
    exact_across_ranks = False
    representative = False
    tolerance = 0.5


@pytest.mark.slow
class TestSelection(CodecSuite):
    feature = Dense(transport=Transport(select="hypernetwork", kb_per_step=3.0))
    tolerance = 0.5


@pytest.mark.slow
class TestSelectionByGain(TestSelection):
    feature = Dense(transport=Transport(select="gain", kb_per_step=3.0))


@pytest.mark.slow
class TestSelectionPerNode(TestSelection):
    feature = Dense(transport=Transport(select="per-node", kb_per_step=3.0))
