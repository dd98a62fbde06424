"""One thread for every process of the tests: tiny tensors on several threads wait more than they compute."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import shutil
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("same", derandomize=True)  # the same examples at every run
settings.load_profile("same")


@pytest.fixture(scope="session", autouse=True)
def memory_of_runs():
    """Runs that tests kill leave their slots in shared memory, for a restart that never comes."""
    place = Path("/dev/shm") / f"shoestring-{os.getuid()}"
    before = set(place.glob("*"))
    yield
    for left in set(place.glob("*")) - before:
        shutil.rmtree(left, ignore_errors=True)
