"""One launch of two ranks does all scenarios; the tests assert on what it wrote."""

import json

import pytest
import ranks
import torch


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory):
    out = tmp_path_factory.mktemp("two-ranks") / "results.json"
    ranks.run(ranks.HERE / "scenarios.py", str(out), size=2, local_size=2)
    return json.loads(out.read_text())


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """As in the launches; also, threads that wait for busy cores make small operators a hundred times slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
