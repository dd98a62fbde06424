"""The guide's batch script under a real Slurm of one node."""

import time
from pathlib import Path

import pytest

from tests.rigs.lab_run import STEPS, STRIKE, LabRun
from tests.rigs.slurm import PATIENCE, slurm, slurm_available

SCRIPT = Path(__file__).parents[2] / "docs" / "examples" / "slurm.sbatch"
REASON = slurm_available()
pytestmark = [pytest.mark.slow, pytest.mark.slurm, pytest.mark.skipif(REASON is not None, reason=str(REASON))]


@pytest.fixture
def lab(tmp_path_factory):
    with slurm(tmp_path_factory.mktemp("slurm")) as lab:
        yield lab


def until(done, lab, job):
    end = time.monotonic() + PATIENCE
    while not done():
        assert time.monotonic() < end, f"{lab.state(job)}\n{lab.log(job)}"
        time.sleep(0.05)


def test_a_preempted_job_saves_its_last_step_and_resumes_from_the_queue(lab, tmp_path):
    lab_run = LabRun.prepare(tmp_path)
    expected = lab_run.local("local", workers=1)
    run, endless = tmp_path / "endless.toml", 10**6
    run.write_text(Path(lab_run.run).read_text().replace(f"steps = {STEPS}", f"steps = {endless}"))
    job = lab.submit(SCRIPT, str(run), "--run.folder", str(lab_run.shared / "job"))
    until(lambda: max(lab_run.losses("job"), default=0) >= STRIKE, lab, job)
    with lab.preempted():
        until(lambda: "stopped after" in lab.log(job) and lab.state(job) == "PENDING", lab, job)
        assert "SIGTERM: ending after this step, and saving" in lab.log(job)
        stopped = max(lab_run.losses("job"))
        run.write_text(run.read_text().replace(str(endless), str(stopped + STEPS)))

    assert lab.wait(job) == "COMPLETED", lab.log(job)
    assert f"resumed from step {stopped}\n" in lab.log(job)  # none is repeated
    losses = lab_run.losses("job")
    assert list(losses) == list(range(1, stopped + STEPS + 1))
    assert {step: losses[step] for step in range(1, STRIKE)} == {step: expected[step] for step in range(1, STRIKE)}
