"""State whose loss is not finite is staged, for nobody waits for the loss, but never kept."""

import pytest
import torch
import torch.distributed as dist

from shoestring.checkpoint.recovery.resume import resume
from shoestring.checkpoint.tiers.file_acts import Files
from shoestring.testing.pool import Pool
from tests.rigs.checkpointing.known import BETWEEN, RunSetup, Trainee, build_checkpointer, trained


def one_more(checkpointer, state, progress, loss):
    state.content, progress.step = state.make(progress.step + 1), progress.step + 1
    checkpointer.wait()
    checkpointer.capture(False, loss)
    checkpointer.drain()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1.5])
def test_what_is_not_finite_reaches_no_level(tmp_path, value):
    checkpointer, state, progress = build_checkpointer(tmp_path / "disk", 0, 1, Files())
    trained(checkpointer, state, progress, range(1, 2 * BETWEEN))
    one_more(checkpointer, state, progress, torch.tensor(value))
    for _ in range(BETWEEN):
        one_more(checkpointer, state, progress, None)  # nor does what comes after it, before training has ended
    checkpointer.close()
    again, *_ = build_checkpointer(tmp_path / "disk", 0, 1, Files())
    assert resume(again, "auto") == checkpointer.safe["disk"] == (3 * BETWEEN if value == 1.5 else BETWEEN)
    again.close()


def diverging(folder, bad):
    """A scenario: on one rank of several the loss is not finite, as where replicas train alone."""
    trainee = Trainee.of(RunSetup(folder=folder, ranks=3))
    trainee.train(7)
    checkpointer, before = trainee.checkpointer, dict(trainee.checkpointer.safe)
    for step in range(8, 12):  # the first is due at peers and on disk
        trainee.at(step)
        checkpointer.wait()
        checkpointer.capture(False, torch.tensor(float("nan") if dist.get_rank() == bad else 1.0))
        checkpointer.drain()
    after = dict(checkpointer.safe)
    checkpointer.close()
    again = Trainee.of(RunSetup(folder=folder, ranks=3))
    found = again.restored()
    again.checkpointer.close()
    return before, after, found


@pytest.mark.slow
def test_one_rank_without_a_finite_loss_is_enough(tmp_path):
    with Pool(3, timeout=60) as pool:
        for before, after, found in pool.call(diverging, folder=str(tmp_path), bad=1):
            assert before["disk"] == after["disk"] > 0 and before["peers"] == after["peers"] > 0
            assert found == [7, ""]
