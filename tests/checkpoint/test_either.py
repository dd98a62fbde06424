"""`Plain` and `Tiered` change places in a run's folder: it resumes from the newest of what either has saved."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from shoestring.checkpoint import Plain, Tiered
from shoestring.checkpoint.tiers.disk import MANIFEST
from shoestring.core.compose import compose
from shoestring.core.errors import CheckpointError
from shoestring.core.feature import Feature
from shoestring.core.job import Job
from shoestring.core.world import World
from shoestring.testing import jobs


def run(saves: Feature, until: int, *, where: str = "auto", die: bool = False) -> int | None:
    """Train to a step, with a checkpoint at the end unless it dies; the step that it resumed from."""
    torch.manual_seed(0)
    job = compose(Job(jobs.tiny(), optimizer=partial(torch.optim.AdamW, lr=1e-2), world=World(), total=99), [saves])
    assert job.restore is not None
    began = job.restore(where)
    for number in range(job.progress.step, until):
        job.step(jobs.batch(number))
    if not die:
        job.finish()
    job.close()
    return began


@pytest.fixture
def plain(tmp_path: Path) -> Plain:
    return Plain(folder=str(tmp_path / "saves"))


@pytest.fixture
def tiered(tmp_path: Path) -> Tiered:
    settings = {"memory_every": 0, "peers_every": 0, "disk_every": 0}
    return Tiered(folder=str(tmp_path / "saves"), memory_folder=str(tmp_path / "memory"), **settings)


def test_what_tiered_saved_plain_resumes_from_and_back_again(plain, tiered):
    assert run(tiered, 2) is None
    assert run(plain, 4) == 2
    assert run(tiered, 6) == 4  # the one file is newer than the checkpoint beside it
    assert run(plain, 8) == 6
    assert run(tiered, 9) == 8


def test_what_is_newer_but_damaged_is_passed_over_in_either_form(plain, tiered, tmp_path):
    run(tiered, 2)
    run(plain, 4)
    (save,) = (tmp_path / "saves").glob("step-*.safetensors")
    save.write_bytes(save.read_bytes()[:-100])
    assert run(tiered, 6) == 2
    (newest,) = (tmp_path / "saves").glob("step-00000006-*")
    part = max(newest.iterdir(), key=lambda path: path.stat().st_size)
    part.write_bytes(bytes(part.stat().st_size))
    assert run(plain, 7) == 2


@pytest.mark.parametrize("kind", ["plain", "tiered"])
def test_checkpoints_that_cannot_be_used_are_an_error(plain, tiered, tmp_path, kind, request):
    run(tiered, 2)
    (save,) = (tmp_path / "saves").glob("step-*")
    (save / MANIFEST).write_bytes(b"{}")
    before = sorted((tmp_path / "saves").glob("step-*/*"))
    with pytest.raises(CheckpointError, match=r"holds checkpoints, and none of them can be used: step-00000002"):
        run(request.getfixturevalue(kind), 4)
    assert sorted((tmp_path / "saves").glob("step-*/*")) == before


def test_what_was_gone_back_from_is_not_taken_again_in_either_form(plain, tiered, tmp_path):
    run(tiered, 2)
    run(plain, 4)
    (checkpoint,) = (tmp_path / "saves").glob("step-00000002-*")
    assert run(tiered, 3, where=str(checkpoint)) == 2
    assert run(plain, 5) == 3  # not 4, which was abandoned
    (one_file,) = (tmp_path / "saves").glob("step-00000005.safetensors")
    assert run(tiered, 8) == 5
    assert run(plain, 6, where=str(one_file)) == 5
    assert run(tiered, 7) == 6  # not 8


def test_a_folder_without_checkpoints_starts(plain, tiered, tmp_path):
    assert run(plain, 1, die=True) is None and run(tiered, 1, die=True) is None
