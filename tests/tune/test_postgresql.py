"""Studies on a PostgreSQL that the test starts and ends itself; skipped where it is not installed."""

import threading

import pytest

from benchmarks.tune import toy_worker
from benchmarks.tune.postgresql import PostgresServer, programs
from benchmarks.tune.toy_trial import undisturbed
from shoestring.core.errors import ConfigError
from shoestring.tune.store import Store, connect
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(programs() is None, reason="PostgreSQL is not installed")]

TRIALS, STEPS, LEASE = 6, 100, 5.0


@pytest.fixture(scope="module")
def server():
    with PostgresServer() as server:
        yield server


def fresh(server, folder, name):
    """Workers for a database of its own."""
    with connect(server.url).execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name}")
    url = server.url.replace("/postgres?", f"/{name}?")
    return [toy_worker.build(url, folder, TRIALS, LEASE, STEPS, 0.005) for _ in range(3)]


def run_together(workers):
    threads = [threading.Thread(target=worker.run) for worker in workers]
    for thread in threads:
        thread.start()
    return threads


def check(workers, threads):
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive()
    trials = workers[0].store.trials()
    assert [trial.state for trial in trials] == ["done"] * TRIALS
    for trial in trials:
        assert trial.value == undisturbed(trial.parameters["toy.x"], STEPS)
    states = [trial.state.name for trial in workers[0].proposer.study.get_trials()]
    assert states.count("COMPLETE") == TRIALS and "RUNNING" not in states


def test_three_workers_share_a_study(server, tmp_path):
    workers = fresh(server, tmp_path, "shared")
    check(workers, run_together(workers))


def test_a_server_that_crashes_and_comes_back_costs_no_trial(server, tmp_path):
    workers = fresh(server, tmp_path, "crashed")
    threads = run_together(workers)
    until(lambda: any(trial.step for trial in workers[0].store.trials()), seconds=120)
    server.stop()
    server.start()
    check(workers, threads)


def test_workers_take_different_trials_at_once(server, tmp_path):
    """Every worker asks for all there is, which others have left behind; no trial is leased twice."""
    store = fresh(server, tmp_path, "taken")[0].store
    for number in range(24):
        store.add(1000 + number, number, {"toy.x": 0.5}, 24)
    vanished = [store.take("vanished", 600.0) for _ in range(24)]
    for lease in vanished:
        assert store.renew(lease, -1.0)  # as if its time had passed
    together, taken = threading.Barrier(6), []

    def take(owner):
        together.wait()
        while (lease := store.take(owner, 600.0)) is not None:
            taken.append(lease)

    threads = [threading.Thread(target=take, args=(f"w{at}",)) for at in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(lease.number for lease in taken) == list(range(24))
    assert all(lease.epoch == 2 for lease in taken)


def test_a_database_that_refuses_is_one_clear_line(server):
    with pytest.raises(ConfigError, match=r"cannot use the store .*role .nobody_here. does not exist"):
        Store(connect(server.url.replace("tune@", "nobody_here@")), "s").names()
    with pytest.raises(ConfigError, match="cannot use the store"):
        Store(connect("postgresql+psycopg://tune@/postgres?host=/nowhere"), "s").create({})
