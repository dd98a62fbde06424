"""A process that has imported torch and forks ranks: importing takes some three CPU seconds, forking some hundredths.

`python -m shoestring.testing.fork_server FD` is that process. It has one thread, so a fork of it is as good as a new
interpreter; what a rank must not share with others (environment, `sys.path`, output) comes with each request.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

PRELOADED = (
    "shoestring.testing.checkpointing.trainee",
    "shoestring.testing.scenarios",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
)
LARGEST = 1 << 20  # bytes of a request; most of it is the environment


class ForkServer:
    """The process that forks, and the only parent of what it has forked.

    Args:
        number: seeds the hashes of strings, so that the order of sets differs between ranks of different servers.
    """

    def __init__(self, number: int = 0) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            environment = rank_environment() | {"PYTHONHASHSEED": str(number)}
            command = [sys.executable, "-m", "shoestring.testing.fork_server", str(theirs.fileno())]
            self._process = subprocess.Popen(command, env=environment, pass_fds=(theirs.fileno(),))

    def fork(
        self,
        function: Callable[..., None],
        arguments: Sequence[Any],
        output: int,
        kept: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> int:
        """Start a process that calls a function of a module and ends.

        Args:
            arguments: of JSON types, after the descriptors in `kept`, which have other numbers in that process.
            output: the descriptor that standard output and error go to.
            environment: the process's, instead of `rank_environment()`.

        Returns:
            The process's id. Only `wait` frees it.
        """
        called = f"{function.__module__}:{function.__qualname__}"
        own = rank_environment() if environment is None else dict(environment)
        request = {"call": called, "arguments": arguments, "environment": own, "path": sys.path}
        return self._ask(request | {"folder": str(Path.cwd())}, (output, *kept))

    def wait(self, pid: int, timeout: float | None = None) -> int:
        """Wait until a process that this server has forked has ended: its status, or minus the signal that ended it.

        Raises:
            TimeoutError: it has not within `timeout` seconds.
        """
        end = os.pidfd_open(pid)
        try:
            if not select.select([end], [], [], timeout)[0]:
                raise TimeoutError(f"process {pid} has not ended within {timeout:g} s")
        finally:
            os.close(end)
        return self._ask({"wait": pid})

    def close(self) -> None:
        """End the server; what it has forked and nobody has waited for is left to itself."""
        self._socket.close()
        self._process.wait()

    def _ask(self, request: Mapping[str, Any], descriptors: Sequence[int] = ()) -> int:
        socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
        if not (answer := self._socket.recv(LARGEST)):
            raise RuntimeError("the fork server has ended; standard error says why")
        return int(answer)


@cache
def fork_server(number: int) -> ForkServer:
    """This process's fork server of that number, started by the first who asks and ended with this process."""
    server = ForkServer(number)
    atexit.register(server.close)
    return server


class ForkedProcess:
    """A process that a fork server of this one has forked; it prints to this process's standard error.

    Args:
        function: of a module, which the process calls before it ends.
        arguments: of JSON types.
        number: of the fork server.
    """

    def __init__(self, function: Callable[..., None], arguments: Sequence[Any] = (), number: int = 0) -> None:
        self._server = fork_server(number)
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


# -- the server -------------------------------------------------------------------------------------------------------


def serve(descriptor: int) -> None:
    """Fork whenever asked, until whoever asks has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from a terminal: whoever started this decides when it ends
    for module in PRELOADED:
        import_module(module)
    with socket.socket(fileno=descriptor) as requests:
        while True:
            message, descriptors, _, _ = socket.recv_fds(requests, LARGEST, 16)
            if not message:
                return
            request = json.loads(message)
            if "wait" in request:
                _, status = os.waitpid(request["wait"], 0)
                requests.send(str(os.waitstatus_to_exitcode(status)).encode())
                continue
            pid = os.fork()
            if pid == 0:
                break
            requests.send(str(pid).encode())
            for each in descriptors:
                os.close(each)
    run(request, *descriptors)


def run(request: Mapping[str, Any], output: int, *kept: int) -> None:
    """The forked process's part: take what is its own, and call."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.path[:] = request["path"]
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    module, _, name = request["call"].partition(":")
    getattr(import_module(module), name)(*kept, *request["arguments"])


if __name__ == "__main__":
    serve(int(sys.argv[1]))
