"""Loops that people write themselves: they end with a checkpoint, at a signal too, and their schedules know the end."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import ranks
import torch
from torch import nn

import shoestring as ss
from shoestring.core.errors import WorldError
from shoestring.core.job import attachments_of
from shoestring.core.world import World

STEPS = 6


class Signalled(nn.Linear):
    """A linear layer that gets SIGTERM in its third forward pass, on one rank."""

    calls = 0

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 3 and os.environ.get("RANK", "0") == "0":
            signal.raise_signal(signal.SIGTERM)
        return super().forward(input)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(2, 3), torch.tensor([0, 1])


def job(folder: Path, saves: Callable[..., ss.Feature] = ss.checkpoint.Plain, **arguments) -> ss.Job:
    model = arguments.pop("model", None) or nn.Linear(3, 2)
    made = ss.Job(model, optimizer=partial(torch.optim.SGD, lr=0.1), world=World(), **arguments)
    return ss.compose(made, [saves(folder=str(folder)), ss.optim.Schedule(warmup=1, final=0.0)])


def plain(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("step-*"))


@pytest.mark.parametrize("total", [STEPS, [batch()] * STEPS], ids=["a number", "a loader"])
def test_a_schedule_decays_to_the_end_of_a_loop_that_says_its_total(tmp_path, total):
    rates = []
    with job(tmp_path, total=total) as made:
        while not made.done:
            made.step(batch())
            rates.append(made.optimizer.param_groups[0]["lr"])
    assert len(rates) == STEPS and rates == sorted(rates, reverse=True) and rates[-1] < 0.01
    assert plain(tmp_path) == [f"step-{STEPS:08d}.safetensors"]


@pytest.mark.parametrize("saves", [ss.checkpoint.Plain, ss.checkpoint.Tiered])
def test_a_loop_that_ends_before_its_total_saves_once_it_is_left(tmp_path, saves):
    with job(tmp_path, saves, total=STEPS) as made:
        for _ in range(4):
            made.step(batch())
        assert plain(tmp_path) == []
    (save,) = plain(tmp_path)
    assert save.startswith("step-00000004")
    with job(tmp_path, saves, total=2 * STEPS) as made:  # a longer one resumes from there, and keeps its own total
        assert made.restore is not None and made.restore("auto") == 4 and made.progress.total == 2 * STEPS


def test_a_loop_that_never_says_its_total_saves_at_its_end_too(tmp_path):
    with job(tmp_path) as made:
        made.step(batch())
    assert plain(tmp_path) == ["step-00000001.safetensors"]


def test_a_loop_that_fails_or_never_begins_saves_nothing(tmp_path):
    with pytest.raises(RuntimeError, match="on purpose"), job(tmp_path) as made:
        made.step(batch())
        raise RuntimeError("on purpose")
    with job(tmp_path):
        pass
    made = job(tmp_path)
    made.step(batch())
    made.close()
    assert plain(tmp_path) == []


def test_sigterm_ends_a_loop_after_its_step_and_saves(tmp_path):
    with job(tmp_path, model=Signalled(3, 2), total=STEPS) as made, ss.stop_on_signals(made):
        while not made.done:
            made.step(batch())
    assert made.progress.step == 4  # a vote travels with the loss of a whole step
    assert plain(tmp_path) == ["step-00000004.safetensors"]


def foreign(folder: Path, world: int) -> int:
    """A loop that keeps its own forward and backward passes; the steps it made before it saw a signal."""
    torch.manual_seed(0)
    inner = Signalled(3, 2)
    model = nn.parallel.DistributedDataParallel(inner) if world > 1 else inner
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ss.attach(model, optimizer, ss.checkpoint.Plain(folder=str(folder))) as made, ss.stop_on_signals(made):
        for _ in range(STEPS):
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if attachments_of(made).stopping:
                break
    return made.progress.step


def test_sigterm_ends_a_loop_that_was_kept_as_it_is(tmp_path):
    assert foreign(tmp_path, 1) == 3
    assert plain(tmp_path) == ["step-00000003.safetensors"]


def test_sigterm_at_one_rank_ends_both_after_the_same_step(tmp_path):
    ranks.run(Path(__file__), str(tmp_path), size=2, local_size=2)
    made = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert made[0] == made[1] and made[0] < STEPS
    assert plain(tmp_path) == [f"step-{made[0]:08d}.safetensors"]


def test_ranks_that_have_not_joined_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(WorldError, match=r"have not joined.*with ss.join\(\)"):
        ss.Job(nn.Linear(2, 2))
    assert ss.Job(nn.Linear(2, 2), world=World()).world.size == 1  # who wants to be alone says so


def main(folder: Path) -> None:
    with ss.join() as world:
        made = foreign(folder, world.size)
        (folder / f"rank-{world.rank}.json").write_text(json.dumps(made))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
