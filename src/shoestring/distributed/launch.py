"""Start several ranks on this host with torchrun's elastic agent, with every listener on loopback."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from tempfile import TemporaryDirectory
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousParameters
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry as registry
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from shoestring._torch import Store, TCPStore
from shoestring.core.errors import ShoestringError

LOOPBACK = "127.0.0.1"
AGENTS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # the signals that the agent handles
GRACE = 600  # seconds from a signal in which workers finish their step and write a checkpoint; 30 before torch 2.12
_GRACE: dict[str, Any] = {"shutdown_timeout": GRACE} if "shutdown_timeout" in LaunchConfig.__dataclass_fields__ else {}


class LocalRendezvous(RendezvousHandler):
    """A rendezvous of one agent, this host's, with a fresh store on loopback for each start of its workers.

    Torch's own handlers let their store listen on every address of the machine.
    """

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.store: Store | None = None

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return "shoestring-local"

    def next_rendezvous(self) -> RendezvousInfo:
        listener = socket.create_server((LOOPBACK, 0))
        port = listener.getsockname()[1]
        self.store = TCPStore(
            LOOPBACK,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=60),
            master_listen_fd=listener.detach(),
        )
        return RendezvousInfo(self.store, 0, 1, RendezvousStoreInfo(LOOPBACK, port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        return

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self.run_id

    def shutdown(self) -> bool:
        self.store = None
        return True


def launch(command: Sequence[str], workers: int, restarts: int = 0) -> int:
    """Run `python -m shoestring COMMAND` as `workers` ranks of this host.

    Args:
        restarts: times that all workers are started again after one of them has died. An error that the user has
            to correct (exit code 2) is final.

    Returns:
        The exit code: 0, that of the worker that failed first, or 128 + the signal that ended all.
    """
    if "shoestring-local" not in registry._registry:
        registry.register("shoestring-local", _build_handler)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # `_explain` says what failed
    options: dict[str, Any] = {
        "min_nodes": 1,
        "max_nodes": 1,
        "nproc_per_node": workers,
        "run_id": f"shoestring-{os.getpid()}",
        "rdzv_backend": "shoestring-local",
        "rdzv_endpoint": LOOPBACK,
        "max_restarts": 0,  # the agent would also restart what cannot succeed
        "monitor_interval": 0.1,
        "local_addr": LOOPBACK,
        **_GRACE,
    }
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))
    code = 0
    for _ in range(restarts + 1):
        try:
            folder = TemporaryDirectory(prefix="shoestring-workers-", ignore_cleanup_errors=True)
            with _handlers_restored(), folder as said:  # the agent would leave one of its own behind
                specs = DefaultLogsSpecs(log_dir=said)
                config = LaunchConfig(logs_specs=specs, **options)
                elastic_launch(config, sys.executable)("-m", "shoestring", *command)
        except ChildFailedError as error:
            code = _explain(error)
            if code == ShoestringError.code:
                break
        except SignalException as error:
            return 128 + int(error.sigval)
        else:
            return 0
    return code


@contextmanager
def _handlers_restored() -> Iterator[None]:
    """Restore the signal handlers that the agent replaces: with them, later signals would end this process as well."""
    before = {number: signal.getsignal(number) for number in AGENTS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _build_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    return LocalRendezvous(parameters.run_id)


def _message_of(message: object) -> object:
    """Take the worker's message out of the file's record, which also has a time and a call stack."""
    return message["message"] if isinstance(message, dict) else message


def _explain(error: ChildFailedError) -> int:
    """Print which worker failed first and why, in its own words if it left a message; return the exit code."""
    rank, failure = error.get_first_failure()
    if failure.exitcode < 0:
        sys.stderr.write(f"error: rank {rank} was killed by {failure.signal_name()}\n")
        return 128 - failure.exitcode
    if failure.exitcode == ShoestringError.code:
        sys.stderr.write(f"{_message_of(failure.message)}\n")
    return failure.exitcode
