"""How busy a machine is: planted accounts of /proc, and a real neighbour."""

import os
import shlex
import signal
import subprocess
import sys

import pytest

from benchmarks import calm
from benchmarks.calm import BusyMachineError, Load, Usage, Watch, was_calm, watched
from benchmarks.harness import Bar, Deadline, Environment, Measured, measure
from benchmarks.timing import paired

HERE = Environment(cpu="abacus", cores=2, memory_gib=4.0, gpu=None, tree="0123abc")
OWN, CHILD, ORPHAN, KERNEL, OTHER = 10, 11, 12, 13, 14


def usage(seconds, total, stolen, **ticks):
    parents = {OWN: 1, CHILD: OWN, ORPHAN: CHILD, KERNEL: 2, OTHER: 1}
    used = {OWN: "own", CHILD: "child", ORPHAN: "orphan", KERNEL: "kernel", OTHER: "other"}
    processes = {pid: (parents[pid], ticks.get(name, 0)) for pid, name in used.items()}
    return Usage(seconds, total, stolen, processes)


def test_only_what_others_use_and_what_is_stolen_counts():
    before = usage(0.0, 1000, 10)
    after = usage(2.0, 1400, 14, own=200, child=50, orphan=50, kernel=60)
    after_own = after
    assert Load.between(before, after_own, OWN) == Load(stolen=0.01, others=0.0)
    assert Load.between(before, after_own, OWN).calm
    after = usage(2.0, 1400, 14, own=200, other=int(0.5 * calm._TICKS))
    load = Load.between(before, after, OWN)
    assert (load.others, load.calm) == (0.25, False)
    assert not Load.between(before, usage(2.0, 1400, 20), OWN).calm


def test_what_loses_its_parent_at_the_end_of_a_measurement_is_still_its_own():
    before, after = usage(0.0, 1000, 0), usage(2.0, 1400, 0, orphan=200)
    after.processes[ORPHAN] = 1, 200
    del after.processes[CHILD]
    assert Load.between(before, after, OWN).others == 0.0


def test_a_process_that_was_there_before_counts_for_what_it_used_since():
    before, after = usage(0.0, 1000, 0, other=10**6), usage(1.0, 1200, 0, other=10**6 + calm._TICKS)
    assert Load.between(before, after, OWN).others == 1.0


def test_proc_is_read_as_it_is(tmp_path):
    (tmp_path / "stat").write_text("cpu  1 2 3 4 5 6 7 8 9 10\ncpu0 0\n")
    for process in (1, 42):
        (tmp_path / str(process)).mkdir()
        (tmp_path / str(process) / "stat").write_text(f"{process} (a ) name) S 7 0 0 0 0 0 0 0 0 0 100 20 3 4 0 0\n")
    (tmp_path / "43").mkdir()  # has ended
    found = Usage.now(tmp_path)
    assert (found.total, found.stolen, found.processes) == (36, 8, {1: (7, 120), 42: (7, 127)})


@pytest.fixture
def neighbour():
    """A program that keeps a processor busy; the shell that starts it ends, so it is no descendant of the tests."""
    busy = f"{shlex.quote(sys.executable)} -S -c 'while True: pass' >/dev/null & echo $!"
    process = int(subprocess.run(["sh", "-c", busy], stdout=subprocess.PIPE, text=True, check=True).stdout)
    yield process
    os.kill(process, signal.SIGKILL)


@pytest.fixture
def alone(monkeypatch):
    """A machine of which only this process and what it starts is seen; what it has to wait is short.

    A neighbour that has to share the processors with other tests is busy too: it gets a part of one, if a small one.
    """
    monkeypatch.setattr(calm, "_LOOK", 0.2)
    monkeypatch.setattr(calm, "MOST_OTHERS", 0.01)
    monkeypatch.setattr(calm, "MOST_STOLEN", 1.0)
    monkeypatch.setattr(calm, "MOST_LOAD", 1e9)


def test_a_busy_neighbour_ends_a_measurement_with_a_word(neighbour, alone):
    watch = Watch(patience=0.5)
    with pytest.raises(BusyMachineError, match="processors used by others"), watched(watch):
        raise AssertionError
    assert was_calm()


def test_a_timed_bar_on_a_busy_machine_is_not_run_and_an_exact_one_is(neighbour, alone, monkeypatch):
    monkeypatch.setattr("benchmarks.harness.PATIENCE", 0.5)
    bar = Bar("area.one", "what", "<=", 2.0, measure=lambda _: Measured(1.0, interval=(0.9, 1.1)), kind="timed")
    row, well = measure(bar, HERE, Deadline(60))
    assert (row.status, well) == ("not-run", True)
    assert row.reason.startswith("the machine was busy: ")
    exact = Bar("area.two", "what", "<=", 2.0, measure=lambda _: 1.0, kind="exact")
    assert measure(exact, HERE, Deadline(60))[0].status == "held"


class Script(Watch):
    """A watch whose looks are written down beforehand."""

    def __init__(self, looks):
        super().__init__()
        self.looks = iter(looks)

    def begin(self):
        pass

    def span(self):
        self.loads.append(Load(0.01, 0.0))
        return next(self.looks)


@pytest.mark.slow
def test_a_disturbed_round_is_made_again():
    ticks = iter(range(10**6))
    looks = [True, *(number % 3 != 1 for number in range(9)), True]  # before the first round, 9 rounds, the end
    with watched(Script(looks)) as watch:
        result = paired(lambda: None, lambda: None, rounds=6, warmup=0, order="AB", clock=lambda: next(ticks))
    assert len(result.ratios) == 6
    assert next(ticks) == 9 * 2 * 2  # nine rounds of two works, each with two looks at the clock
    assert str(watch) == "1.0% of the time stolen, 0.00 processors used by others at worst"


def test_a_disturbance_at_the_end_counts_too():
    with pytest.raises(BusyMachineError, match="last part"), watched(Script([False])):
        pass
