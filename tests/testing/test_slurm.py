"""The guide's batch script under a real Slurm of one node."""

import time

import pytest

from benchmarks.restart import STEPS, STRIKE, Trial
from benchmarks.slurm import slurm, slurm_available

REASON = slurm_available()
pytestmark = [pytest.mark.slurm, pytest.mark.skipif(REASON is not None, reason=str(REASON))]


@pytest.fixture
def lab(tmp_path_factory):
    with slurm(tmp_path_factory.mktemp("slurm")) as lab:
        yield lab


def test_a_job_told_to_end_saves_and_the_same_command_goes_on(lab, tmp_path):
    trial = Trial.prepare(tmp_path)
    expected = trial.local("local", workers=1)
    command = (trial.run, "--run.folder", str(trial.shared / "job"))
    long = lab.submit(*command, "--run.steps", "100000")
    end = time.monotonic() + 120
    while max(trial.losses("job"), default=0) < STRIKE:
        assert time.monotonic() < end, lab.log(long)
        time.sleep(0.05)
    lab.run("scancel", "--signal=TERM", str(long))  # what --signal=TERM@120 does before the time is up
    assert lab.wait(long) != "COMPLETED"
    assert "SIGTERM: ending after this step, and saving" in lab.log(long)
    assert "stopped after" in lab.log(long)
    stopped = max(trial.losses("job"))

    last = lab.submit(*command, "--run.steps", str(stopped + STEPS))
    assert lab.wait(last) == "COMPLETED", lab.log(last)
    assert f"resumed from step {stopped}\n" in lab.log(last)
    losses = trial.losses("job")
    assert list(losses) == list(range(1, stopped + STEPS + 1))
    assert {step: losses[step] for step in range(1, STRIKE)} == {step: expected[step] for step in range(1, STRIKE)}
