"""A rank leaves when Gloo's threads are done with the last exchange, so that none is unwound by a Python that ends."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from shoestring.distributed import join
from shoestring.distributed.join import gloo_threads, wait_for_gloo_threads


@contextmanager
def gloo_thread(work):
    """A thread that is taken for Gloo's; it waits for `go`, does `work(leave)`, and waits for `leave`."""
    go, leave, named = threading.Event(), threading.Event(), threading.Event()

    def run():
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("pt_gloo_runloop")
        named.set()
        go.wait()
        work(leave)
        leave.wait()

    thread = threading.Thread(target=run)
    thread.start()
    assert named.wait(10)
    try:
        yield go
    finally:
        go.set()
        leave.set()
        thread.join()


@pytest.mark.parametrize(
    ("seen", "looks"),
    [
        ([[3], [3]], 2),
        ([[None], [None], [3], [3]], 4),  # awake at first
        ([[3], [4], [5], [5]], 4),  # asleep whenever one looks, and yet not done: it woke in between
        ([[3], [None], [3], [3]], 4),
        ([[3, 7], [3, 8], [3, 8]], 3),
        ([[3, 7], [7], [7]], 3),  # one has ended
    ],
)
def test_it_is_over_where_no_thread_woke_between_two_looks(monkeypatch, seen, looks):
    left = list(seen)
    monkeypatch.setattr(join, "gloo_threads", lambda: left.pop(0))
    wait_for_gloo_threads()
    assert len(seen) - len(left) == looks


def test_a_thread_that_woke_has_fallen_asleep_more_often():
    with gloo_thread(lambda _: None) as go:
        wait_for_gloo_threads()
        (before,) = gloo_threads()
        go.set()
        wait_for_gloo_threads()
        (after,) = gloo_threads()
        assert after > before


def test_it_is_over_at_once_where_all_wait_for_the_next_exchange():
    with gloo_thread(lambda _: None):
        began = time.monotonic()
        wait_for_gloo_threads(patience=60.0)
        assert time.monotonic() - began < 30.0


def test_a_thread_that_never_rests_is_left_to_itself():
    def turn(leave):
        while not leave.is_set():
            sum(range(1000))

    with gloo_thread(turn) as go:
        go.set()
        began = time.monotonic()
        wait_for_gloo_threads(patience=0.2)
        assert time.monotonic() - began >= 0.2
