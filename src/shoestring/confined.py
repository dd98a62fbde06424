"""Worker processes with limits on time and memory, for jobs on untrusted input that could take very long or much
memory.

A kernel timer ends a process whose job takes too long, even if the process cannot run Python code or the client has
ended. The next job then gets a new process.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from shoestring.forking import ForkServer

Handler = Callable[[bytes], bytes]

MEMORY = 1 << 30
"""Default number of bytes that a process may allocate in addition to those that it has at its start."""
SLOW_START = 120.0
"""Time limit for the start of a process, in seconds."""
REPLY = 256 << 20
"""Maximum size of a message, in bytes."""
_SLACK = 5.0  # seconds after which the client kills a process that its own timer should have ended
_DONE, _TOO_LARGE, _FAILED = b"d", b"m", b"f"
# Environment variables that workers get; others may contain passwords.
_PASSED_ON = ("LANG", "LC_ALL", "LC_TIME", "LD_LIBRARY_PATH", "PATH", "TZ")
_LENGTH = struct.Struct("!Q")


class LimitError(Exception):
    """A job exceeded its limit on time or memory, or ended its process in another way."""


class Confined:
    """Worker processes, each of which handles one job at a time. Thread-safe.

    Worker processes start when they get their first job. They end when `close` is called. If this process ends without
    calling `close`, a worker process ends at the latest when its job exceeds the time limit.

    Args:
        builder: function that returns the handler of jobs; a new process calls it with `setup`. Its module must not
            import torch.
        setup: argument of `builder`.
        seconds: time limit of a job.
        memory: number of bytes that a process may allocate in addition to those that it has at its start.
        count: number of processes.
    """

    def __init__(
        self,
        builder: Callable[[bytes], Handler],
        setup: bytes,
        *,
        seconds: float,
        memory: int = MEMORY,
        count: int = 1,
    ) -> None:
        self.seconds, self.memory, self.setup = seconds, memory, setup
        self._builder = f"{builder.__module__}:{builder.__qualname__}"
        self._workers: list[_ConfinedProcess | None] = [None] * count
        self._locks = [threading.Lock() for _ in range(count)]
        self._starting = threading.Lock()
        self._server: ForkServer | None = None
        self._closed = False

    def call(self, job: bytes, number: int = 0) -> bytes:
        """Let process `number` handle a job, and return the result.

        Raises:
            LimitError: the job took too long or too much memory, or its process ended.
            RuntimeError: the handler raised an error.
        """
        with self._locks[number]:
            worker = self._workers[number]
            if worker is not None and worker.gone:
                self._ended(worker)
                worker = None
            if worker is None:
                worker = self._workers[number] = self._start()
            try:
                return worker.ask(job, self.seconds)
            except (OSError, EOFError) as error:
                raise self._ended(worker, error, self.seconds) from error
            except BaseException:
                self._ended(worker)
                raise
            finally:
                if worker.killed:
                    self._workers[number] = None

    def close(self) -> None:
        """End all processes, including busy ones."""
        self._closed = True
        for worker in self._workers:
            if worker is not None:
                worker.kill()
        with self._starting:
            if self._server is not None:
                self._server.close()
                self._server = None

    def _start(self) -> _ConfinedProcess:
        ours, theirs = socket.socketpair()
        with theirs, self._starting:
            try:
                arguments = (self._builder, self.seconds, self.memory)
                pid = self._fork_server().fork(work, arguments, 2, (theirs.fileno(),))
                worker = _ConfinedProcess(pid, ours)
            except (OSError, RuntimeError) as error:
                ours.close()
                raise LimitError(f"no process could be started: {error}") from error
        try:
            worker.ask(self.setup, SLOW_START)
        except (OSError, EOFError) as error:
            raise self._ended(worker, error, SLOW_START) from error
        return worker

    def _ended(self, worker: _ConfinedProcess, error: BaseException | None = None, seconds: float = 0.0) -> LimitError:
        """Kill a worker process, and return the error that says why it did not answer."""
        worker.kill()
        status = 0
        with self._starting, suppress(OSError, RuntimeError):  # the fork server may be gone as well
            if self._server is not None:
                status = self._server.wait(worker.pid, _SLACK)
        if isinstance(error, TimeoutError) or status == -signal.SIGALRM:
            return LimitError(f"it took longer than {seconds:g} s")
        return LimitError("it took too much memory, or ended the process")

    def _fork_server(self) -> ForkServer:
        if self._closed:
            raise LimitError("it was ended with the program")
        if self._server is None or self._server.ended:
            modules = [__name__, self._builder.partition(":")[0]]
            # PYTHONSAFEPATH keeps Python from importing modules from the working folder.
            self._server = ForkServer(modules, _environment, {"PYTHONSAFEPATH": "1"})
        return self._server


def _environment() -> dict[str, str]:
    return {name: os.environ[name] for name in _PASSED_ON if name in os.environ}


class _ConfinedProcess:
    """The client's end of the connection to one worker process."""

    def __init__(self, pid: int, channel: socket.socket) -> None:
        self.pid, self.channel = pid, channel
        self._process = os.pidfd_open(pid)
        self._killed = threading.Lock()

    @property
    def killed(self) -> bool:
        """Whether `kill` was called."""
        return self._killed.locked()

    @property
    def gone(self) -> bool:
        """Whether the process has ended since its last job."""
        try:
            self.channel.settimeout(0)
            self.channel.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True

    def ask(self, job: bytes, seconds: float) -> bytes:
        """Send a job, and return the reply.

        Raises:
            OSError, EOFError: the process has ended, or does not answer.
            LimitError, RuntimeError: as for `Confined.call`.
        """
        self.channel.settimeout(seconds + _SLACK)
        with suppress(ConnectionError):  # the process has ended; a reply that it sent before says why
            self.channel.sendall(_LENGTH.pack(len(job)))
            self.channel.sendall(job)
        kind = receive(self.channel, 1)
        reply = receive(self.channel, _LENGTH.unpack(receive(self.channel, _LENGTH.size))[0])
        if kind == _TOO_LARGE:
            raise LimitError("it took too much memory")
        if kind == _FAILED:
            raise RuntimeError(reply.decode())
        return reply

    def kill(self) -> None:
        """Kill the process; a thread that waits for the reply of the process gets an error."""
        if self._killed.acquire(blocking=False):
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process, signal.SIGKILL)
            os.close(self._process)
            with suppress(OSError):
                self.channel.shutdown(socket.SHUT_RDWR)
            self.channel.close()


