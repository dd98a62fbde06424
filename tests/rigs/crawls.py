"""Crawls as processes of their own, which may be killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.rigs.site import LoopbackSite
from tests.waiting import until

QUICK = ("--delay", "0", "--parallel", "8")
UNDER_WAY = 16
"""Number of requests that may be made again after a kill: those under way, and answers that are not stored yet."""


def start_action(path: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start an action of the recipe `annotation` on a store."""
    command = [sys.executable, "-m", "shoestring_recipes.annotation", str(path), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "NO_PROXY": "127.0.0.1,localhost"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def crawled(path: Path, url: str, *arguments: str, code: int = 0) -> str:
    """Crawl to the end; the output."""
    program = start_action(path, "crawl", url, *arguments)
    out, error = program.communicate(timeout=1800)
    assert program.returncode == code, out + error
    return out + error if code else out


def counts(output: str) -> dict[str, int]:
    """What a crawl has printed, as numbers by state and reason."""
    return {line.strip().partition(" ")[2]: int(line.split()[0]) for line in output.splitlines()}


def kill_and_continue(path: Path, site: LoopbackSite, kills: int, every: int) -> dict[str, int]:
    """Crawl a site in a process that is killed a number of times, each time after so many requests more; the counts
    of the last crawl, which ends by itself."""
    for _ in range(kills):
        seen = site.requests.total()
        program = start_action(path, "crawl", f"{site.url}/0", *QUICK)
        until(lambda program=program, seen=seen: program.poll() is not None or site.requests.total() >= seen + every)
        assert program.poll() is None, program.communicate()
        os.kill(program.pid, signal.SIGKILL)
        program.communicate()
    return counts(crawled(path, f"{site.url}/0", *QUICK))
