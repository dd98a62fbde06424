"""Many clients at a time, a third of which leave, beside thousands of requests that are malformed or too large."""

import pytest

from benchmarks.decode.crowd import hostile, orders
from benchmarks.decode.server import p95, storm


@pytest.mark.slow
def test_a_crowd_and_a_flood_crash_nothing_leave_nothing_behind_and_change_no_text():
    found = storm(clients=64, count=10_000)
    assert found.faults == dict.fromkeys(found.faults, 0.0)
    assert found.wrong == 0
    assert len(found.texts) == 43
    assert sum(found.outcome.statuses.values()) == 10_000
    assert found.outcome.statuses[400] > 3000
    assert found.outcome.statuses[413] == 20
    assert found.after["mib"] - found.before["mib"] < 16
    assert p95(found.outcome.seconds) < 10 * p95(found.engine)


def test_the_flood_is_the_same_for_the_same_seed_and_mostly_hostile():
    first = list(hostile(300, seed=3, body=1000))
    assert first == list(hostile(300, seed=3, body=1000)) != list(hostile(300, seed=4, body=1000))
    assert sum(b'{"prompt": "a", "max_tokens": 1}' in data for data, _ in first) < 60
    assert {order.leaves for order in orders(3, 8)} == {True, False}
