"""How fast rows arrive, beside trackio's server, and that all of them arrive once whatever is killed."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

from benchmarks.harness import Deadline, shared
from benchmarks.hub.measuring import served
from benchmarks.intervals import of_mean, of_quantile, of_ratio
from benchmarks.rows import Bar, Measured, NotRun
from shoestring.core.errors import ShoestringError
from shoestring.report.sinks import JsonLines
from shoestring.report.trackers import TRACKERS
from shoestring_hub.client.logins import log_in
from tests.hub.conftest import add_person
from tests.rigs.hub.server import HubServer
from tests.rigs.hub.storms import CuttingProxy, storm
from tests.rigs.hub.visitor import Visitor

ROWS, VALUES, ROUNDS = 20_000, 5, 8
PEER = Path(__file__).with_name("trackio_peer.py")
STORMS = 200
CLIENTS, MINUTES = 16, 2.0


def rate(visitor: Visitor, address: str) -> float:
    """Values a second from the first row that a run logs until the hub has said that it has the last."""
    with TemporaryDirectory() as root, patch.dict(os.environ, {"XDG_STATE_HOME": f"{root}/state"}):
        log_in(address, visitor.make_token("live"))
        folder = Path(root) / "run"
        folder.mkdir()
        (folder / "run.toml").write_text("[run]\n")
        rows = JsonLines(folder / "metrics.jsonl")
        sink = TRACKERS["hub"](folder, "rate", {})
        start = time.perf_counter()
        for step in range(ROWS):
            row = {"loss": 1 / (step + 1), "lr": 0.1, "a": step, "b": 2.0, "c": 3.0}
            rows.write(step, row)
            sink.write(step, row)
        sink.close()
        seconds = time.perf_counter() - start
        assert not vars(sink)["_away"], "the hub did not get all rows"
    return ROWS * VALUES / seconds


def ingestion(deadline: Deadline) -> Measured:
    with served() as (server, visitor):
        rates = [rate(visitor, server.address) for _ in range(ROUNDS)]
    return of_mean(rates, f"{ROWS:,} rows of {VALUES} values, by the sink of a run, on one hub with SQLite")


def beside_trackio(python: str, deadline: Deadline) -> Measured | NotRun:
    """The hub's rate over trackio's, in turns on the same machine; both are what a run's tracker reaches."""
    if not python:
        return NotRun("no trackio: name an interpreter that has it with --trackio")
    ours, theirs = [], []
    with served() as (server, visitor):
        for _ in range(ROUNDS):
            ours.append(rate(visitor, server.address))
            command = [python, str(PEER), str(ROWS)]
            answer = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout)
            assert answer["stored"] == ROWS
            theirs.append(ROWS * VALUES / answer["seconds"])
    note = (
        f"trackio {answer['version']}: {sum(theirs) / ROUNDS:,.0f} values a second, the hub: {sum(ours) / ROUNDS:,.0f}"
    )
    return of_ratio(ours, theirs, note)


# -- under load -------------------------------------------------------------------------------------------------------


