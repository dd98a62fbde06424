from __future__ import annotations

from pathlib import Path

import pytest

from shoestring.testing import Pool
from tests.features.newcomer.beside_ranks import STEPS, train


@pytest.mark.slow
def test_two_ranks_resume_beside_powersgd_and_tiered(tmp_path: Path):
    with Pool(2) as pool:
        whole = pool.call(train, folder=str(tmp_path / "whole"))
        begun = pool.call(train, folder=str(tmp_path / "halves"), stop=2)
        resumed = pool.call(train, folder=str(tmp_path / "halves"))
    assert len(resumed[0]) == STEPS - 2
    assert [losses + rest for losses, rest in zip(begun, resumed, strict=True)] == whole
    assert whole[0] == whole[1]
    assert whole[0][-1] < whole[0][0]
