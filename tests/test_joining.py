"""A rank leaves when Gloo's threads are done with the last exchange, so that none is unwound by a Python that ends."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from pathlib import Path

from shoestring.joining import settle


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


def test_it_waits_for_a_thread_that_has_still_to_let_go():
    done = []

    def let_go(_):
        for _ in range(300):
            time.sleep(0.0002)  # for less than `settle` looks away: asleep at most looks, and yet not done
        done.append(True)

    with gloo_thread(let_go) as go:
        go.set()
        settle()
        assert done


def test_it_is_over_at_once_where_all_wait_for_the_next_exchange():
    with gloo_thread(lambda _: None):
        began = time.monotonic()
        settle(patience=60.0)
        assert time.monotonic() - began < 30.0


def test_a_thread_that_never_rests_is_left_to_itself():
    def turn(leave):
        while not leave.is_set():
            sum(range(1000))

    with gloo_thread(turn) as go:
        go.set()
        began = time.monotonic()
        settle(patience=0.2)
        assert time.monotonic() - began >= 0.2
