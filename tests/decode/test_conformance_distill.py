"""What every feature must keep to, for the distillation of drafters."""

from typing import ClassVar

import pytest

from shoestring.decode import Distill
from shoestring.testing import FeatureSuite

TEACHER, REFERENCE = "drafting:teacher", "drafting:reference"


class TestDistill(FeatureSuite):
    """Selection by a reference: its threshold is kept, and is the same on all ranks."""

    feature = Distill(teacher=TEACHER, reference=REFERENCE, fraction=0.5)
    tolerance = 0.1
    representative = False  # the slower one below, which has all of this, is tried beside other areas


@pytest.mark.slow
class TestDistillCached(FeatureSuite):
    """From the likeliest tokens of the teacher, which the run's folder keeps."""

    feature = Distill(teacher=TEACHER, reference=REFERENCE, fraction=0.8, cache_folder="teacher", top_k=8)
    tolerance = 0.1


@pytest.mark.slow
class TestDistillOnPolicy(FeatureSuite):
    """From text of the drafter's own in half of the steps, the same text whatever the batch is divided into."""

    feature = Distill(teacher=TEACHER, reference=REFERENCE, fraction=0.8, on_policy=0.5)
    tolerance = 0.1
    clashes: ClassVar = {"parallel.fsdp": "FSDP shards it"}
