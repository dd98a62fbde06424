"""Real workers and trials, killed and stopped at random moments: nothing is lost, nothing counts twice."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter

import pytest
import sqlalchemy as sql

from benchmarks.tune import toy_worker
from benchmarks.tune.toy_trial import undisturbed
from shoestring.core.errors import ConfigError, WorldError
from shoestring.tune.process import TrialProcess, TrialServer, end_former
from shoestring.tune.settings import Halving
from shoestring.tune.store import Store, connect
from tests.waiting import until

KILLS, STALLS = 40, 10


def url_of(folder):
    return f"sqlite:///{folder / 'store.db'}"


def check_results(store, folder, trials, steps):
    """Every trial has exactly one result, which is that of an undisturbed one; the steps that were repeated."""
    ended = store.trials()
    assert [trial.state for trial in ended] == ["done"] * trials
    repeated = 0
    for trial in ended:
        assert trial.value == undisturbed(trial.parameters["toy.x"], steps)
        steps_log = (folder / f"trial-{trial.number}" / "steps.log").read_text().split()
        repeated += len(steps_log) - steps
    return repeated


def published(worker):
    worker.proposer.publish()
    return Counter(trial.state.name for trial in worker.proposer.study.get_trials())


def test_a_study_runs_to_its_end_and_optuna_shows_it(tmp_path):
    worker = toy_worker.build(url_of(tmp_path), tmp_path, 3, 20.0, 10, 0.0)
    worker.run()
    assert check_results(worker.store, tmp_path, 3, 10) == 0
    assert published(worker) == {"COMPLETE": 3}
    best = worker.proposer.study.best_trial
    assert best.value == min(trial.value for trial in worker.store.trials())
    assert list(best.intermediate_values) == [5, 10]


@pytest.mark.slow
def test_what_a_killed_worker_did_not_publish_another_one_does_after_its_lease(tmp_path):
    worker = toy_worker.build(url_of(tmp_path), tmp_path, 1, 20.0, 10, 0.0)
    store, search = worker.store, worker.proposer
    now = [100.0]
    store._now = lambda: sql.literal(now[0])
    lease = search.propose("killed", 10.0)
    store.renew(lease, 10.0, reports={step: float(step) for step in range(1, 1001)})
    store.finish(lease, "done", 1000.0)
    search.publish()
    assert {each.state.name for each in search.study.get_trials()} == {"RUNNING"} and not search.over()
    now[0] += 11.0
    assert search.over()
    (shown,) = search.study.get_trials()
    assert shown.state.name == "COMPLETE" and shown.value == 1000.0
    assert len(shown.intermediate_values) <= 201 and shown.intermediate_values[1000] == 1000.0


def test_a_preempted_trial_is_saved_and_given_back(tmp_path):
    worker = toy_worker.build(url_of(tmp_path), tmp_path, 1, 20.0, 2000, 0.005)
    log = tmp_path / "trial-0" / "steps.log"

    def preempts():
        try:
            until(lambda: log.exists() and len(log.read_text().split()) >= 20)
        finally:
            worker.stop.set()

    runs = threading.Thread(target=preempts)
    runs.start()
    worker.run()
    runs.join()
    (trial,) = worker.store.trials()
    assert trial.state == "ready" and trial.step >= 20, "it saved at the step after the signal"
    assert trial.step == int(log.read_text().split()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("began", [True, False])
def test_a_trial_that_others_ask_to_stop_has_not_failed(tmp_path, began):
    """Slurm signals all processes of a job: the trial may have saved and ended before its worker looks at it."""
    worker = toy_worker.build(url_of(tmp_path), tmp_path, 1, 20.0, 200, 0.005)
    worker.attempts, start, stopped = 1, worker.start, []

    def start_and_stop(lease):
        trial = start(lease)
        if not stopped:
            until(lambda: not began or (tmp_path / "trial-0" / "checkpoint.json").exists())
            stopped.append(os.kill(int(trial.place.split()[1]), signal.SIGTERM))
            until(lambda: trial.poll() is not None)
        return trial

    worker.start = start_and_stop
    worker.run()
    (trial,) = worker.store.trials()
    assert (trial.state, trial.attempts, trial.epoch) == ("done", 0, 2)
    assert len((tmp_path / "trial-0" / "steps.log").read_text().split()) == 200, "no step is repeated"


@pytest.mark.slow
def test_successive_halving_continues_the_best_trials_from_their_checkpoints(tmp_path):
    worker = toy_worker.build(url_of(tmp_path), tmp_path, 4, 20.0, 20, 0.02, schedule=Halving(first=5, factor=2))
    worker.run()
    trials = worker.store.trials()
    done = [trial for trial in trials if trial.state == "done"]
    assert Counter(trial.state for trial in trials)["pruned"] >= 2 and done
    closest = min(trials, key=lambda trial: abs(trial.parameters["toy.x"] - 0.3))
    assert closest.state == "done"
    for trial in done:
        assert trial.value == undisturbed(trial.parameters["toy.x"], 20)
    assert published(worker)["PRUNED"] == 4 - len(done)


def test_an_objective_never_written_fails_and_says_what_was(tmp_path):
    store = Store(connect(url_of(tmp_path)), toy_worker.NAME)
    worker = toy_worker.build(url_of(tmp_path), tmp_path, 3, 20.0, 5, 0.0)
    start = worker.start
    worker.start = lambda lease: misread(start(lease))
    with pytest.raises(ConfigError, match="the run never wrote the objective `accuracy`; it wrote: loss"):
        worker.run()  # and not all of the other trials before anybody is told
    (trial,) = store.trials()
    assert trial.state == "failed"
    assert trial.note == "the run never wrote the objective `accuracy`; it wrote: loss"
    assert published(worker) == {"FAIL": 1}


@pytest.mark.slow
def test_a_study_whose_trials_all_fail_is_given_up_early(tmp_path):
    worker = toy_worker.build(url_of(tmp_path), tmp_path, 30, 20.0, 5, 0.0)
    refused = "import sys; sys.exit('error: this never works')"
    worker.start, worker.attempts = lambda lease: process(refused, tmp_path / str(lease.number)), 1
    with pytest.raises(
        ConfigError, match="3 trials failed, and no trial has a result; the last error: this never works"
    ):
        worker.run()


def test_workers_that_show_a_trial_at_once_do_not_disturb_each_other(tmp_path, monkeypatch):
    first, second = (toy_worker.build(url_of(tmp_path), tmp_path, 1, 20.0, 10, 0.0).proposer for _ in "ab")
    lease = first.propose("a", 20.0)
    first.store.renew(lease, 20.0, step=10, reports={5: 2.0, 10: 1.0}, worked=0.0, tokens=0.0, place="")
    before = second.storage.get_trial(lease.trial)
    first.store.finish(lease, "done", 1.0)
    monkeypatch.setattr(first.store, "mark_published", lambda trial: None)
    first.publish(lease.number)
    monkeypatch.setattr(second.storage, "get_trial", lambda trial: before)  # as it was before the other one ended it
    second.publish(lease.number)
    assert second.store.unpublished(abandoned=False) == []


@pytest.mark.parametrize(
    "when", ["while a trial runs", pytest.param("just before the next one", marks=pytest.mark.slow)]
)
def test_a_killed_fork_server_costs_an_attempt_at_most(tmp_path, caplog, when):
    worker = toy_worker.build(url_of(tmp_path), tmp_path, 2, 20.0, 100, 0.002)
    start, killed = worker.start, []

    def start_and_kill(lease):
        trial = start(lease)
        if not killed:
            killed.append(trial._server)
            if when == "while a trial runs":
                until((tmp_path / "trial-0" / "checkpoint.json").exists)
            else:
                until(lambda: trial.poll() is not None)
            os.kill(trial._server.pid, signal.SIGKILL)
        return trial

    worker.start = start_and_kill
    with caplog.at_level("WARNING"):
        worker.run()
    trials = worker.store.trials()
    assert [trial.state for trial in trials] == ["done", "done"]
    assert [trial.attempts for trial in trials] == [int(when == "while a trial runs"), 0]
    if when == "while a trial runs":
        assert any("the process that starts the trials was killed" in each.getMessage() for each in caplog.records)


def test_a_host_that_cannot_start_trials_says_so_and_keeps_no_lease(tmp_path):
    worker = toy_worker.build(url_of(tmp_path), tmp_path, 1, 20.0, 10, 0.0)
    server = TrialServer(["no_such_module"])
    worker.start = lambda lease: TrialProcess(server, run_code, [""], tmp_path / "trial-0", "loss")
    with pytest.raises(WorldError, match="no process for trials can be started"):
        worker.run()
    (trial,) = worker.store.trials()
    assert (trial.state, trial.attempts) == ("ready", 0)
    worker.start = lambda lease: (tmp_path / "store.db" / "no folder").mkdir()
    with pytest.raises(NotADirectoryError):
        worker.run()
    assert worker.store.trials()[0].state == "ready"


DIVERGES = """
import sys
from pathlib import Path
from shoestring.report import history_file
history_file.add(Path({folder!r}), "started", rank=0, step=0)
history_file.add(Path({folder!r}), "failed", rank=0, step=3, error="NonFiniteError", message="the loss is nan")
sys.exit("error: the loss became nan at step {number}")
"""


@pytest.mark.slow
def test_only_failures_of_one_cause_end_a_study(tmp_path):
    """Diverged trials are results, and different failures say nothing of the next trial."""
    worker = toy_worker.build(url_of(tmp_path), tmp_path, 7, 20.0, 5, 0.0)
    start, worker.attempts, server = worker.start, 1, TrialServer([])
    causes = ("no room", "no file", "no luck")

    def begin(lease):
        folder, code = tmp_path / f"trial-{lease.number}", DIVERGES
        if lease.number == 6:
            return start(lease)
        if lease.number < 3:
            code = f"import sys; sys.exit('error: {causes[lease.number]}')"
        code = code.format(folder=str(folder), number=lease.number)
        return TrialProcess(server, run_code, [code], folder, "loss")

    worker.start = begin
    worker.run()
    trials = worker.store.trials()
    assert [trial.state for trial in trials] == ["failed"] * 6 + ["done"]
    assert trials[5].note == "diverged: the loss became nan at step 5"


def process(code, folder):
    """A trial that runs some code."""
    return TrialProcess(TrialServer([]), run_code, [code], folder, "loss")


def run_code(code):
    exec(code, {})


def misread(trial):
    trial.metric = "accuracy"
    return trial


def test_metrics_are_read_again_from_a_file_that_was_replaced_or_cut(tmp_path):
    trial = process("", tmp_path)
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "loss": 2.0}\n')
    assert trial.read() == {1: 1.0, 2: 2.0}
    path.write_text('{"step": 1, "loss": 1.5}\n')
    assert trial.read() == {1: 1.5}
    aside = tmp_path / "aside"
    aside.write_text('{"step": 1, "loss": 1.5}\n{"step": 2, "loss": 2.5}\n{"step": 3, "loss": 3.5}\n')
    aside.replace(path)
    assert trial.read() == {1: 1.5, 2: 2.5, 3: 3.5} and trial.read() == {}
    trial.close()


@pytest.mark.parametrize("method", ["random", "tpe", "gp"])
def test_workers_that_propose_at_once_do_not_repeat_each_other(tmp_path, method):
    first, second = (toy_worker.build(url_of(tmp_path), tmp_path, 4, 20.0, 10, 0.0, method).proposer for _ in "ab")
    first.store.trials = second.store.trials = list  # neither sees what the other has begun
    values = [first.propose("a", 20.0).parameters["toy.x"], second.propose("b", 20.0).parameters["toy.x"]]
    assert len(set(values)) == 2


def test_the_process_of_a_lost_lease_is_ended_though_it_is_stopped(tmp_path):
    trial = process("import signal; signal.pause()", tmp_path)
    place = trial.place
    os.kill(int(place.split()[1]), signal.SIGSTOP)
    end_former("elsewhere " + place.partition(" ")[2])
    assert trial.poll() is None, "that is a process of another host"
    end_former(place)
    assert trial.poll() == -signal.SIGKILL
    trial.close()


@pytest.mark.slow
def test_a_trial_dies_with_its_worker(tmp_path):
    code = (
        "import sys; from pathlib import Path; from tests.tune.test_workers import process; import signal\n"
        "trial = \"print('begun', flush=True); import signal; signal.pause()\"\n"
        "t = process(trial, Path(sys.argv[1]))\n"
        "print(t.place, flush=True); signal.pause()"
    )
    worker = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    pid = int(worker.stdout.readline().split()[1])
    until(lambda: "begun" in (tmp_path / "trial.log").read_text())  # before that it ends by itself without a parent
    worker.kill()
    worker.communicate(timeout=30)
    until(lambda: not alive(pid))


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:  # noqa: PTH123
            return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.all_cases
def test_kills_and_stalls_at_random_moments_lose_nothing(tmp_path):
    """40 kills and 10 stalls past the lease, over 3 workers and 12 trials."""
    kills, stalls, trials, lease, chance = KILLS, STALLS, 12, 2.0, random.Random(0)
    arguments = [url_of(tmp_path), str(tmp_path), str(trials), str(lease), "400", "0.02"]
    toy_worker.build(arguments[0], tmp_path, trials, lease, 400, 0.02)

    def begin():
        return subprocess.Popen([sys.executable, "-m", "benchmarks.tune.toy_worker", *arguments])

    workers, stopped, done = [begin() for _ in range(3)], {}, 0
    deadline = time.monotonic() + 600
    try:
        while kills + stalls > done and time.monotonic() < deadline:
            time.sleep(chance.uniform(0.2, 1.2))
            index = chance.randrange(3)
            if workers[index].poll() is not None:
                workers[index] = begin()
            elif index in stopped:
                if time.monotonic() - stopped[index] > 2 * lease:
                    workers[index].send_signal(signal.SIGCONT)
                    del stopped[index]
            elif chance.random() < stalls / (kills + stalls):
                workers[index].send_signal(signal.SIGSTOP)
                stopped[index] = time.monotonic()
                done += 1
            else:
                workers[index].kill()
                workers[index].wait()
                workers[index] = begin()
                done += 1
        for index in stopped:
            workers[index].send_signal(signal.SIGCONT)
        for worker in workers:
            worker.wait(timeout=max(1.0, deadline - time.monotonic()))
        worker = toy_worker.build(arguments[0], tmp_path, trials, lease, 400, 0.02)
        worker.run()  # what no worker was left to finish
    finally:
        for process in workers:
            process.kill()
            process.wait()
    repeated = check_results(worker.store, tmp_path, trials, 400)
    assert repeated <= (toy_worker.EVERY + 1) * done
    counts = published(worker)
    assert counts["COMPLETE"] == trials and counts["RUNNING"] == 0
