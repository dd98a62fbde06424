"""The contest at size, at a tiny one: parts add up to a whole run, and times on a link are what bytes make them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.comm.at_size import HIDDEN, LATENCY, TRIAL, AtSizeContest, Replicas
from benchmarks.comm.contestant import CLIP, WARMUP, adamw
from benchmarks.comm.methods import DDP, local, ours
from benchmarks.comm.setting import RANKS, Setting
from benchmarks.harness import Deadline, OutOfBudget

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Drawn(Setting):
    """Random words, so that no corpus is written."""

    def corpus(self, folder: Path) -> None:
        pass

    def batches(self, folder: Path, rank: int, size: int, seed: int) -> Iterator[dict[str, Tensor]]:
        draw = torch.Generator().manual_seed(1000 * seed + rank)
        while True:
            words = torch.randint(self.vocabulary, (2, self.sequence + 1), generator=draw)
            yield {"inputs": words[:, :-1], "targets": words[:, 1:]}

    def examples(self, folder: Path, rank: int, size: int) -> dict[str, Tensor]:
        return next(self.batches(folder, 0, 1, 77))


SETTING = Drawn(dim=16, layers=1, heads=2, hidden=32, vocabulary=40, sequence=8)
SIZE = replace(TRIAL, setting=SETTING, save=3)
METHODS = (
    ours("Quantize 4 feedback", "Quantize", bits=4, rounding="nearest", feedback=True),
    local("DiLoCo", "DiLoCo", every=4),
    local("LocalSGD 4bit", "LocalSGD", every=2, codec="4bit"),
)


class Impatient(Deadline):
    """Is past at every look."""

    def check(self) -> None:
        raise OutOfBudget


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_parts_add_up_to_a_whole_run(tmp_path, method):
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    whole = AtSizeContest(SIZE, tmp_path / "whole", CPU, Deadline()).run(method, 1, 8)
    for _ in range(2):  # after steps 3 and 6
        with pytest.raises(OutOfBudget):
            AtSizeContest(SIZE, tmp_path / "parts", CPU, Impatient()).run(method, 1, 8)
    parts = AtSizeContest(SIZE, tmp_path / "parts", CPU, Deadline()).run(method, 1, 8)
    assert parts["held_out"] == whole["held_out"]
    assert [step for step, _ in whole["held_out"]] == [0, 2, 4, 6, 8]
    assert (parts["sent"], parts["collectives"]) == (whole["sent"], whole["collectives"])


def test_ddp_in_lockstep_is_training_on_the_mean_gradient(tmp_path):
    replicas, model = Replicas(DDP, SIZE, 1, tmp_path, CPU), SETTING.model(1)
    optimizer = adamw(model, DDP.lr / WARMUP)
    batches = [next(SETTING.batches(tmp_path, rank, RANKS, 1)) for rank in range(RANKS)]
    for batch in batches:
        (F.cross_entropy(model(batch["inputs"]).flatten(0, 1), batch["targets"].flatten()) / RANKS).backward()
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    replicas.step()
    for mine, theirs in zip(replicas.models[0].parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    assert replicas.sent == 2 * 3 / 4 * 4 * sum(each.numel() for each in model.parameters())


def test_a_merge_by_whole_averages_leaves_replicas_equal(tmp_path):
    replicas = Replicas(local("LocalSGD", "LocalSGD", every=2, codec="fp32"), SIZE, 1, tmp_path, CPU)
    replicas.step()
    apart = [next(model.parameters()).clone() for model in replicas.models]
    assert not torch.equal(apart[0], apart[1])
    replicas.step()
    for model in replicas.models[1:]:
        assert torch.equal(next(model.parameters()), next(replicas.models[0].parameters()))


def test_seconds_of_a_step(tmp_path):
    contest = AtSizeContest(SIZE, tmp_path, CPU, Deadline())
    run = {"sent": 12.5e6, "collectives": 2.0, "coding": 0.1}
    wire = 1.0 + 2 * LATENCY
    assert contest.seconds(run, DDP, "100mbit", 0.6) == pytest.approx(0.7 + wire - 0.6 * HIDDEN)
    assert contest.seconds(run, DDP, "1gbit", 0.6) == pytest.approx(0.7)
    assert contest.seconds(run, METHODS[1], "100mbit", 0.6) == pytest.approx(0.7 + wire)
