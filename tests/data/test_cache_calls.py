"""The cache of samples gives its memory back when others on the host need it, in all processes that share it."""

import fcntl
import os
import subprocess
import sys
import tomllib

from shoestring.core.world import World
from shoestring.data.cache import Shared
from shoestring.memory import Broker
from shoestring.run import parse
from shoestring.training.loop import train
from tests.data.test_cache import RUN
from tests.data.test_cache import root as root  # a fixture

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
    assert "samples are not kept in it now" in caplog.text
    assert not list(root.glob("shoestring-data-*/*"))
