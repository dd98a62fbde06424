"""Pushes and live runs while the hub, its clients and the connections between them are killed.

A proxy stands between client and hub, which cuts connections in their middle. Afterwards everything is left in peace,
one more push is made, as `shoestring hub push` tells a user to, and the hub's copy is compared with the folder.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Self

from shoestring.core.errors import ShoestringError
from shoestring.report.sinks import JsonLines
from shoestring.report.trackers import TRACKERS, Tracker
from shoestring_hub.client import sink
from shoestring_hub.client.pull import pull
from shoestring_hub.client.push import push
from tests.rigs.hub.folders import contents, rows, write_run
from tests.rigs.hub.server import HubServer


class CuttingProxy:
    """Passes bytes on to a port of this machine; of each connection it may cut the answer after a drawn number of
    bytes, as a network does."""

    def __init__(self, port: int, seed: int, share: float = 0.2) -> None:
        self.target, self.share, self._draw = port, share, random.Random(seed)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.cuts = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                limit = self._draw.randrange(1, 40_000) if self._draw.random() < self.share else None
                threading.Thread(target=self._pass, args=(client, limit), daemon=True).start()

    def _pass(self, client: socket.socket, limit: int | None) -> None:
        with client, suppress(OSError), socket.create_connection(("127.0.0.1", self.target)) as hub:
            back = threading.Thread(target=self._copy, args=(hub, client, limit), daemon=True)
            back.start()
            self._copy(client, hub, limit)
            back.join()

    def _copy(self, source: socket.socket, target: socket.socket, limit: int | None) -> None:
        passed = 0
        with suppress(OSError):
            while data := source.recv(65536):
                passed += len(data)
                if limit is not None and passed > limit:
                    self.cuts += 1
                    break
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()


def train(folder: Path, seed: int, steps: int) -> None:
    """What a run does to its folder and its sink: it resumes from a former step, writes rows, ends or is killed."""
    draw = random.Random(seed)
    file = JsonLines(folder / "metrics.jsonl")
    last = max((int(line.split(":")[1].split(",")[0]) for line in _lines(folder)), default=0)
    start = draw.randrange(0, last + 1) if last else 0
    file.truncate_after(start)
    sink.PERIOD, sink.OUTAGE = 0.02, 0.05
    tracker = Tracker("hub", TRACKERS["hub"], folder, folder.name, {}, start)
    for step in range(start + 1, start + steps + 1):
        file.write(step, {"loss": draw.random(), "lr": 1 / step})
        tracker.write(step, {"loss": 0.0})
        time.sleep(draw.random() * 0.002)
    file.close()
    tracker.close()


def _lines(folder: Path) -> list[str]:
    path = folder / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def _push(folder: Path) -> None:
    with suppress(ShoestringError):
        push(folder, checkpoints=True, patience=3.0)


def storm(server: HubServer, root: Path, seed: int, *, kill_server: bool) -> str:
    """One run in a storm; the login must be in place, and lead through a proxy or not.

    Returns:
        What differs between the hub's copy and the folder; empty if nothing does.
    """
    draw, folder = random.Random(seed), root / f"run-{seed}"
    write_run(folder, steps=draw.randrange(1, 200), seed=seed, files=draw.randrange(4))
    (folder / "big.bin").write_bytes(draw.randbytes(draw.choice((0, 100, 5 << 20))))
    fork = multiprocessing.get_context("fork")
    for act in range(draw.randrange(2, 5)):
        if live := draw.random() < 0.6:
            process = fork.Process(target=train, args=(folder, seed + act, draw.randrange(1, 400)))
        else:
            process = fork.Process(target=_push, args=(folder,))
        process.start()
        if kill_server:
            time.sleep(draw.random() * 0.4)
            server.kill()
            server.start()
        process.join(draw.random() * (1.0 if live else 0.5))
        if process.is_alive() and draw.random() < 0.7:
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
        process.join()
        if draw.random() < 0.5:
            (folder / "report.html").write_text(f"<p>{draw.random()}")
        if draw.random() < 0.3:
            (folder / "metrics.jsonl").write_text(rows(1, draw.randrange(1, 300), seed + act))
    for _ in range(30):
        with suppress(ShoestringError):
            outcome = push(folder, checkpoints=True, patience=30.0)
            break
    else:
        return "no push came through"
    number = int(outcome.lines[-1].partition("/runs/")[2].partition(":")[0])
    copy = root / f"copy-{seed}"
    for _ in range(30):
        with suppress(ShoestringError):
            pull(number, copy, patience=30.0)
            break
    mine, theirs = contents(folder), contents(copy)
    return ", ".join(sorted(path for path in mine | theirs if mine.get(path) != theirs.get(path)))