@shared
def crowd() -> tuple[list[float], int]:
    """Seconds of all requests of a crowd of readers and writers, and how many failed."""
    times, failed, end = [], [], time.monotonic() + 60 * MINUTES
    with served() as (server, visitor):
        tokens = [visitor.make_token("live", f"client {number}") for number in range(CLIENTS)]

        def client(number: int) -> None:
            reader, size = Visitor(server.port), 0
            reader.cookies = dict(visitor.cookies)
            writer, key = Visitor(server.port), f"{number + 1000:032x}"
            acts = [f"/small/?sort=metric.loss&page={number % 9 + 1}", "/", "/large/?where=metric.loss<0.1", "/live/"]
            step = 0
            while time.monotonic() < end:
                start = time.perf_counter()
                try:
                    if step % 2:
                        status = reader.ask("GET", acts[step // 2 % len(acts)]).status
                    else:
                        size, status = _append(writer, tokens[number], key, size, step)
                    times.append(time.perf_counter() - start)
                    if status != 200:
                        failed.append(status)
                except (OSError, ShoestringError) as error:
                    failed.append(error)
                step += 1
                time.sleep(0.5)

        threads = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return times, len(failed)


def _append(writer: Visitor, token: str, key: str, size: int, step: int) -> tuple[int, int]:
    import http.client

    connection = http.client.HTTPConnection("127.0.0.1", writer.port, timeout=60)
    headers = {"Authorization": f"Bearer {token}"}
    if not size:
        connection.request("POST", f"/api/own/{key}", json.dumps({"name": key}), headers)
        size = json.loads(connection.getresponse().read())["size"]
    row = f'{{"step": {step}, "time": {time.time()}, "loss": 1.0, "lr": 0.1}}\n'.encode()
    connection.request("PUT", f"/api/own/{key}/log?at={size}&have={size}&attempt=0", row, headers)
    response = connection.getresponse()
    answer = json.loads(response.read())
    connection.close()
    return answer["size"], response.status


def crowd_seconds(deadline: Deadline) -> Measured:
    times, _ = crowd()
    return of_quantile(
        times, 0.95, f"{CLIENTS} clients for {MINUTES:.0f} minutes, {len(times):,} requests, half of them writes"
    )


def crowd_errors(deadline: Deadline) -> Measured:
    times, failed = crowd()
    return Measured(failed, f"{len(times):,} requests")


# -- under kills ------------------------------------------------------------------------------------------------------


def equal_copies(deadline: Deadline) -> Measured:
    """How many of 200 storms end with a copy that equals the folder."""
    equal, cuts, wrong = 0, 0, []
    kinds = ("killed hub", "cut connections", "killed clients")
    with (
        TemporaryDirectory() as root,
        patch.dict(os.environ, {"XDG_STATE_HOME": f"{root}/state"}),
        HubServer(Path(root) / "hub") as server,
    ):
        visitor = Visitor(server.port)
        visitor.set_password(add_person(server.folder, "ada"), "ada")
        visitor.make_project("storms")
        token = visitor.make_token("storms")
        for seed in range(STORMS):
            kind = kinds[seed % 3]
            with CuttingProxy(server.port, seed, 0.3 if kind == "cut connections" else 0.0) as proxy:
                _log_in(f"http://127.0.0.1:{proxy.port}", token)
                difference = storm(server, Path(root), seed, kill_server=kind == "killed hub")
                cuts += proxy.cuts
            equal += not difference
            wrong += [f"{seed}: {difference}"] * bool(difference)
    return Measured(
        equal, f"a third with the hub killed, a third with {cuts} cut connections; unequal: {wrong or 'none'}"
    )


def _log_in(address: str, token: str) -> None:
    while True:
        try:
            log_in(address, token)
            return
        except ShoestringError:
            continue


def rows(trackio: str) -> Iterator[Bar]:
    peers = ("django", "gunicorn")
    yield Bar(
        "hub.ingestion", "values a second that the sink of a run brings to the hub", ">=", 5000, ingestion, peers=peers
    )
    what = "the hub's rate of values over that of trackio's server"
    yield Bar("hub.ingestion-trackio", what, ">=", 1.0, partial(beside_trackio, trackio), "trackio 0.43", peers=peers)
    what = f"seconds of a request of {CLIENTS} clients that read and write, 95th percentile"
    yield Bar("hub.clients", what, "<=", 0.3, crowd_seconds, peers=peers)
    what = f"failed requests of {CLIENTS} clients that read and write for {MINUTES:.0f} minutes"
    yield Bar("hub.clients-errors", what, "<=", 0, crowd_errors, kind="exact", peers=peers)
    what = f"of {STORMS} runs under kills and cut connections, those whose copy on the hub equals the folder"
    yield Bar("hub.whole", what, ">=", STORMS, equal_copies, kind="exact", seeds=(0,), peers=peers)
