"""Fork servers (`shoestring.forking`) that have imported torch, from which tests start ranks and commands quickly."""

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
    "shoestring.checkpoint.attached",
    "shoestring.checkpoint.recovery.resume",
    "shoestring.checkpoint.tiers.tiered",
    "shoestring.comm.settings",
    "shoestring.naming",
    "shoestring.testing.scenarios",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
)


@cache
def fork_server(number: int, faketime: str = "") -> ForkServer:
    """Return the fork server with this number; the server starts at the first call and ends with this process.

    The number seeds the hashes of strings, so that the order of sets differs between the processes of different
    servers.

    Args:
        faketime: path of libfaketime, a library that shifts the clock of the forked processes as their environment
            variable FAKETIME says; empty for the real clock.
    """
    more = {"PYTHONHASHSEED": str(number)}
    if faketime:
        more |= {"LD_PRELOAD": faketime, "FAKETIME_NO_CACHE": "1", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    server = ForkServer(PRELOADED, rank_environment, more)
    atexit.register(server.close)
    return server


class ForkedProcess:
    """A process that a fork server has started; its output goes to the standard error of this process.

    Args:
        function: function of a module that the process calls.
        arguments: arguments of JSON types.
        number: number of the fork server.
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
        """Exit status of the process, or minus the number of the signal that ended it; None while it runs."""
        with suppress(TimeoutError):
            return self.join(0.0)
        return None

    def join(self, timeout: float | None = None) -> int:
        """Wait for the process to end, and return its `exitcode`.

        Raises:
            TimeoutError: the process did not end within `timeout` seconds.
        """
        if self._status is None:
            self._status = self._server.wait(self.pid, timeout)
        return self._status

    def resume(self) -> None:
        """Continue the process after a SIGSTOP."""
        if self.exitcode is None:
            os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """End the process with SIGKILL if it still runs."""
        if self.exitcode is None:
            os.kill(self.pid, signal.SIGKILL)


def rank_environment() -> dict[str, str]:
    """Return an environment for ranks on one machine: the loopback interface for Gloo, and one OpenMP thread each."""
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
