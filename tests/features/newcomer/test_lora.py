from __future__ import annotations

from typing import ClassVar

import pytest
import torch

import shoestring as ss
from shoestring.core.job import attachments_of
from shoestring.testing import FeatureSuite
from shoestring.testing.jobs import batch, sgd, tiny
from tests.features.newcomer.lora import LoRA


@pytest.mark.slow
class TestLoRA(FeatureSuite):
    feature = LoRA(rank=8)
    tolerance = 1.0
    """The adapted layers keep their random weights, so the model learns less; it starts 2.6 nats above."""
    partners: ClassVar = (*FeatureSuite.partners, ss.comm.PowerSGD(rank=1))


def test_trains_adapters_and_exports_layers():
    lora, fresh = LoRA(rank=4), tiny().state_dict()
    with ss.compose(ss.Job(tiny(), optimizer=sgd()), [lora]) as job:
        for number in range(3):
            job.step(batch(number))
        weights = attachments_of(job).weights()
    exported = lora.export(weights, {})
    assert exported.keys() == fresh.keys()
    assert torch.equal(weights["blocks.0.up.weight"], fresh["blocks.0.up.weight"])
    assert not torch.equal(exported["blocks.0.up.weight"], fresh["blocks.0.up.weight"])
    assert weights["blocks.0.up_adapter.up"].abs().max() > 0
