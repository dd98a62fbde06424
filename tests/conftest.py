"""One thread for every process of the tests: tiny tensors on several threads wait more than they compute."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# The same examples at every run; how long drawing them takes says something of the machine, not of what is tested.
settings.register_profile("same", derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("same")


def pytest_configure(config):
    """Hide GPUs from all tests but those that need one (`-m gpu`): the others count on a CPU, and on several ranks."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.fixture(scope="session", autouse=True)
def memory_of_runs():
    """Runs that tests kill leave their slots in shared memory, for a restart that never comes."""
    place = Path("/dev/shm") / f"shoestring-{os.getuid()}"
    before = set(place.glob("*"))
    yield
    for left in set(place.glob("*")) - before:
        shutil.rmtree(left, ignore_errors=True)
