"""Differential checkpoints keep to what every feature must keep to."""

from typing import ClassVar

import pytest

from shoestring.checkpoint import Tiered
from shoestring.comm import Quantize
from shoestring.parallel import DDP
from shoestring.testing.suite import FeatureSuite


@pytest.mark.slow
class TestDifferences(FeatureSuite):
    feature = Tiered(differences=8, memory_every=4, peers_every=0)
    companions = (DDP(), Quantize(bits=8))
    ranks = (2,)
    exact_across_ranks = False  # the codec's, not the checkpoints'
    clashes: ClassVar = {"parallel.fsdp": "it shards what the codec exchanges", "comm.bf16": "a second codec"}
