"""Damage of every kind to saves, restored from by ranks that stay."""

from collections import Counter

import pytest
import torch.distributed as dist

from shoestring.checkpoint.format.part import Part
from shoestring.testing.pool import Pool
from tests.rigs.checkpointing import damage
from tests.rigs.checkpointing.damage import corrupted, places
from tests.rigs.checkpointing.known import STEPS, RunSetup, Trainee

pytestmark = pytest.mark.slow
RANKS, EACH = 3, 67  # 201 in all; benchmarks/checkpoint makes 10,000
SETTINGS = {"copy": {}, "parity": {"peers": "parity"}, "own-disks": {"shared": False}}


@pytest.fixture(scope="module")
def pool():
    with Pool(RANKS) as found:
        yield found


@pytest.mark.parametrize("kind", SETTINGS)
def test_damage_is_found_and_all_ranks_fall_back_to_the_newest_whole_step(pool, tmp_path, kind):
    setting = RunSetup(folder=str(tmp_path), ranks=RANKS, **SETTINGS[kind])
    assert [wrong for _, wrong in corrupted(setting, EACH, pool=pool)] == [[]]


def unverified(**arguments):
    """A scenario: nothing is compared to its checksum any more."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Part, "verify", lambda *_: None)
        return damage.trials(**arguments)


def test_damage_would_be_loaded_without_checksums(pool, tmp_path):
    setting = RunSetup(folder=str(tmp_path), ranks=RANKS)
    wrong = [line for _, lines in corrupted(setting, 20, pool=pool, scenario=unverified) for line in lines]
    assert any("unseen" in line for line in wrong) and any("not the state of step" in line for line in wrong)


def surveyed(folder):
    """A scenario: what a run leaves, by level and step."""
    setting = RunSetup(folder=folder, ranks=RANKS, peers="parity")
    trainee = Trainee.of(setting)
    trainee.train(STEPS)
    trainee.checkpointer.close()
    dist.barrier()  # what the others sealed last is there as well
    found = Counter((p.record.name.partition("-")[0].partition(".")[0], p.step) for p in places(setting))
    return sorted([*key, count] for key, count in found.items())


def test_the_run_leaves_several_steps_at_every_level(pool, tmp_path):
    assert pool.call(surveyed, folder=str(tmp_path))[0] == [
        ["held", 8, 3], ["held", 10, 3], ["manifest", 4, 1], ["manifest", 8, 1],
        ["own", 9, 3], ["own", 10, 3], ["own", 11, 3],
    ]  # fmt: skip
