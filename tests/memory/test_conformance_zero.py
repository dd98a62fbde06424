"""ZeRO under the conformance suite."""

import pytest

from shoestring.memory import Zero
from shoestring.testing import FeatureSuite

CLASHES = {
    "parallel.fsdp": "two owners of SHARD",
    "comm.bf16": "nothing is left to exchange",
}


class TestZero(FeatureSuite):
    feature = Zero()
    clashes = CLASHES

    @pytest.mark.slow
    def test_composes(self, case):
        super().test_composes(case)


@pytest.mark.slow
class TestStageOne(FeatureSuite):
    feature = Zero(stage=1, bucket_mb=1e-3)
    clashes = CLASHES
