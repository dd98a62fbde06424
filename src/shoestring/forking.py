"""A process that has imported what others need and forks them: importing torch takes three CPU seconds, forking some
hundredths.

`python -m shoestring.forking FD MODULES` is that process. It has one thread, so a fork of it is as good as a new
interpreter; what a process must not share with others (environment, `sys.path`, output) comes with each request.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

LARGEST = 1 << 20  # bytes of a request; most of it is the environment
_HELD_BACK = (signal.SIGINT, signal.SIGTERM)


class ForkServer:
    """The process that forks, and the only parent of what it has forked. It ends with this object or its process.

    Args:
        preloaded: names of the modules that it imports.
        environment: returns what a process has unless it is told otherwise; by default this process's own.
        more: what the server has in its environment besides.
    """

    def __init__(
        self,
        preloaded: Sequence[str],
        environment: Callable[[], Mapping[str, str]] = os.environ.copy,
        more: Mapping[str, str] | None = None,
    ) -> None:
        self._environment = environment
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            path = os.pathsep.join(path for path in sys.path if path)
            command = [sys.executable, "-m", "shoestring.forking", str(theirs.fileno()), *preloaded]
            own = {**environment(), "PYTHONPATH": path, **(more or {})}
            self._process = subprocess.Popen(command, env=own, pass_fds=(theirs.fileno(),))

    @property
    def pid(self) -> int:
        """The server's own."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether the server itself has ended, and what it has forked with it, if that dies with its parent."""
        return self._process.poll() is not None

    def fork(
        self,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        output: int,
        kept: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> int:
        """Start a process that calls a function of a module and ends.

        Args:
            arguments: of JSON types, after the descriptors in `kept`, which have other numbers in that process.
            output: the descriptor that standard output and error go to.
            environment: the process's, instead of the server's own choice.

        Returns:
            The process's id. Only `wait` frees it.
        """
        called = f"{function.__module__}:{function.__qualname__}"
        own = dict(self._environment() if environment is None else environment)
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


# -- the server -------------------------------------------------------------------------------------------------------


def serve(descriptor: int, preloaded: Sequence[str]) -> None:
    """Fork whenever asked, until whoever asks has ended."""
    # Of a terminal or a scheduler, which whoever started this answers. Blocked, not ignored: what is sent to a process
    # that has just been forked waits until that process takes it.
    signal.pthread_sigmask(signal.SIG_BLOCK, _HELD_BACK)
    for module in preloaded:
        import_module(module)
    forked = False
    with socket.socket(fileno=descriptor) as requests, suppress(ConnectionError):  # whoever asked was killed
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
            if forked := pid == 0:
                break
            requests.send(str(pid).encode())
            for each in descriptors:
                os.close(each)
    if forked:
        run(request, *descriptors)


def run(request: Mapping[str, Any], output: int, *kept: int) -> None:
    """The forked process's part: take what is its own, and call."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HELD_BACK)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.path[:] = request["path"]
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    random.seed()  # as a new interpreter does
    module, _, name = request["call"].partition(":")
    getattr(import_module(module), name)(*kept, *request["arguments"])


if __name__ == "__main__":
    serve(int(sys.argv[1]), sys.argv[2:])
