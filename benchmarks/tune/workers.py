"""Workers on toy trials as processes that start in milliseconds: forked from one that has imported what they need."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from benchmarks.tune import toy_worker

_REQUESTS = ("take", "promote", "renew", "give_back", "finish")


@dataclass(frozen=True)
class ToySetting:
    """One study of toy trials; the arguments of `toy_worker.build`."""

    url: str
    folder: str
    trials: int
    lease: float
    steps: int
    pause: float
    schedule: Any = None
    spread: float = 1.0
    """The longest trial takes this many times as long as the shortest."""
    timed: bool = False
    """Whether the seconds of each request to the store are written to `requests-PID.json`."""

    def worker(self) -> Any:
        return toy_worker.build(
            self.url,
            Path(self.folder),
            self.trials,
            self.lease,
            self.steps,
            self.pause,
            schedule=self.schedule,
            spread=self.spread,
        )


def begin(setting: ToySetting) -> BaseProcess:
    """Start a worker."""
    return spawn(_work, setting)


def spawn(work: Callable[[Any], None], setting: Any) -> BaseProcess:
    """Call a function in a process that is forked from one with the imports."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.tune.preloaded"])
    process = context.Process(target=work, args=(setting,))
    process.start()
    return process


def imported() -> None:
    """Wait until the process that workers are forked from has imported what they need."""
    process = spawn(_end, None)
    process.join()


def _end(_: None) -> None:
    pass


def _work(setting: ToySetting) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.stderr = Path(setting.folder, "workers.log").open("a")  # noqa: SIM115  # as long as the process
    worker = setting.worker()
    seconds: dict[str, list[float]] = {}
    if setting.timed:
        for name in _REQUESTS:
            setattr(worker.store, name, _timed(getattr(worker.store, name), seconds.setdefault(name, [])))
        worker.proposer.propose = _timed(worker.proposer.propose, seconds.setdefault("propose", []))
    worker.run()
    if setting.timed:
        Path(setting.folder, f"requests-{os.getpid()}.json").write_text(json.dumps(seconds))


def _timed(request: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    def measured(*arguments: Any, **options: Any) -> Any:
        began = time.perf_counter()
        try:
            return request(*arguments, **options)
        finally:
            seconds.append(time.perf_counter() - began)

    return measured
