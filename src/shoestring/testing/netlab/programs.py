"""Programs on the hosts of a lab: one command that runs on several hosts, with an output file for each host."""

from __future__ import annotations

import contextlib
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from shoestring.core.errors import WorldError
from shoestring.testing.netlab.hosts import LOGS, Host, inside
from shoestring.testing.netlab.machine import Identity, parent, processes

MARK = "SHOESTRING_LAB_JOB"  # environment variable that identifies the processes of a program


class Program:
    """One command that runs on several hosts of a lab, created by `Lab.start` or `Lab.torchrun`.

    The folder `folder` contains the output of each host in `host0.log` and so on. For torchrun, the folder also
    contains the output of each worker and attempt in `host0/` and so on.
    """

    def __init__(
        self, hosts: Callable[[int], Host], command: Callable[[int], list[str]], env: Mapping[str, str], folder: Path
    ) -> None:
        self.folder = folder
        self._hosts, self._command = hosts, command
        self._mark = secrets.token_hex(8)
        self._env = {**env, MARK: self._mark}
        self._running: dict[int, tuple[Host, subprocess.Popen[bytes]]] = {}

    def join(self, host: int) -> None:
        """Start the command on another host, or again on a host that was removed and added again.

        Raises:
            WorldError: there is no such host, or the command is still running on it.
        """
        if host in self._running and self._running[host][1].poll() is None:
            raise WorldError(f"netlab: the job still runs on host{host}")
        there = self._hosts(host)
        with self.log(host).open("ab") as log:
            process = subprocess.Popen(
                inside(there.init.pid, self._command(host)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._env,
                start_new_session=True,
            )
        self._running[host] = there, process

    def log(self, host: int) -> Path:
        """Return the path of the file with the command's standard output and standard error on a host."""
        return self.folder / f"host{host}.log"

    def output(self, host: int) -> str:
        """Read the output of the command on a host so far."""
        log = self.log(host)
        return log.read_text(errors="replace") if log.exists() else ""

    def worker_log(self, host: int, worker: int = 0, *, stream: str = "stdout") -> Path:
        """Return the path of a torchrun worker's output file in its latest attempt.

        Args:
            worker: local rank of the worker.
            stream: "stdout" or "stderr".

        Raises:
            WorldError: no worker with this local rank has started on the host yet.
        """
        logs = list(self.folder.glob(f"host{host}/*/attempt_*/{worker}/{stream}.log"))
        if not logs:
            raise WorldError(f"netlab: no worker {worker} of host{host} has started", hint=f"see {self.log(host)}")
        return max(logs, key=lambda path: (path.stat().st_mtime_ns, path.parts[-3]))

    def codes(self) -> dict[int, int | None]:
        """Map hosts to the command's exit status (minus the number of the signal that ended it), or None if running."""
        return {host: process.poll() for host, (_, process) in self._running.items()}

    def wait(self, timeout: float) -> dict[int, int]:
        """Wait for the command to end on all hosts, and map hosts to exit statuses, as `codes` does.

        Raises:
            WorldError: the command is still running after `timeout` seconds; the command is not killed.
        """
        deadline = time.monotonic() + timeout
        try:
            ends = self._running.items()
            return {host: process.wait(max(0.0, deadline - time.monotonic())) for host, (_, process) in ends}
        except subprocess.TimeoutExpired:
            busy = [f"host{host}" for host, code in self.codes().items() if code is None]
            raise WorldError(f"netlab: still running after {timeout:g} s: {', '.join(busy)}{self._words()}") from None

    def check(self, timeout: float) -> None:
        """Wait for the command to succeed on all hosts.

        Raises:
            WorldError: the command failed on a host, or is still running; the message ends with the command's last
                output.
        """
        failed = {host: code for host, code in self.wait(timeout).items() if code != 0}
        if failed:
            codes = ", ".join(f"host{host} with {code}" for host, code in failed.items())
            raise WorldError(f"netlab: the job failed: {codes}{self._words()}", hint=f"see {self.folder}")

    def signal(self, sig: int = signal.SIGTERM, *, host: int | None = None) -> None:
        """Send a signal to the command itself (such as torchrun, as a scheduler does), not to its children.

        Raises:
            WorldError: the command is not running on this host; without `host`, on any host.
        """
        hit = 0
        for number in self._running if host is None else [host]:
            family = self._family(number)
            pids = {identity.pid for identity in family}
            hit += sum(identity.kill(sig) for identity in family if parent(identity.pid) not in pids)
        if not hit:
            raise WorldError("netlab: the job does not run" + ("" if host is None else f" on host{host}"))

    def kill(self) -> None:
        """Kill all processes of the program on all hosts, and wait for their end."""
        for host, (_, process) in self._running.items():
            # Kill repeatedly: the command may not have entered its host yet, or may be starting another process.
            while (family := self._family(host)) or process.poll() is None:
                for identity in family:
                    identity.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.02)

    def _family(self, host: int) -> list[Identity]:
        if host not in self._running:
            return []
        there = self._running[host][0]
        return [identity for identity, env in processes(there.pid_namespace) if env.get(MARK) == self._mark]

    def _words(self) -> str:
        tails = {host: self.output(host).strip().splitlines()[-15:] for host in self._running}
        return "".join(f"\n--- host{host}\n" + "\n".join(lines) for host, lines in tails.items() if lines)


def torchrun_command(
    job: str, *, python: str, nnodes: str, endpoint: str, nproc: int, restarts: int
) -> Callable[[int], list[str]]:
    """Return a function from a host to its torchrun command without the script; each rank's output goes to a file."""
    options = {
        "--nnodes": nnodes,
        "--nproc-per-node": str(nproc),
        "--max-restarts": str(restarts),
        "--rdzv-backend": "c10d",
        "--rdzv-endpoint": endpoint,
        "--rdzv-id": job,
        "--tee": "3",
    }
    flat = [word for option in options.items() for word in option]
    return lambda host: [python, "-m", "torch.distributed.run", *flat, "--log-dir", str(LOGS / job / f"host{host}")]


def find_rank(hosts: Mapping[int, Host], rank: int) -> Identity:
    """Find the worker process with a global rank: the outermost process whose environment variable RANK is this rank.

    Raises:
        WorldError: there is no such process, or there are several, because several jobs are running.
    """
    workers = []
    for host in hosts.values():
        ranked = [identity for identity, env in processes(host.pid_namespace) if env.get("RANK") == str(rank)]
        pids = {identity.pid for identity in ranked}
        workers += [identity for identity in ranked if parent(identity.pid) not in pids]
    if len(workers) != 1:
        raise WorldError(
            f"netlab: {len(workers) or 'no'} processes have rank {rank}", hint="check that exactly one job is running"
        )
    return workers[0]
