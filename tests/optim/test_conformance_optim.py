"""Layer-wise rates, AdaScale, Muon and averages, held to the contract of all features."""

import pytest

from shoestring.optim import EMA, LAMB, LARS, LAWA, AdaScale, Muon, ScheduleFree
from shoestring.testing import FeatureSuite


class TestLARS(FeatureSuite):
    feature = LARS(lr=3.0, vector_lr=0.05, trust_coefficient=0.02, ratio_clip="dynamic", bound_warmup=10)
    tolerance = 0.5


@pytest.mark.slow
class TestLARSOutside(FeatureSuite):
    feature = LARS(
        lr=3.0, vector_lr=0.05, trust_coefficient=0.02, rate_in_velocity=False, ratio_clip="larc", share_norms=True
    )
    tolerance = 0.5
    representative = False


@pytest.mark.slow
class TestLAMB(FeatureSuite):
    feature = LAMB(lr=0.01, share_norms=True)
    tolerance = 0.5


class TestAdaScale(FeatureSuite):
    feature = AdaScale(scale=1.5, consecutive=True)
    tolerance = 0.5


class TestMuon(FeatureSuite):
    feature = Muon(lr=0.02, share_steps=True)
    tolerance = 0.2


@pytest.mark.slow
class TestEMA(FeatureSuite):
    feature = EMA(decay=0.9)
    tolerance = 0.2


@pytest.mark.slow
class TestLAWA(FeatureSuite):
    feature = LAWA(count=3, every=4)
    tolerance = 0.5
    representative = False


class TestScheduleFree(FeatureSuite):
    feature = ScheduleFree(lr=0.02)
    tolerance = 0.2
    representative = False
