"""Ranks of which some have the teacher's tokens and some have not: nobody waits for a teacher that others leave out."""

import pytest
import sharded_drafting

from shoestring.decode import Distill
from shoestring.testing.scenarios import encode
from shoestring.testing.suite import shared


@pytest.fixture(scope="module")
def pool(request):
    return shared(request.config)["pool"]


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True], ids=["DDP", "FSDP2"])
def test_ranks_with_other_samples_in_their_caches_train_alike(pool, tmp_path, sharded):
    feature = Distill(teacher="drafting:teacher", reference="drafting:reference", fraction=0.5)
    arguments = {"feature": encode(feature), "sharded": sharded}
    plain = pool.call(sharded_drafting.train, folder=str(tmp_path / "cold"), warm=False, **arguments)
    mixed = pool.call(sharded_drafting.train, folder=str(tmp_path / "warm"), warm=True, **arguments)
    for rank in mixed:
        assert rank["losses"] == pytest.approx(plain[0]["losses"], rel=1e-6)
    whole = 3 * 4
    assert [rank["computed"] for rank in mixed] == [whole if sharded else 0, whole]  # a sharded teacher runs on all
    assert [rank["cached"] for rank in mixed] == [0 if sharded else whole, 0]
