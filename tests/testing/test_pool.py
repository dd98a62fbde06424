"""The pool survives what scenarios do to it, and leaves no process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pool_scenarios
import pytest

from shoestring.testing import Pool, RankError


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(2, timeout=60, patience=1) as pool:
        yield pool


def test_results_come_back_from_every_rank(pool: Pool) -> None:
    assert pool.call(pool_scenarios.add, values=[1.5, 2.0]) == [{"rank": 0, "sum": 7.0}, {"rank": 1, "sum": 7.0}]


def test_an_exception_on_all_ranks_leaves_the_group_as_it_is(pool: Pool) -> None:
    pool.call(pool_scenarios.add, values=[1.0])
    pids = pool.pids
    with pytest.raises(RankError, match=r"rank [01]: on purpose") as caught:
        pool.call(pool_scenarios.fail, ranks=[0, 1])
    assert caught.value.kind == "ValueError"
    assert "in fail\n" in str(caught.value)  # the traceback of the rank
    assert pool.call(pool_scenarios.add, values=[1.0])[0]["sum"] == 2.0
    assert pool.pids == pids


@pytest.mark.parametrize(("arguments", "kind", "message"), [
    ({"scenario": pool_scenarios.fail, "ranks": [1]}, "ValueError", "rank 1: on purpose"),
    ({"scenario": pool_scenarios.die, "rank": 1}, "Died", "rank 1: the process ended with status 3"),
])  # fmt: skip
def test_a_rank_that_leaves_the_other_waiting_costs_a_restart(
    pool: Pool, arguments: dict[str, Any], kind: str, message: str
) -> None:
    pool.call(pool_scenarios.add, values=[1.0])
    pids, scenario = pool.pids, arguments.pop("scenario")
    with pytest.raises(RankError, match=message) as caught:
        pool.call(scenario, **arguments)
    assert caught.value.kind == kind
    assert not any(running(pid) for pid in pids)
    assert pool.call(pool_scenarios.add, values=[1.0])[0]["sum"] == 2.0


def test_a_hang_is_ended_and_located() -> None:
    with Pool(1, timeout=60) as pool:
        pool.call(pool_scenarios.add, values=[1.0])
        pids, pool.timeout = pool.pids, 0.5
        with pytest.raises(RankError, match=r"no answer within 0.5 s; it was killed(.|\n)*in hang") as caught:
            pool.call(pool_scenarios.hang)
        assert caught.value.kind == "Timeout"
        assert not any(running(pid) for pid in pids)


def test_closing_ends_the_processes(pool: Pool) -> None:
    pool.call(pool_scenarios.add, values=[1.0])
    pids = pool.pids
    assert all(running(pid) for pid in pids)
    pool.close()
    assert not any(running(pid) for pid in pids)
    pool.close()


def test_ranks_listen_on_loopback_only(pool: Pool) -> None:
    for addresses in pool.call(pool_scenarios.listening):
        assert all(address == "0100007F" for address in addresses), addresses


def test_ranks_are_forked_from_one_thread_and_order_sets_differently(pool: Pool) -> None:
    first, second = pool.call(pool_scenarios.start_state)
    assert first["threads of the parent"] == second["threads of the parent"] == 1  # a fork of several may hang
    assert first["order"] != second["order"]


def running(pid: int) -> bool:
    """Whether the process is there; one that has ended has been waited for, so no zombie is left either."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return not Path(f"/proc/{pid}/stat").read_text().split(")")[1].startswith(" Z")
