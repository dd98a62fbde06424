"""A pool of ranks: processes in one Gloo process group on this machine, which run test functions called scenarios.

    with Pool(2) as pool:
        pool.call(scenario, steps=3)      # [result of rank 0, result of rank 1]

A scenario is a top-level function of a module. A scenario's name (`module:name`), arguments and result are sent as
JSON, so nothing is pickled. Ranks are forked by two fork servers with different hash seeds, so that tests fail if ranks
depend on the order of a set.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import selectors
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from shoestring.forking import ForkServer
from shoestring.testing.fork_server import fork_server

GRACE = 5.0  # time limit in seconds for idle ranks to end, and for the all-reduce that tests the process group
Reply = dict[str, Any]


class RankError(AssertionError):
    """A scenario failed on a rank or did not end in time; `kind` is the exception's class, or for example "Timeout"."""

    def __init__(self, kind: str, message: str, detail: str = "") -> None:
        super().__init__(f"{message}\n{detail}" if detail else message)
        self.kind, self.message = kind, message


class Pool:
    """A pool of `ranks` processes, which start with the first `call` and end with `close`.

    After a scenario has failed, an all-reduce tests the process group; if the all-reduce fails too, new processes are
    started.

    Args:
        timeout: time limit of a scenario in seconds. When the limit is exceeded, RankError contains the ranks' call
            stacks, and the processes are killed.
        patience: seconds that the other ranks may still take after one rank has failed.
    """

    def __init__(self, ranks: int = 2, *, timeout: float = 120.0, patience: float = 5.0) -> None:
        self.ranks, self.timeout, self.patience = ranks, timeout, patience
        self._workers: list[_Worker] = []

    @property
    def pids(self) -> list[int]:
        """Process ids of the running ranks."""
        return [worker.pid for worker in self._workers]

    def call(self, scenario: Callable[..., Any], /, **arguments: Any) -> list[Any]:
        """Run `scenario(**arguments)` on every rank at the same time.

        Returns:
            A list with the result of each rank, after a round trip through JSON.

        Raises:
            RankError: the scenario raised an exception on a rank, a rank died, or the time limit was exceeded.
        """
        if not self._workers:
            self._start()
        replies = self._ask(f"{scenario.__module__}:{scenario.__qualname__}", arguments, self.timeout)
        failed = [(rank, reply) for rank, reply in enumerate(replies) if "result" not in reply]
        if not failed:
            return [reply["result"] for reply in replies]
        if not self._usable(failed):
            self._kill()

        def order(failure: tuple[int, Reply]) -> tuple[bool, int]:  # dead ranks first, then in order of failure
            return failure[1]["kind"] != "Died", failure[1].get("order", 1 << 30)

        rank, first = min(failed, key=order)  # the first failure explains the other failures
        raise RankError(first["kind"], f"rank {rank}: {first['message']}", first["detail"])

    def close(self) -> None:
        """Ask the processes to end, and kill the processes that do not."""
        for worker in self._workers:
            worker.requests.close()
        deadline = time.monotonic() + GRACE
        for worker in self._workers:
            worker.await_end(deadline)
        self._kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _usable(self, failed: list[tuple[int, Reply]]) -> bool:
        """Whether the process group still works: no rank died or timed out, and an all-reduce succeeds."""
        if len(failed) < self.ranks or any(reply["kind"] in ("Timeout", "Waiting", "Died") for _, reply in failed):
            return False
        replies = self._ask("shoestring.testing.pool:healthy", {}, GRACE)
        return all(reply.get("result") for reply in replies)

    # -- processes ---------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="shoestring-pool-")
        folder = Path(self._folder.name)
        servers = [fork_server(number) for number in range(min(self.ranks, 2))]  # the servers import torch concurrently
        self._workers = [
            _Worker(rank, self.ranks, folder, self.timeout, servers[rank % 2]) for rank in range(self.ranks)
        ]

    def _kill(self) -> None:
        for worker in self._workers:
            worker.kill()
        if self._workers:
            self._folder.cleanup()
        self._workers = []

    def _ask(self, scenario: str, arguments: dict[str, Any], timeout: float) -> list[Reply]:
        """Send a request to all ranks and receive one reply from each; after a failure, the other ranks get only
        `patience` seconds more, because they may wait for the failed rank in a collective."""
        request = json.dumps({"scenario": scenario, "arguments": arguments, "path": sys.path}) + "\n"
        for worker in self._workers:
            worker.send(request)
        replies: dict[int, Reply] = {}
        deadline, late = time.monotonic() + timeout, "Timeout"
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                selector.register(worker.replies, selectors.EVENT_READ, worker)
            while len(replies) < self.ranks and (left := deadline - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    worker = key.data
                    if (reply := worker.receive()) is None:
                        continue
                    replies[worker.rank] = reply | {"order": len(replies)}
                    selector.unregister(worker.replies)
                    if "result" not in reply and late == "Timeout":
                        deadline, late = min(deadline, time.monotonic() + self.patience), "Waiting"
        return [replies.get(w.rank) or w.overdue(late, timeout) for w in self._workers]


class _Worker:
    """The parent's side of one rank: its process, pipes for requests and replies, and the file with its output."""

    def __init__(self, rank: int, size: int, folder: Path, timeout: float, server: ForkServer) -> None:
        self.rank, self._server = rank, server
        self.output = folder / f"rank{rank}.log"
        down, up = os.pipe(), os.pipe()
        with self.output.open("wb") as output:
            arguments = [rank, size, str(folder / "store"), timeout]
            self.pid = server.fork(serve, arguments, output.fileno(), (down[0], up[1]))
        os.close(down[0])
        os.close(up[1])
        self.requests = os.fdopen(down[1], "w")
        self.replies = os.fdopen(up[0], "rb", buffering=0)
        self._received = b""
        self._status: int | None = None

    def send(self, request: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # the process died, which `receive` will report
            self.requests.write(request)
            self.requests.flush()

    def receive(self) -> Reply | None:
        """Read from the pipe; returns the rank's reply, or None if the reply is not complete yet."""
        part = self.replies.read(1 << 20)
        if not part:
            status = self.wait()
            return {"kind": "Died", "message": f"the process ended with status {status}", "detail": self.printed()}
        self._received += part
        if not self._received.endswith(b"\n"):
            return None
        reply, self._received = json.loads(self._received), b""
        return reply

    def overdue(self, kind: str, timeout: float) -> Reply:
        """Make the reply of a rank that did not answer in time, with the rank's call stack."""
        before = self.output.stat().st_size
        os.kill(self.pid, signal.SIGUSR1)
        deadline = time.monotonic() + 2
        while self.output.stat().st_size == before and time.monotonic() < deadline:
            time.sleep(0.01)
        what = f"no answer within {timeout:g} s" if kind == "Timeout" else "still busy after another rank had failed"
        return {"kind": kind, "message": f"{what}; it was killed", "detail": self.printed()}

    def printed(self) -> str:
        return self.output.read_text(errors="replace")[-4000:]

    def await_end(self, deadline: float) -> None:
        """Wait until the rank ends, which closes its pipe, or until the deadline."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.replies, selectors.EVENT_READ)
            while (left := deadline - time.monotonic()) > 0 and selector.select(left):
                if not self.replies.read(1 << 20):
                    return

    def wait(self) -> int:
        """Wait for the process to end, and return its exit status."""
        if self._status is None:
            self._status = self._server.wait(self.pid)
        return self._status

    def kill(self) -> None:
        if self._status is None:
            os.kill(self.pid, signal.SIGKILL)
        self.wait()
        with contextlib.suppress(BrokenPipeError):
            self.requests.close()
        self.replies.close()


# -- one rank ---------------------------------------------------------------------------------------------------------


def healthy() -> bool:
    """Scenario that tests the process group: whether an all-reduce gives the right sum."""
    import torch
    import torch.distributed as dist

    total = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(total)
    return float(total) == dist.get_world_size() * (dist.get_world_size() + 1) / 2


def serve(requests: int, replies: int, rank: int, size: int, store: str, timeout: float) -> None:
    """Run the scenarios that the parent requests, until the pipe is closed; the parent's death closes it too."""
    import torch
    import torch.distributed as dist

    faulthandler.register(signal.SIGUSR1)
    faulthandler.enable()  # a rank that crashes prints the call stacks of its threads
    torch.set_num_threads(1)
    # The limit is longer than the parent's timeout, so that the parent can report the call stacks first.
    limit = timedelta(seconds=timeout + 2 * GRACE)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=limit)
    with os.fdopen(requests) as incoming, os.fdopen(replies, "w") as outgoing:
        for line in incoming:
            outgoing.write(json.dumps(_answer(json.loads(line))) + "\n")
            outgoing.flush()
        dist.destroy_process_group()


def _answer(request: dict[str, Any]) -> Reply:
    sys.path[:] = request["path"]
    module, _, name = request["scenario"].partition(":")
    try:
        result = getattr(import_module(module), name)(**request["arguments"])
        json.dumps(result)
    except Exception as error:
        return {"kind": type(error).__name__, "message": f"{error}", "detail": traceback.format_exc()}
    return {"result": result}