def receive(channel: socket.socket, count: int) -> bytes:
    """Receive `count` bytes.

    Raises:
        EOFError: the other side closed the connection.
        OSError: `count` is too large, or the connection fails.
    """
    if count > REPLY:
        raise OSError(f"a message of {count} bytes")
    data = bytearray(count)
    view = memoryview(data)
    while view:
        got = channel.recv_into(view)
        if not got:
            raise EOFError
        view = view[got:]
    return bytes(data)


# -- in the process ----------------------------------------------------------------------------------------------------


def work(descriptor: int, builder: str, seconds: float, memory: int) -> None:
    """Handle jobs until the client closes the connection."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the default action ends the process
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the client
    module, _, name = builder.partition(":")
    with socket.socket(fileno=descriptor) as channel, suppress(EOFError, ConnectionError):
        build: Callable[[bytes], Handler] = getattr(import_module(module), name)
        handler = build(receive(channel, _LENGTH.unpack(receive(channel, _LENGTH.size))[0]))
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + memory, taken + memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        kind, reply = _DONE, b""
        while kind != _TOO_LARGE:  # after running out of memory, the handler's state may be inconsistent
            channel.sendall(kind + _LENGTH.pack(len(reply)) + reply)
            job = receive(channel, _LENGTH.unpack(receive(channel, _LENGTH.size))[0])
            kind, reply = _answer(handler, job, seconds)
        channel.sendall(kind + _LENGTH.pack(0))


def _answer(handler: Handler, job: bytes, seconds: float) -> tuple[bytes, bytes]:
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return _DONE, handler(job)
    except MemoryError:
        return _TOO_LARGE, b""
    except Exception as error:  # a bug in the handler is reported to the client
        return _FAILED, f"{type(error).__name__}: {error}".encode(errors="replace")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
