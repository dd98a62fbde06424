"""Ranks and commands as processes that are forked from one that has imported torch (`shoestring.forking`)."""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from shoestring.forking import ForkServer

PRELOADED = (
    "shoestring.testing.checkpointing.strikes",
    "shoestring.testing.scenarios",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
)


@cache
def fork_server(number: int, faketime: str = "") -> ForkServer:
    """This process's fork server of that number, started by the first who asks and ended with this process.

    The number seeds the hashes of strings, so that the order of sets differs between ranks of different servers.

    Args:
        faketime: path of libfaketime: then the date of its processes is off by what is in their variable FAKETIME.
    """
    more = {"PYTHONHASHSEED": str(number)}
    if faketime:
        more |= {"LD_PRELOAD": faketime, "FAKETIME_NO_CACHE": "1", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    server = ForkServer(PRELOADED, rank_environment, more)
    atexit.register(server.close)
    return server


class ForkedProcess:
    """A process that a fork server of this one has forked; it prints to this process's standard error.

    Args:
        function: of a module, which the process calls before it ends.
        arguments: of JSON types.
        number: of the fork server.
        faketime: see `fork_server`.
    """

    def __init__(
        self, function: Callable[..., None], arguments: Sequence[Any] = (), number: int = 0, faketime: str = ""
    ) -> None:
        self._server = fork_server(number, faketime)
        self._status: int | None = None
        self.pid = self._server.fork(function, arguments, output=2)

    @property
    def exitcode(self) -> int | None:
        """The status that it ended with, or minus the signal that ended it; None while it runs."""
        with suppress(TimeoutError):
            return self.join(0.0)
        return None

    def join(self, timeout: float | None = None) -> int:
        """Wait until it has ended; `exitcode`.

        Raises:
            TimeoutError: it has not within `timeout` seconds.
        """
        if self._status is None:
            self._status = self._server.wait(self.pid, timeout)
        return self._status

    def resume(self) -> None:
        """Let it continue, where it was stopped."""
        if self.exitcode is None:
            os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """End it with SIGKILL, unless it has ended."""
        if self.exitcode is None:
            os.kill(self.pid, signal.SIGKILL)


def rank_environment() -> dict[str, str]:
    """This process's environment for ranks that meet on one machine: they need loopback only, and share its cores."""
    path = os.pathsep.join(path for path in sys.path if path)
    return {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def run_command(*arguments: str) -> None:
    """Run `shoestring` with these arguments in a forked process."""
    sys.argv = ["shoestring", *arguments]
    runpy.run_module("shoestring", run_name="__main__")


def run_script(path: str, *arguments: str) -> None:
    """Run a script in a forked process as `python path arguments` would; torch is imported already."""
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")
