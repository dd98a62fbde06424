"""Kill -9 under torchrun: ranks with state of a real size, killed at random moments, started again by its agent."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from tempfile import TemporaryDirectory

from tests.rigs.checkpointing.trainee import FaultyRun, fresh, gate, lines
from tests.rigs.lab_run import environment

TRAINING = 0.75  # the share of kills that wait until the rank trains; the others strike while ranks meet and restore
LONGEST = 2.0  # seconds that a rank lives from there
PATIENCE = 240.0  # seconds for what takes a few, on a machine that is busy


@dataclass(frozen=True)
class Launch:
    """A run under torchrun, from its launch to its end."""

    task: FaultyRun
    agent: subprocess.Popen[bytes]
    open_gate: Callable[[], None]
    """Lets the ranks take their last step."""

    def strike(self, kills: int, draw: random.Random) -> int:
        """Kill a rank of each start at a random moment, of so many starts; how many were hit before the run ended.

        The first always is.
        """
        for start in range(kills):
            victim, training = draw.randrange(self.task.ranks), draw.random() < TRAINING
            pid = self._told("pids", start, victim)
            if training:
                self._told("starts", start, victim)
            with suppress(subprocess.TimeoutExpired):
                self.agent.wait(draw.uniform(0, LONGEST))
            if pid is None or self.agent.poll() is not None:
                return start
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(pid, signal.SIGKILL)
            self.open_gate()
        return kills

    def _told(self, what: str, start: int, rank: int) -> int | None:
        """What a rank says of a start, once it does; None where the run ends before.

        Raises:
            RuntimeError: it never does.
        """
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            for number, value in lines(self.task.place / f"{what}-{rank}.jsonl"):
                if number == start:
                    return value
            if self.agent.poll() is not None:
                return None
            time.sleep(0.02)
        raise RuntimeError(f"start {start} of rank {rank} never says its {what}:\n{self.said()}")

    def said(self) -> str:
        return "".join(path.read_text(errors="replace")[-2000:] for path in sorted(self.task.place.glob("said-*.txt")))


@contextmanager
def launched(task: FaultyRun, restarts: int) -> Iterator[Launch]:
    """Start a task under torchrun, before a gate; its agent is stopped at the end, and stops the ranks."""
    options = {
        "--nproc-per-node": task.ranks,
        "--max-restarts": restarts,
        "--monitor-interval": 0.05,
        "--log-dir": task.place / "agent",
    }
    words = [str(word) for pair in options.items() for word in pair]
    module = ["-m", "tests.rigs.checkpointing.trainee", json.dumps(asdict(task))]
    with (fresh(task.place) / "said-agent.txt").open("wb") as said, gate(task) as open_gate:
        agent = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", *words, *module],
            stdout=said,
            stderr=subprocess.STDOUT,
            env=os.environ | environment(),
        )
        try:
            yield Launch(task, agent, open_gate)
        finally:
            agent.terminate()
            agent.wait()


def run(task: FaultyRun, kills: int, draw: random.Random) -> tuple[int, list[str]]:
    """A run with up to so many kills, whose state in memory lies in a folder of its own: the kills, and what is wrong.

    Raises:
        RuntimeError: it hangs.
    """
    with TemporaryDirectory(dir="/dev/shm") as memory:
        task = replace(task, settings={**task.settings, "memory_folder": memory})
        with launched(task, kills + 1) as launch:
            struck = launch.strike(kills, draw)
            launch.open_gate()
            try:
                code = launch.agent.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                raise RuntimeError(f"no end after {struck} kills:\n{launch.said()}") from None
    starts = 1 + max(number for number, _ in lines(task.place / "pids-0.jsonl"))
    wrong = [*went_back(task)]
    if starts > struck + 1:
        wrong.append(f"{starts} starts after {struck} kills: one failed by itself")
    if code:
        wrong.append(f"torchrun ended with {code}: {launch.said()[-300:]}")
    return min(struck, starts - 1), wrong


def went_back(task: FaultyRun) -> Iterator[str]:
    """The starts that resumed from before what an earlier one had said to be safe."""
    said = [line for rank in range(task.ranks) for line in lines(task.place / f"safe-{rank}.jsonl")]
    for start, step in lines(task.place / "starts-0.jsonl"):
        before = max((safe for _, safe, number in said if number < start), default=0)
        if step < before:
            yield f"start {start} resumed from step {step}, step {before} was safe"
