"""Waiting for what other threads, processes and programs do."""

import time


def until(condition, seconds=60.0):
    """Ask again and again until something is true, and return it: that it takes long is no failure, never is one."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "it never came about"
        time.sleep(0.005)
    return found
