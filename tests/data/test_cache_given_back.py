"""The memory of the cache of samples, once others on this host need it."""

import pytest
import torch

from shoestring.core.feature import Phase
from shoestring.core.job import Job
from shoestring.core.leases import HostMemory, Priority
from shoestring.core.world import World
from shoestring.data.cache import _HEAD, Cached, Shared
from shoestring.training.data_loading import DataSets
from tests.data.test_cache import Store, equal
from tests.memory.broker_hosts import Pretended


def called_back(root):
    """What a run has of its cache before others on this host need the memory, and after the next step."""
    host = Pretended(root / "broker", total=1 << 30)
    memory, other = host.tenant("run"), host.tenant("other")
    store = Store(samples=40, size=1000)
    data = DataSets(Cached(store, memory=1 << 20), None, None)
    job = Job(torch.nn.Linear(1, 1), world=World(memory=memory))
    memory.take("samples", 1 << 20, Priority.CACHE)
    data.answer_calls(job)
    samples = [data.train[index] for index in range(40)]
    (path,) = root.glob("shoestring-data-*/*")

    def capture():
        for work in job.phases[Phase.CAPTURE]:
            work()
        return path.stat().st_blocks * 512, "samples" in memory.leases, len(store.asked)

    capture()
    store.asked.clear()
    before = capture()
    other.take("offload", host.total - (1 << 19))
    memory.look()
    after = capture()
    for _ in range(2):
        assert equal([data.train[index] for index in range(40)], samples)
    asked = len(store.asked)
    data.close()
    memory.leave()
    other.leave()
    return before, after, asked


def given_back(root):
    before, after, asked = called_back(root)
    assert before[0] > 300_000 and before[1:] == (True, 0)
    assert after[0] < 20_000 and after[1:] == (False, 0)
    assert asked == 80, "nothing is kept from now on"


def test_a_cache_gives_its_memory_back_between_two_steps(root):
    given_back(root)


def _forgets_and_holds(self):
    self.entries["length"] = 0


def _frees_and_goes_on(self, give_back=Shared.give_back):
    room = self.memory[: _HEAD.size]
    give_back(self)
    self.memory[: _HEAD.size] = room


FAULTS = {
    "the memory is held": (Shared, "give_back", _forgets_and_holds),
    "it is filled again": (Shared, "give_back", _frees_and_goes_on),
    "the lease stays": (HostMemory, "give", lambda self, name: None),
    "nobody answers": (Shared, "give_back", lambda self: None),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_giving_back_is_seen(fault, root, monkeypatch):
    owner, name, planted = FAULTS[fault]
    monkeypatch.setattr(owner, name, planted)
    with pytest.raises(AssertionError):
        given_back(root)
