"""Every exchange at every step, held to the contract of all features."""

from __future__ import annotations

from typing import ClassVar

from shoestring.comm import DGC, Dense, OkTopK, PowerSGD, Quantize, RandomK, Sign, TernGrad, TopK
from shoestring.testing import FeatureSuite


class TestDense(FeatureSuite):
    feature = Dense(parts=3, channels=2)
    representative = False


class TestPowerSGD(FeatureSuite):
    feature = PowerSGD(rank=4)
    clashes: ClassVar = {"parallel.fsdp": "nothing is left to exchange"}
    exact_across_ranks = False
    tolerance = 0.1


class TestPowerSGDAlternating(FeatureSuite):
    feature = PowerSGD(rank=4, alternate=True, wire="bf16", parts=1)
    exact_across_ranks = False
    representative = False
    tolerance = 0.5  # of matrices this small, half an iteration a step leaves much for later


class TestQuantize(FeatureSuite):
    feature = Quantize(bits=4, bucket=64, rounding="nearest", feedback=True)
    exact_across_ranks = False
    representative = False
    tolerance = 0.1


class TestSign(FeatureSuite):
    feature = Sign(bucket=64)
    exact_across_ranks = False
    representative = False
    tolerance = 0.2


class TestTernGrad(FeatureSuite):
    feature = TernGrad()
    exact_across_ranks = False
    representative = False
    tolerance = 0.5  # its noise is as large as the gradients of so small a batch


class TestTopK(FeatureSuite):
    feature = TopK(density=0.1)
    exact_across_ranks = False
    representative = False
    tolerance = 0.5


class TestRandomK(FeatureSuite):
    feature = RandomK(density=0.5)
    exact_across_ranks = False
    representative = False
    tolerance = 0.5


class TestDGC(FeatureSuite):
    feature = DGC(lr=0.2, density=0.2, warmup=10)
    exact_across_ranks = False
    representative = False
    tolerance = 0.5


class TestSelection(FeatureSuite):
    feature = Dense(select="hypernetwork", budget_kb=3.0)
    exact_across_ranks = False
    representative = False
    tolerance = 0.5


class TestOkTopK(FeatureSuite):
    feature = OkTopK(density=0.1)
    exact_across_ranks = False
    representative = False
    tolerance = 0.5
