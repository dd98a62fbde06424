"""The guide's batch script for workers, under a real Slurm of one node."""

import re
from pathlib import Path

import pytest
import tomli_w

from shoestring.verbs.study import read_plan
from shoestring.verbs.trials import folder_of
from tests.rigs.slurm import PATIENCE, slurm, slurm_available
from tests.small_runs import write_run_file, write_texts
from tests.tune.test_space import LR
from tests.waiting import until

SCRIPT = Path(__file__).parents[2] / "docs" / "examples" / "tune.sbatch"
REASON = slurm_available()
pytestmark = [pytest.mark.slow, pytest.mark.slurm, pytest.mark.skipif(REASON is not None, reason=str(REASON))]
STEPS = 1500


@pytest.fixture
def lab(tmp_path_factory):
    with slurm(tmp_path_factory.mktemp("slurm")) as lab:
        yield lab


def test_a_preempted_worker_gives_its_trial_back_and_continues_it_from_the_queue(lab, tmp_path):
    run = {"steps": STEPS, "data": write_texts(tmp_path / "texts")}
    write_run_file(tmp_path / "run.toml", {"run": run})
    own = {"run": str(tmp_path / "run.toml"), "folder": str(tmp_path / "study"), "trials": 1, "sampler": "random"}
    (tmp_path / "tune.toml").write_text(tomli_w.dumps({"tune": own | {"objective": "loss"}, "space": LR}))
    plan = read_plan(str(tmp_path / "tune.toml"))
    store = plan.open_store(create=True)
    metrics = folder_of(plan, 0) / "metrics.jsonl"

    def trial():
        return store.trials()[0]

    job = lab.submit(SCRIPT, plan.url)
    until(lambda: metrics.exists() and '"loss"' in metrics.read_text(), PATIENCE)
    with lab.preempted():
        until(lambda: lab.state(job) == "PENDING", PATIENCE)
        assert (trial().state, trial().attempts) == ("ready", 0), lab.log(job)
        stopped = trial().step
    assert lab.wait(job) == "COMPLETED", lab.log(job)
    assert (trial().state, trial().attempts, trial().epoch) == ("done", 0, 2)
    log = (folder_of(plan, 0) / "trial.log").read_text()
    assert re.search(rf"resumed from step {stopped}\b", log), "no step is repeated"
