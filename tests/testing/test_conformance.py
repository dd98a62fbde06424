"""Every feature that there is, held to the same contract."""

from __future__ import annotations

from typing import ClassVar

import at_loss
import pytest

from shoestring.checkpoint import Plain, Tiered
from shoestring.comm import BF16
from shoestring.graph import Compile
from shoestring.memory import Recompute
from shoestring.optim import SGD, AdamW, Clip, Schedule
from shoestring.parallel import DDP, FSDP, Pipeline, Tensor
from shoestring.precision import Autocast, Graph
from shoestring.testing import FeatureSuite


class TestClip(FeatureSuite):
    feature = Clip(max_norm=0.5)
    tolerance = 0.1


@pytest.mark.slow
class TestSchedule(FeatureSuite):
    feature = Schedule(warmup=2, shape="trapezoid", cooldown=0.3)
    tolerance = 0.05
    representative = False


@pytest.mark.slow
class TestAdamW(FeatureSuite):
    feature = AdamW(lr=2e-2)
    tolerance = 0.1


@pytest.mark.slow
class TestSGD(FeatureSuite):
    feature = SGD(lr=0.2, weight_decay=1e-4)
    tolerance = 0.1
    representative = False


@pytest.mark.slow
class TestDDP(FeatureSuite):
    feature = DDP(bucket_mb=0.01)
    representative = False  # every pair of others runs under it


class TestFSDP(FeatureSuite):
    feature = FSDP()
    returns_model = False
    clashes: ClassVar = {"comm.bf16": "nothing is left to exchange"}


@pytest.mark.slow
class TestPipeline(FeatureSuite):
    feature = Pipeline()
    returns_model = False
    clashes: ClassVar = {
        "graph.compile": "the whole model would be compiled",
        "comm.bf16": "nothing is left to exchange",
    }


@pytest.mark.slow
class TestTensor(FeatureSuite):
    feature = Tensor(columns=("blocks.*.up",), rows=("blocks.*.down",), gathered=("head", "embedding"))
    returns_model = False
    clashes: ClassVar = {
        "graph.compile": "its layers exchange activations",
        "comm.bf16": "nothing is left to exchange",
    }


class TestBF16(FeatureSuite):
    clashes: ClassVar = {"parallel.fsdp": "nothing is left to exchange"}
    feature = BF16()
    exact_across_ranks = False


@pytest.mark.slow
class TestRecompute(FeatureSuite):
    feature = Recompute(every_nth=2)


class TestAutocast(FeatureSuite):
    feature = Autocast(dtype="bf16")
    exact_across_ranks = False


@pytest.mark.slow
class TestGraph(FeatureSuite):
    feature = Graph(dtype="bf16")
    exact_across_ranks = False
    representative = False


@pytest.mark.slow
class TestMeasuredGraph(FeatureSuite):
    feature = Graph(dtype="bf16", measure=3, error=0.2, error_relative_to="gradients")
    exact_across_ranks = False
    representative = False


@pytest.mark.slow
class TestPlain(FeatureSuite):
    feature = Plain(every=2)
    representative = False
    clashes: ClassVar = {"checkpoint.tiered": "both write checkpoints"}


class TestTiered(FeatureSuite):
    feature = Tiered(memory_every=2, disk_every=4)


@pytest.mark.slow  # each clause compiles anew
class TestCompile(FeatureSuite):
    feature = Compile(backend="aot_eager")
    stays = ("the thread `tqdm_monitor`",)  # torch's compiler starts it once


@pytest.mark.slow
class TestAtLoss(FeatureSuite):
    feature = at_loss.Scaled()
    tolerance = 0.1
    representative = False
