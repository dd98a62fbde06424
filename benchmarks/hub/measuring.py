"""A seeded hub that serves, and times of requests to it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.harness import shared
from tests.rigs.hub.server import HubServer
from tests.rigs.hub.visitor import Visitor


@shared
def seeded() -> tuple[TemporaryDirectory[str], Path]:
    """A folder of a hub with runs, made once."""
    temporary = TemporaryDirectory(prefix="hub-")
    folder = Path(temporary.name) / "hub"
    subprocess.run([sys.executable, "-m", "benchmarks.hub.seeds", str(folder)], check=True)
    return temporary, folder


@contextmanager
def served(workers: int = 2) -> Iterator[tuple[HubServer, Visitor]]:
    """The seeded hub while it serves, and a person who is signed in."""
    with HubServer(seeded()[1], workers=workers) as server:
        visitor = Visitor(server.port)
        visitor.sign_in("ada")
        yield server, visitor


def seconds_of(visitor: Visitor, address: str, count: int) -> list[float]:
    """Seconds of each of some requests, the first of which does not count."""
    times = []
    for _ in range(count + 1):
        start = time.perf_counter()
        answer = visitor.ask("GET", address)
        times.append(time.perf_counter() - start)
        assert answer.status == 200, (address, answer.status)
    return times[1:]


def cpu_seconds(pid: int) -> float:
    """Processor time of a process and its living children so far."""
    total = 0.0
    for process in (pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())):
        words = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        total += (int(words[11]) + int(words[12])) / 100
    return total
