"""Waits end, and say what for."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import attaching

from shoestring import comm
from shoestring.comm.codecs.dense import DenseCodec
from shoestring.comm.exchange import worker
from shoestring.comm.exchange.coordinator import Coordinator
from shoestring.comm.exchange.route import Route
from shoestring.comm.exchange.wire import Wire
from shoestring.comm.exchange.worker import Worker, WorkerTask
from shoestring.core.errors import PeerError, ShoestringError
from shoestring.core.feature import HOSTS
from shoestring.core.world import World
from shoestring.testing import Pool
from shoestring.testing.scenarios import encode

CPU = torch.device("cpu")


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """What a task waits for in vain, until the test ends; others may compute for a twentieth of a second."""
    monkeypatch.setattr(worker, "COMPUTING", 0.05)
    release = threading.Event()
    yield release
    release.set()


def test_a_wait_ends_and_names_its_task(stuck):
    thread = Worker("test", CPU)
    task = thread.submit(WorkerTask[bool]("the exchange of `w` at step 3", 0.0), stuck.wait)
    with pytest.raises(PeerError, match=r"the exchange of `w` at step 3 has not finished in 0\.05 s"):
        task.result()
    stuck.set()
    assert task.result() is True
    assert thread.close()


def test_closing_ends_too(stuck, caplog):
    thread = Worker("test", CPU)
    thread.submit(WorkerTask[bool]("the exchange of `w`", 0.0), stuck.wait)
    with caplog.at_level(logging.WARNING, "shoestring"):
        assert not thread.close()
    assert "the exchange of `w` has not finished" in caplog.text
    with pytest.raises(ShoestringError, match="`v` was started after its job was closed"):
        thread.submit(WorkerTask[bool]("the exchange of `v`", 0.0), stuck.wait)


@pytest.mark.parametrize("threaded", [False, True])
def test_a_task_that_raises_raises_where_it_is_waited_for(threaded):
    def fail() -> None:
        raise TimeoutError("of its own")

    thread = Worker("test", CPU, threaded=threaded)
    with pytest.raises(TimeoutError, match="of its own"):
        thread.submit(WorkerTask[None]("a task", 1.0), fail).result()
    assert thread.close()


def test_gradients_that_do_not_arrive_are_named():
    route = Route(World(), [HOSTS])
    coordinator = Coordinator([route], DenseCodec(), {"a": 4, "b": 4, "c": 4}, 1, CPU, lambda: 1.0)
    coordinator.begin()
    coordinator.arrive({"b": torch.ones(1)}, lambda _: None)
    with pytest.raises(ShoestringError, match="no gradient of `c` and `a` has arrived"):
        coordinator.wait()
    coordinator.close()


def test_a_closed_wire_carries_nothing():
    """It has no group, as that of one rank alone has none."""
    wire = Wire(None, CPU)
    wire.size = 2
    with pytest.raises(ShoestringError, match="after its job was closed"):
        wire.start([])


def test_a_rank_that_does_not_come_is_waited_for_as_long_as_the_group_says():
    """One of two ranks makes no step: the error of the other names the exchange, and the collective in it."""
    with Pool(2) as pool:
        said, _ = pool.call(attaching.alone, feature=encode(comm.Dense(transport=comm.Transport(parts=1))), timeout=2.0)
    assert said.startswith("the exchange of 9 parameters (`head.bias` to `conv.weight`) at step 0: all-reduce of ")
    assert "between 2 ranks: " in said
    assert "imed out" in said
