"""One launch of two ranks does all scenarios; the tests assert on what it wrote."""

import fcntl
import json
import os

import pytest
import ranks
import torch


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory):
    common = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        common = common.parent  # of all workers: the first that needs the results makes them, the others wait
    out = common / "two-ranks" / "results.json"
    out.parent.mkdir(exist_ok=True)
    with (common / "two-ranks.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # ends with its holder, which `ranks.run` gives a limit
        if not out.exists():
            ranks.run(ranks.HERE / "scenarios.py", str(out), size=2, local_size=2)
    return json.loads(out.read_text())


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """As in the launches; also, threads that wait for busy cores make small operators a hundred times slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
