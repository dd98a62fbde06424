"""Every way of sparse training under the conformance suite; the tiny model learns as well with half of its weights."""

import pytest

from shoestring.checkpoint import Tiered
from shoestring.comm import BF16
from shoestring.graph import Compile
from shoestring.memory import Recompute
from shoestring.optim import Clip
from shoestring.parallel import FSDP
from shoestring.precision import Autocast
from shoestring.sparse import AST, SRSTE, SSTE, STE, STEP, TSRSTE
from shoestring.testing import FeatureSuite

LAYERS = ("blocks.*",)


class TestTSRSTE(FeatureSuite):
    """The area's representative: its masks are kept, and gathered under FSDP2."""

    feature = TSRSTE(layers=LAYERS, refresh=2, calibrate=0.0, masked_decay=1e-3, tail=0.0)
    tolerance = 0.1


@pytest.mark.slow
class TestCalibrated(FeatureSuite):
    """The search for a decay factor, and the dense tail."""

    feature = TSRSTE(layers=LAYERS, refresh=2, calibrate=0.8, masked_decay=1e-3, tail=0.1)
    tolerance = 0.1
    representative = False


@pytest.mark.slow
class TestSSTE(FeatureSuite):
    feature = SSTE(layers=LAYERS)
    tolerance = 0.1
    partners = (Autocast(dtype="bf16"), Recompute(), Compile(backend="eager"), FSDP(), BF16(), Clip(), Tiered())


@pytest.mark.slow
class TestDraws(FeatureSuite):
    """Gradients of outputs are drawn: ranks draw what one rank draws."""

    feature = SSTE(layers=LAYERS, mvue=True)
    tolerance = 0.2


@pytest.mark.slow
class TestFP8(FeatureSuite):
    """Every rank has scales of its own inputs."""

    feature = SSTE(layers=LAYERS, simulate_fp8=True)
    tolerance = 0.2
    exact_across_ranks = False
    representative = False


@pytest.mark.slow
class TestSRSTE(FeatureSuite):
    feature = SRSTE(layers=LAYERS, masked_decay=1e-3)
    tolerance = 0.1
    representative = False


@pytest.mark.slow
class TestSTEP(FeatureSuite):
    feature = STEP(layers=LAYERS, earliest=0.3, latest=0.3)
    tolerance = 0.1
    representative = False


@pytest.mark.slow
class TestSTE(FeatureSuite):
    feature = STE(layers=LAYERS, mask="greedy", refresh=3)
    tolerance = 0.1
    representative = False


@pytest.mark.slow
class TestAST(FeatureSuite):
    """A trained model is fine-tuned, with a teacher, adapters, and inputs that are measured."""

    feature = AST(metric="wanda", refresh=2, slorb=8)
    tolerance = 0.1
    model = "dense_tiny:trained"
    partners = (Autocast(dtype="bf16"), Recompute(), Compile(backend="eager"), FSDP(), BF16(), Clip(), Tiered())


@pytest.mark.slow
class TestASTAlone(FeatureSuite):
    """Without a teacher and adapters it attaches to any loop, and leaves a plain 2:4 model."""

    feature = AST(refresh=2, masked_decay=1e-3, masked_decay_scale="none", distillation=0.0, slorb=0)
    tolerance = 0.1
    model = "dense_tiny:trained"
    representative = False
