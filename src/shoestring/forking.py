"""A fork server: a process that has imported modules, and starts other processes in hundredths of a second by forking.

Without a fork server, each process would spend three CPU seconds on importing torch. `python -m shoestring.forking FD
MODULES` runs the server. The server has only one thread, so forking is safe. Each request contains the environment,
`sys.path` and output of the new process, because the process must not inherit these from the server.
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

LARGEST = 1 << 20  # maximum size of a request in bytes; most of a request is the environment
_HELD_BACK = (signal.SIGINT, signal.SIGTERM)


class ForkServer:
    """Starts a fork server, which is the parent of all processes that it forks.

    The server ends when this object is closed or the process that created the object ends.

    Args:
        preloaded: names of the modules that the server imports.
        environment: returns the default environment of forked processes; by default the environment of this process.
        more: environment variables to add for the server and the code that it imports.
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
            command = [sys.executable, "-P", "-m", "shoestring.forking", str(theirs.fileno()), *preloaded]
            own = {**environment(), "PYTHONPATH": path, **(more or {})}
            self._process = subprocess.Popen(command, env=own, pass_fds=(theirs.fileno(),))

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether the server has ended."""
        return self._process.poll() is not None

    def fork(
        self,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        output: int,
        inherited: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> int:
        """Start a process that calls a top-level function of a module and then ends.

        Args:
            arguments: further arguments of the function, of JSON types; they follow the descriptors in `inherited`.
            output: descriptor to use as standard output and standard error.
            inherited: descriptors that the process inherits; their numbers in the process are the function's first
                arguments.
            environment: environment of the process; None takes the server's default.

        Returns:
            The process id, which no other process gets before `wait` is called.
        """
        called = f"{function.__module__}:{function.__qualname__}"
        own = dict(self._environment() if environment is None else environment)
        request = {"call": called, "arguments": arguments, "environment": own, "path": sys.path}
        return self._ask(request | {"folder": str(Path.cwd())}, (output, *inherited))

    def wait(self, pid: int, timeout: float | None = None) -> int:
        """Wait for a forked process to end; returns its exit status, or minus the number of the signal that ended it.

        Raises:
            TimeoutError: the process did not end within `timeout` seconds.
        """
        end = os.pidfd_open(pid)
        try:
            if not select.select([end], [], [], timeout)[0]:
                raise TimeoutError(f"process {pid} has not ended within {timeout:g} s")
        finally:
            os.close(end)
        return self._ask({"wait": pid})

    def close(self) -> None:
        """End the server; the processes that it has forked continue."""
        self._socket.close()
        self._process.wait()

    def _ask(self, request: Mapping[str, Any], descriptors: Sequence[int] = ()) -> int:
        answer = b""
        with suppress(ConnectionError):  # the server was killed
            socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
            answer = self._socket.recv(LARGEST)
        if not answer:
            raise RuntimeError("the fork server has ended; standard error says why")
        return int(answer)


# -- the server -------------------------------------------------------------------------------------------------------


def serve(descriptor: int, preloaded: Sequence[str]) -> None:
    """Answer requests until the process that sends them has ended."""
    # Signals from a terminal or a scheduler are meant for the process that started this one. They are blocked and not
    # ignored, so that a signal to a newly forked process stays pending until the process has set its handlers.
    signal.pthread_sigmask(signal.SIG_BLOCK, _HELD_BACK)
    for module in preloaded:
        import_module(module)
    forked = False
    with socket.socket(fileno=descriptor) as requests, suppress(ConnectionError):  # the client was killed
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
            for descriptor in descriptors:
                os.close(descriptor)
    if forked:
        run(request, *descriptors)


def run(request: Mapping[str, Any], output: int, *inherited: int) -> None:
    """Set up the forked process as the request says, and call its function."""
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
    random.seed()  # a new interpreter would do this too; otherwise all processes would draw the same numbers
    module, _, name = request["call"].partition(":")
    getattr(import_module(module), name)(*inherited, *request["arguments"])


if __name__ == "__main__":
    serve(int(sys.argv[1]), sys.argv[2:])
