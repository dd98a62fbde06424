"""Two hosts train over a slow link, lose something, resume from the last checkpoint, and end as an undisturbed run."""

import shutil

import pytest

from shoestring.testing.netlab import DISK, netlab, netlab_available
from tests.rigs.lab_run import EVERY, STEPS, STRIKE, LabRun, undisturbed
from tests.waiting import until

REASON = netlab_available()
pytestmark = [pytest.mark.netlab, pytest.mark.slow, pytest.mark.skipif(REASON is not None, reason=str(REASON))]


@pytest.fixture(scope="module")
def lab_run(tmp_path_factory):
    return LabRun.prepare(tmp_path_factory.mktemp("restart"))


@pytest.fixture(scope="module")
def expected(lab_run):
    losses = lab_run.local("local")
    assert list(losses) == list(range(1, STEPS + 1))
    return losses


@pytest.fixture
def lab(lab_run):
    with netlab(hosts=2, rate="100mbit", shared=lab_run.shared) as lab:
        yield lab


def test_two_hosts_end_with_the_losses_of_two_local_ranks(lab, lab_run, expected):
    job = undisturbed(lab, lab_run, "undisturbed")
    assert lab_run.losses("undisturbed") == expected
    assert "2 ranks on 2 hosts" in job.output(0)
    assert min(lab.bytes(0).tx, lab.bytes(1).tx) > STEPS * 100_000  # gradients did cross the link


def test_a_killed_worker_a_lost_host_and_a_cut_link_cost_steps_and_change_nothing(lab, lab_run, expected):
    job = lab_run.start(lab, "struck", "--run.timeout", "6", restarts=6)

    lab_run.reach(job, "struck", STRIKE)
    lab.kill(1)
    until(lambda: f"resumed from step {STRIKE - STRIKE % EVERY}; " in job.output(0), seconds=120)
    assert "are repeated, up to" in job.output(0)
    assert job.output(0).count("error: rank 0 on host0 has lost rank 1 on host1: ") == 1

    lab_run.reach(job, "struck", 2 * STRIKE)
    lab.remove(1)
    lab.add(1)
    job.join(1)
    until(lambda: job.output(0).count("resumed from step") == 2, seconds=120)
    assert job.output(0).count("error: rank 0 on host0 has lost rank 1 on host1: ") == 2

    lab_run.reach(job, "struck", 3 * STRIKE)
    lab.cut(1)
    until(lambda: "reaches neither" in job.output(1) and job.output(0).count("error: ") == 3, seconds=120)
    lab.mend(1)
    assert "error: rank 0 on host0 has lost rank 1 on host1: nothing arrived for 6 s" in job.output(0)
    assert "error: rank 1 on host1 reaches neither rank 0 on host0 nor the rendezvous store" in job.output(1)

    job.check(120)
    assert job.output(0).count("resumed from step") == 3
    assert lab_run.losses("struck") == expected


@pytest.mark.all_cases
def test_with_the_host_of_the_rendezvous_the_job_ends_and_the_same_command_continues(lab, lab_run, expected):
    job = lab_run.start(lab, "first", "--run.timeout", "6")
    lab_run.reach(job, "first", STRIKE)
    lab.remove(0)
    until(lambda: "error: " in job.output(1), seconds=120)
    assert "error: rank 1 on host1 reaches neither rank 0 on host0 nor the rendezvous store" in job.output(1)
    lab.add(0)
    until(lambda: job.codes()[1] is not None, seconds=120)
    assert "RendezvousConnectionError" in job.output(1)
    again = lab_run.start(lab, "first")
    again.check(120)
    assert "resumed from step" in again.output(0)
    assert lab_run.losses("first") == expected


@pytest.mark.all_cases
def test_with_folders_on_the_hosts_own_disks_the_newest_checkpoint_is_found(lab, lab_run, expected):
    """The host that was first has the checkpoint; here the other one brings it back."""
    folder = DISK / "run"
    lab_run.start(lab, "own", "--run.folder", str(folder), "--run.steps", "20").check(120)
    here, there = lab.path(0, folder), lab.path(1, folder)
    assert not (there / "checkpoints").exists()
    shutil.rmtree(there, ignore_errors=True)
    shutil.copytree(here, there)
    shutil.rmtree(here)
    job = lab_run.start(lab, "own-again", "--run.folder", str(folder))
    job.check(120)
    assert "resumed from step 20" in job.output(0)
    rows = (here / "metrics.jsonl").read_text()
    assert f'"loss": {expected[STEPS]}' in rows and '"step": 20,' not in rows
