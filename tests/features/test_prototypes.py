"""Techniques to come, held to the whole contract beside a codec and the checkpoint cache; core knows none of them."""

from __future__ import annotations

from typing import ClassVar

from prototypes import Adapter, ShardedState, Smooth, Sparse

from shoestring.checkpoint import Tiered
from shoestring.comm import PowerSGD
from shoestring.testing import FeatureSuite

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
