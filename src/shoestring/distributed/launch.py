"""Start several ranks on this host with torchrun's elastic agent, listening only on the loopback address."""

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
from shoestring.core.errors import STOPPED, ShoestringError
from shoestring.distributed.join import OWN_RUN
from shoestring.processors import processors

LOOPBACK = "127.0.0.1"
AGENTS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # signals for which the agent installs handlers
GRACE = 600  # seconds to finish the step and write a checkpoint after a signal; always 30 before torch 2.12
_GRACE: dict[str, Any] = {"shutdown_timeout": GRACE} if "shutdown_timeout" in LaunchConfig.__dataclass_fields__ else {}


class LocalRendezvous(RendezvousHandler):
    """A rendezvous for the elastic agent of a single host, with a new store on loopback for each start of its workers.

    This class replaces torch's own handlers, because their store listens on every address of the machine.
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
        restarts: how many times all workers are started again after a worker has died. Workers are not started again
            after an error that the user must correct (exit code 2).

    Returns:
        The exit code: 0 if all workers succeeded, `STOPPED` after a signal to this process or to a worker, and
        otherwise the exit code of the worker that failed first.
    """
    if "shoestring-local" not in registry._registry:
        registry.register("shoestring-local", _build_handler)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # `_explain` reports failures instead
    options: dict[str, Any] = {
        "min_nodes": 1,
        "max_nodes": 1,
        "nproc_per_node": workers,
        "run_id": f"{OWN_RUN}{os.getpid()}",
        "rdzv_backend": "shoestring-local",
        "rdzv_endpoint": LOOPBACK,
        "max_restarts": 0,  # the agent would also restart workers after errors that a restart cannot fix
        "monitor_interval": 0.1,
        "local_addr": LOOPBACK,
        **_GRACE,
    }
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, processors() // workers)))
    code = 0
    for _ in range(restarts + 1):
        try:
            folder = TemporaryDirectory(prefix="shoestring-workers-", ignore_cleanup_errors=True)
            with _handlers_restored(), folder as logs:  # the agent's default log folder would remain after the run
                specs = DefaultLogsSpecs(log_dir=logs)
                config = LaunchConfig(logs_specs=specs, **options)
                elastic_launch(config, sys.executable)("-P", "-m", "shoestring", *command)
        except ChildFailedError as error:
            code = _explain(error)
            if code in (ShoestringError.code, STOPPED):
                break
        except SignalException:
            return STOPPED
        else:
            return 0
    return code


@contextmanager
def _handlers_restored() -> Iterator[None]:
    """Context manager that restores the signal handlers at its end, because the agent replaces them.

    The agent's handlers would remain installed and would end this process at a later signal. Inside the context,
    SIGUSR1 is turned into SIGTERM. Batch systems send SIGUSR1 shortly before they end a job, and workers respond to
    SIGTERM by writing a checkpoint and ending.
    """
    before = {number: signal.getsignal(number) for number in (*AGENTS, signal.SIGUSR1)}
    signal.signal(signal.SIGUSR1, lambda *_: signal.raise_signal(signal.SIGTERM))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _build_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    return LocalRendezvous(parameters.run_id)


def _explain(error: ChildFailedError) -> int:
    """Print which worker failed first and why, with the worker's own message if there is one; return the exit code.

    A worker killed by SIGTERM is reported only if all failed workers were killed by SIGTERM. After a failure, the agent
    ends the remaining workers with SIGTERM, and its timestamps, in whole seconds, do not show which worker failed
    first.
    """
    rank, failure = min(
        error.failures.items(), key=lambda item: (item[1].exitcode == -signal.SIGTERM, item[1].timestamp)
    )
    if failure.exitcode < 0:
        sys.stderr.write(f"error: rank {rank} was killed by {failure.signal_name()}\n")
        return 128 - failure.exitcode
    if failure.exitcode == ShoestringError.code:
        message: object = failure.message  # a mapping with time and call stack if the worker wrote an error file
        sys.stderr.write(f"{message['message'] if isinstance(message, dict) else message}\n")
    return failure.exitcode
