"""One thread for every process of the tests: tiny tensors on several threads wait more than they compute."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import settings

settings.register_profile("same", derandomize=True)  # the same examples at every run
settings.load_profile("same")
