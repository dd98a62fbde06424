from __future__ import annotations

from typing import ClassVar

import pytest
import torch

import shoestring as ss
from shoestring.testing import FeatureSuite
from shoestring.testing.jobs import batch, sgd, tiny
from tests.features.newcomer.bf16_products import BF16Products


@pytest.mark.slow
class TestBF16Products(FeatureSuite):
    feature = BF16Products()
    partners: ClassVar = (*FeatureSuite.partners, ss.graph.Compile(), ss.comm.PowerSGD(rank=1))


def losses(*features: ss.Feature) -> list[float]:
    with ss.compose(ss.Job(tiny(), optimizer=sgd()), features) as job:
        return [job.step(batch(number)).item() for number in range(3)]


@pytest.mark.slow
def test_casts_products_with_and_without_a_compiler():
    alone = losses(BF16Products())
    assert alone == losses(BF16Products(), ss.graph.Compile(backend="eager"))
    assert alone == losses(ss.graph.Compile(backend="aot_eager"), BF16Products())
    assert alone != losses()
    assert torch.allclose(torch.tensor(alone), torch.tensor(losses()), rtol=1e-2)


def test_leaves_narrow_products_alone():
    assert losses(BF16Products(min_width=1000)) == losses(ss.graph.Compile(backend="eager"))
