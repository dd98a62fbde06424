"""A rank that dies within an exchange: the others say which, and training goes on with what was still owed."""

import pytest

from benchmarks.restart import EVERY, STRIKE, Trial
from shoestring.testing.netlab import netlab, netlab_available

REASON = netlab_available()
pytestmark = [pytest.mark.netlab, pytest.mark.slow, pytest.mark.skipif(REASON is not None, reason=str(REASON))]

CODEC = ("--comm.powersgd.rank", "2")


def test_the_others_name_it_and_a_restart_repeats_nothing_but_steps(tmp_path):
    trial = Trial.prepare(tmp_path)
    expected = trial.local("local", *CODEC)
    with netlab(hosts=2, rate="100mbit", shared=trial.shared) as lab:
        job = trial.start(lab, "struck", *CODEC, "--run.timeout", "6", restarts=3)
        trial.reach(job, "struck", STRIKE)
        lab.kill(1)
        job.check(120)
        assert f"resumed from step {STRIKE - STRIKE % EVERY}; " in job.output(0)
        assert job.output(0).count("error: rank 0 on host0 has lost rank 1 on host1: ") == 1
        assert trial.losses("struck") == expected
