"""No wait is without an end, and each says for what it waited."""

import subprocess
import sys
import threading
from concurrent.futures import Future
from dataclasses import replace

import pytest

from shoestring.checkpoint.tiers import waits
from shoestring.checkpoint.tiers.file_acts import Files
from shoestring.checkpoint.tiers.slots import SEAL
from shoestring.checkpoint.tiers.waits import BackgroundThread, result_of
from shoestring.core.errors import CheckpointError
from tests.rigs.checkpointing.known import BETWEEN, build_checkpointer, trained


def test_work_that_does_not_end_is_named_with_how_long_it_was_waited_for():
    with pytest.raises(CheckpointError, match=r"copying did not end in 0 s .*stuck"):
        result_of(Future(), "copying", nbytes=1, patience=0.0)
    slow = Future()
    slow.set_exception(TimeoutError("its own"))
    with pytest.raises(TimeoutError, match="its own"):
        result_of(slow, "copying")


def test_a_thread_ends_after_what_it_was_given_or_it_is_named():
    done, gate, thread = [], threading.Event(), BackgroundThread("test")
    thread.submit(gate.wait, 30)
    thread.submit(lambda: done.append(True))
    with pytest.raises(CheckpointError, match="sealing did not end in 0 s"):
        thread.stop("sealing", patience=0)
    gate.set()
    thread.stop("sealing")
    thread.stop("sealing")
    assert done == [True]


STUCK = """
import threading
from shoestring.checkpoint.tiers import waits
from shoestring.core.errors import CheckpointError
worker = waits.BackgroundThread("stuck")
{first}
worker.submit({work})
waits.PATIENCE = {patience}
try:
    worker.stop("writing", patience=0)
except CheckpointError:
    print("told")
"""


def ended(**how):
    return subprocess.run(
        [sys.executable, "-c", STUCK.format(**how)], capture_output=True, text=True, timeout=60
    ).stdout


def test_a_thread_that_is_stuck_keeps_no_process_from_ending():
    assert ended(first="", work="threading.Event().wait", patience=0.1) == "told\n"


def test_a_process_that_ends_lets_its_threads_finish():
    waiting = "gate = threading.Event(); threading.Timer(1, gate.set).start()"
    assert ended(first=waiting, work="lambda: (gate.wait(), print('done', flush=True))", patience=30) == "told\ndone\n"


class Stuck(Files):
    """A device that does not answer while the gate is closed."""

    def __init__(self, act, kind):
        self.act, self.kind, self.gate = act, kind, threading.Event()
        self.gate.set()

    def before(self, act, path, data=b"", at=0):
        if act == self.act and self.kind in path.name:
            self.gate.wait(60)


@pytest.mark.parametrize(
    ("act", "kind", "said"),
    [
        ("rename", SEAL, "sealing a checkpoint in this host's memory"),
        ("write", "private-0", "copying a checkpoint to peers or writing it to disk"),
    ],
)
def test_a_stuck_device_is_told_of_in_words(tmp_path, monkeypatch, act, kind, said):
    files = Stuck(act, kind)
    checkpointer, *rest = build_checkpointer(tmp_path / "disk", 0, 1, files)
    trained(checkpointer, *rest, range(1, BETWEEN + 1))
    files.gate.clear()
    monkeypatch.setattr(waits, "PATIENCE", 0.0)
    checkpointer.keeper.group = replace(checkpointer.keeper.group, patience=0.0)
    with pytest.raises(CheckpointError, match=f"{said} did not end in 0 s"):
        trained(checkpointer, *rest, range(BETWEEN + 1, 2 * BETWEEN + 1))
    files.gate.set()
    monkeypatch.undo()
    checkpointer.keeper.group = replace(checkpointer.keeper.group, patience=waits.PATIENCE)
    checkpointer.close()


def test_a_copy_that_does_not_end_is_told_of_before_the_optimizer_steps(tmp_path, monkeypatch):
    checkpointer, *_ = build_checkpointer(tmp_path / "disk", 0, 1, Files())
    monkeypatch.setattr(waits, "PATIENCE", 0.0)
    checkpointer.stager._copying = Future()
    with pytest.raises(CheckpointError, match="copying state to this host's memory did not end in 0 s"):
        checkpointer.wait()
    monkeypatch.undo()
    checkpointer.stager._copying = None
    checkpointer.close()
