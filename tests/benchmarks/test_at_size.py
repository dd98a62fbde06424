"""The contest at size, at a tiny one: parts add up to a whole run, and times on a link are what bytes make them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.comm.at_size import HIDDEN, LATENCY, TRIAL, AtSize, AtSizeContest
from benchmarks.comm.at_size_check import check
from benchmarks.comm.contestant import CLIP, WARMUP, adamw
from benchmarks.comm.curves import steps_to
from benchmarks.comm.methods import BF16, DDP, local, ours
from benchmarks.comm.peers import TorchArithmetic, TorchInBatches
from benchmarks.comm.replicas import Replicas, SeedData
from benchmarks.comm.setting import RANKS, Setting
from benchmarks.harness import Deadline, OutOfBudget
from shoestring.comm.codecs.lockstep import run_lockstep
from shoestring.core.errors import ConfigError

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Drawn(Setting):
    """Words that count up from a random one, so that no corpus is written."""

    def corpus(self, folder: Path) -> None:
        pass

    def batches(self, folder: Path, rank: int, size: int, seed: int) -> Iterator[dict[str, Tensor]]:
        draw = torch.Generator().manual_seed(1000 * seed + rank)
        while True:
            first = torch.randint(self.vocabulary, (2, 1), generator=draw)
            words = (first + torch.arange(self.sequence + 1)) % self.vocabulary
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


class Short(Deadline):
    """Has time for a beginning, and none left at the second look."""

    def __init__(self) -> None:
        self.looks = 0

    def left(self) -> float:
        self.looks += 1
        return 100.0 if self.looks == 1 else 0.0


def contest(folder: Path, deadline: Deadline | None = None, size: AtSize = SIZE) -> AtSizeContest:
    folder.mkdir(exist_ok=True)
    return AtSizeContest(size, folder, folder, CPU, deadline or Deadline())


def data(folder: Path, seed: int = 1) -> SeedData:
    return SeedData(SETTING, folder, seed, CPU)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_parts_add_up_to_a_whole_run(tmp_path, method):
    whole = contest(tmp_path / "whole").run(method, 1, 8)
    for _ in range(2):  # after steps 3 and 6
        with pytest.raises(OutOfBudget):
            contest(tmp_path / "parts", Short()).run(method, 1, 8)
        assert len(list((tmp_path / "parts").glob("*.safetensors"))) == 1
    parts = contest(tmp_path / "parts").run(method, 1, 8)
    assert parts["held_out"] == whole["held_out"]
    assert [step for step, _ in whole["held_out"]] == [0, 2, 4, 6, 8]
    assert (parts["sent"], parts["collectives"]) == (whole["sent"], whole["collectives"])
    assert not list((tmp_path / "parts").glob("*.safetensors"))


def test_no_run_begins_without_time(tmp_path):
    with pytest.raises(OutOfBudget):
        contest(tmp_path, Deadline(1.0)).run(DDP, 1, 8)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("method", AtSize().methods, ids=lambda method: method.name)
def test_every_method_learns(tmp_path, method):
    setting = replace(SETTING, vocabulary=8)
    replicas = Replicas(method.at(1e-2), SeedData(setting, tmp_path, 1, CPU), timed=1)
    examples = list(setting.examples(tmp_path, 0, 1).values())
    before = replicas.held_out(examples)
    for _ in range(60):
        replicas.step()
    assert replicas.held_out(examples) < before - 0.1
    assert replicas.sent > 0 and all(seconds > 0 for seconds in replicas.per_step().values())


def test_ddp_in_lockstep_is_training_on_the_mean_gradient(tmp_path):
    replicas, model = Replicas(DDP, data(tmp_path)), SETTING.model(1)
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


def test_what_graphs_read_and_write_stays_where_it_is(tmp_path):
    replicas = Replicas(METHODS[1], data(tmp_path))

    def places() -> list[int]:
        weights = [parameter for model in replicas.models for parameter in model.parameters()]
        grads = [grad for room in replicas.grads for grad in room.values()]
        assert all(parameter.grad is not None for parameter in weights)
        return [each.data_ptr() for each in (*weights, *[each.grad for each in weights], *grads, replicas.batch)]

    before = places()
    for _ in range(5):
        replicas.step()
    replicas.held_out(list(SETTING.examples(tmp_path, 0, 1).values()))
    replicas.load_state_dict(replicas.state_dict())
    assert places() == before


def test_a_merge_by_whole_averages_leaves_replicas_equal(tmp_path):
    replicas = Replicas(local("LocalSGD", "LocalSGD", every=2, codec="fp32"), data(tmp_path))
    replicas.step()
    apart = [next(model.parameters()).clone() for model in replicas.models]
    assert not torch.equal(apart[0], apart[1])
    replicas.step()
    for model in replicas.models[1:]:
        assert torch.equal(next(model.parameters()), next(replicas.models[0].parameters()))


def test_powersgd_in_batches_is_that_of_torchs_hook():
    draw = torch.Generator().manual_seed(0)
    shapes = {"a": (24, 16), "b": (24, 16), "c": (16, 40), "d": (16,)}
    batched, single = ([kind(2) for _ in range(RANKS)] for kind in (TorchInBatches, TorchArithmetic))
    for step in range(3):
        grads = [{name: torch.randn(shape, generator=draw) for name, shape in shapes.items()} for _ in range(RANKS)]
        copies = [{name: grad.clone() for name, grad in own.items()} for own in grads]
        run_lockstep(single, copies, step)
        if step == 0:  # from equal bases
            grads = copies
            for mine, theirs in zip(batched, single, strict=True):
                Q, residual = theirs.state["Q"], theirs.state["residual"]
                for state, of in (("Q", Q), ("residual", residual)):
                    mine.state[state] = {"24x16": torch.stack([of["a"], of["b"]]), "16x40": of["c"][None].clone()}
            continue
        run_lockstep(batched, grads, step)
        for mine, theirs in zip(grads, copies, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


def test_a_run_ends_once_its_smoothed_loss_is_at_the_target(tmp_path):
    size = replace(SIZE, look=1)
    whole = contest(tmp_path / "whole", size=size).run(METHODS[0].at(1e-2), 1, 20)["held_out"]
    target = sum(loss for _, loss in whole[8:13]) / 5
    early = contest(tmp_path / "early", size=size).run(METHODS[0].at(1e-2), 1, 20, target)["held_out"]
    assert len(early) < len(whole)
    assert early == whole[: len(early)]
    assert steps_to(early, target) == steps_to(whole, target)


def test_the_grid_grows_until_the_best_rate_is_inside(tmp_path, monkeypatch):
    size = replace(SIZE, rates=(1.0, 2.0, 4.0))
    for best, found, tried in ((2.0, 2.0, 3), (8.0, 8.0, 5), (0.5, 0.5, 5), (0.1, 0.25, 5), (9.0, 8.0, 5)):
        asked = []

        def run(self: AtSizeContest, method, seed: int, steps: int, best=best, asked=asked) -> dict:
            asked.append(method.lr)
            loss = float("nan") if method.lr > 10 else abs(method.lr - best)
            return {"held_out": [[0, 9.0], [steps, loss]]}

        monkeypatch.setattr(AtSizeContest, "run", run)
        assert contest(tmp_path, size=size).tuned(DDP).lr == found
        assert len(asked) == tried


def test_seconds_of_a_step(tmp_path):
    sized = contest(tmp_path)
    run = {"sent": 12.5e6, "collectives": 2.0, "coding": 0.1, "computing": 0.6}
    wire = 1.0 + 2 * LATENCY
    assert sized.seconds(run, DDP, "100mbit") == pytest.approx(0.7 + wire - 0.6 * HIDDEN)
    assert sized.seconds(run, DDP, "1gbit") == pytest.approx(0.7)
    assert sized.seconds(run, METHODS[1], "100mbit") == pytest.approx(0.7 + wire)
    assert sized.seconds(run, METHODS[1], "100mbit", 10.0) == pytest.approx(7.0 + wire)


@pytest.mark.slow
def test_the_whole_contest(tmp_path):
    size = replace(SIZE, rates=(1e-2,))
    sized = contest(tmp_path, size=size)
    found = sized.ahead("1gbit")
    assert found.value > 0 and "10 times" in found.note
    assert 2 * sized.chosen(BF16)[1]["sent"] == sized.chosen(DDP)[1]["sent"]
    assert contest(tmp_path, Deadline(0.0), size=size).ahead("1gbit") == found  # from what is stored
    path = next(tmp_path.glob("*.json"))
    path.write_text(path.read_text().replace('"text": ""', '"text": "other"'))
    with pytest.raises(ConfigError, match="different texts"):
        contest(tmp_path, Deadline(0.0), size=size).ahead("1gbit")


@pytest.mark.slow
def test_what_is_whole_is_told_while_other_runs_are_not(tmp_path):
    some = contest(tmp_path)
    method = SIZE.own[0]
    some.chosen(DDP)
    some.chosen(method)
    some.deadline = Deadline(0)
    told = some.so_far("1gbit")
    assert told.count("\n") == 2 and all(each.name in told for each in (DDP, method)) and "DiLoCo" not in told


def test_check_finds_passes_that_differ(tmp_path, monkeypatch, capsys):
    size = replace(SIZE, peers=(DDP,), own=())
    assert check(contest(tmp_path, size=size), steps=1) in ("together", "in-turn", "eager")
    right, made = Replicas.forward_backward, []

    def wrong(self: Replicas, rank: int) -> None:
        right(self, rank)
        made.extend([self] * (self not in made))
        if self is made[-1] and len(made) == 2:
            next(iter(self.grads[1].values())).mul_(1.1)

    monkeypatch.setattr(Replicas, "forward_backward", wrong)
    assert check(contest(tmp_path, size=size), steps=1) == "eager"
    assert "DDP fp32: gradients differ" in capsys.readouterr().out
