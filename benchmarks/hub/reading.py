"""How fast tables and charts are answered, and what a page costs that stays open while 20 runs grow."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from functools import partial

from benchmarks.harness import Deadline
from benchmarks.hub.measuring import cpu_seconds, seconds_of, served
from benchmarks.hub.seeds import LONG, POINTS
from benchmarks.intervals import of_mean, of_quantile
from benchmarks.rows import Bar, Measured
from shoestring_hub.client.connection import Connection
from shoestring_hub.client.logins import Login

REQUESTS = 100
CHOSEN = "&".join(f"column={name}" for name in ("metric.loss", "metric.lr", "setting.area3.technique.key3"))
LARGE = (
    f"/large/?{CHOSEN}&sort=-metric.held_out_loss",
    f"/large/?{CHOSEN}&sort=setting.area5.technique.key5&page=40",
    f"/large/?{CHOSEN}&where=metric.loss<0.5,setting.area1.technique.key1>0.2,name~run&sort=metric.lr",
)
PERIOD, ROUNDS, GROWN = 5.0, 8, 5
"""Seconds between two questions of a page; rounds; rows that each run gains in between."""


def tables(addresses: tuple[str, ...], deadline: Deadline) -> Measured:
    """The 95th percentile of the time of an answer, over all addresses."""
    with served() as (_, visitor):
        times = [seconds for address in addresses for seconds in seconds_of(visitor, address, REQUESTS)]
    return of_quantile(times, 0.95, f"{len(times)} requests on loopback; the slowest took {max(times):.2f} s")


def chart(deadline: Deadline) -> Measured:
    """The 95th percentile of the time in which a comparison of all long runs is answered, its curves included."""
    runs = "&".join(f"run={number}" for number in range(1, LONG + 1))
    with served() as (_, visitor):
        size = len(visitor.get(f"/long/compare?{runs}").body)
        times = seconds_of(visitor, f"/long/compare?{runs}", REQUESTS)
    return of_quantile(
        times, 0.95, f"{REQUESTS} requests; the page has {size / 1e6:.2f} MB; slowest {max(times):.2f} s"
    )


def live(deadline: Deadline) -> Measured:
    """Share of a core that the hub spends on the questions of one page, while the rows arrive besides."""
    shares = []
    with served(workers=1) as (server, visitor):
        connection = Connection(Login(server.address, visitor.make_token("live")))
        runs = []
        for number in range(LONG):
            facts = connection.ask("POST", f"own/{number:032x}", {"name": f"live {number}"})
            first = "".join(_row(step) for step in range(1, 5000)).encode()
            runs.append((number, facts["number"], _put(connection, number, 0, first)))
        page = visitor.get("/live/compare?" + "&".join(f"run={number}" for _, number, _ in runs)).text
        source = re.search(r'data-source="([^"]+)"', page)
        state = re.search(r'data-state="([^"]+)"', page)
        assert source and state
        ask, have = source[1].replace("&amp;", "&"), state[1]
        for step in range(ROUNDS):
            more = "".join(_row(5000 + step * GROWN + row) for row in range(GROWN)).encode()
            runs = [(key, number, _put(connection, key, size, more)) for key, number, size in runs]
            before = cpu_seconds(server.pid)
            answer = visitor.ask("GET", f"{ask}&have={have}")
            time.sleep(0.2)  # what the worker does after its answer counts as well
            shares.append((cpu_seconds(server.pid) - before) / PERIOD)
            assert answer.status == 200
            have = answer.text.partition('"state": "')[2].partition('"')[0]
    return of_mean(shares, f"a question each {PERIOD:.0f} s, {GROWN} new rows of each run in between; clock of 10 ms")


def _row(step: int) -> str:
    return f'{{"step": {step}, "time": {1e9 + step}, "loss": 2.5, "lr": 0.001, "grad_norm": 1.25, "mfu": 0.4}}\n'


def _put(connection: Connection, key: int, size: int, data: bytes) -> int:
    query = {"at": size, "have": size, "attempt": 0}
    return int(connection.ask("PUT", f"own/{key:032x}/log", data, **query)["size"])


def rows() -> Iterator[Bar]:
    peers = ("django", "gunicorn")
    small = "seconds to answer a table of 1,000 runs with all of its rows, 95th percentile"
    yield Bar("hub.table-1000", small, "<=", 0.5, partial(tables, (f"/small/?{CHOSEN}&rows=1000",)), peers=peers)
    large = "seconds to answer a table of 10,000 runs, sorted or filtered, 95th percentile"
    yield Bar("hub.table-10000", large, "<=", 1.0, partial(tables, LARGE), peers=peers)
    what = f"seconds to answer a comparison of {LONG} runs of {POINTS:,} points, 95th percentile"
    yield Bar("hub.chart", what, "<=", 1.0, chart, peers=peers)
    what = f"share of a core that the hub spends on one open page of {LONG} growing runs"
    yield Bar("hub.live", what, "<=", 0.02, live, peers=peers)
