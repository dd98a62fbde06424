"""The cache of samples gives its memory back when others on the host need it, in all processes that share it."""

import fcntl
import os
import subprocess
import sys
import tomllib

import pytest
import torch

from shoestring.core.feature import Phase
from shoestring.core.job import Job, attachments_of
from shoestring.core.leases import HostMemory, Priority
from shoestring.core.world import World
from shoestring.data.cache import _HEAD, Cached, Shared
from shoestring.memory import Broker
from shoestring.run import parse
from shoestring.training.data_loading import DataSets
from shoestring.training.loop import train
from tests.data.test_cache import RUN, Store, equal
from tests.memory.broker_hosts import Pretended

READER = """
import sys
from pathlib import Path
from shoestring.data.cache import Shared
shared = Shared("name", 4, 1 << 20, Path(sys.argv[1]))
assert shared.get(1) == b"b" * 200_000
print("read", flush=True)
sys.stdin.readline()
print(shared.get(1), shared.put(2, b"c"), flush=True)
"""


@pytest.mark.slow
def test_memory_that_is_given_back_is_free_for_all_processes_and_comes_back_with_the_next_run(root):
    shared = Shared("name", 4, 1 << 20, root)
    assert shared.put(0, b"a" * 100_000) and shared.put(1, b"b" * 200_000)
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", READER, str(root)]
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout.readline() == "read\n"
        before = shared.path.stat().st_blocks
        shared.give_back()
        assert before * 512 >= 300_000 and shared.path.stat().st_blocks * 512 <= 8192
        assert shared.get(0) is None and not shared.put(0, b"a")
        worker = Shared("name", 4, 1 << 20, root)  # of the same run, which has no lease any more
        assert not worker.put(0, b"a")
        worker.close()
        reader.stdin.write("\n")
        reader.stdin.flush()
        assert reader.stdout.readline() == "None False\n"
        reader.kill()
    fcntl.flock(shared.file, fcntl.LOCK_UN)  # as a kill does: the file stays
    again = Shared("name", 4, 1 << 20, root)
    assert again.put(0, b"a") and again.get(0) == b"a"
    again.close()


TENANT = """
import sys
from pathlib import Path
from shoestring.memory.broker.tenant import BrokeredMemory, Terms
memory = BrokeredMemory(terms=Terms(Path(sys.argv[1]), tenant="other", wait=0.0))
memory.join()
memory.take("all", 1 << 50)
print("taken", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_a_run_gives_the_memory_of_its_samples_to_a_process_that_needs_it(root, caplog):
    broker = Broker(folder=str(root))
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", TENANT, str(broker.place)]
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "taken\n"
        table = (
            RUN.format(root=root)
            + f"""
        [memory.broker]
        folder = "{root}"
        """
        )
        train(parse(tomllib.loads(table)), World())
        other.kill()
    assert "samples are no longer cached in it" in caplog.text
    assert not list(root.glob("shoestring-data-*/*"))


# -- planted faults ----------------------------------------------------------------------------------------------------


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
        for work in attachments_of(job).phases[Phase.CAPTURE]:
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
