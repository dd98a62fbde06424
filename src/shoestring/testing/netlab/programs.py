"""Programs on the hosts of a lab: one command, started on several hosts, its output in one file a host."""

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

MARK = "SHOESTRING_LAB_JOB"  # in the environment of a job's processes, so that all can be found, whoever started them


class Program:
    """One command on several hosts of a lab; made by `Lab.start` and `Lab.torchrun`.

    `folder` has what the hosts printed: `host0.log` and so on, and for torchrun `host0/`, with the output of each
    worker of each attempt.
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
        """Start the command on a further host, or again on one that has been removed and added.

        Raises:
            WorldError: there is no such host, or the command still runs on it.
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
        """The file with what the command printed on a host, standard output and error together."""
        return self.folder / f"host{host}.log"

    def output(self, host: int) -> str:
        """What the command has printed on a host so far."""
        log = self.log(host)
        return log.read_text(errors="replace") if log.exists() else ""

    def worker_log(self, host: int, worker: int = 0, *, stream: str = "stdout") -> Path:
        """Under torchrun: the output of a worker (by its local rank) in its latest attempt; "stdout" or "stderr".

        Raises:
            WorldError: no such worker has started there yet.
        """
        found = list(self.folder.glob(f"host{host}/*/attempt_*/{worker}/{stream}.log"))
        if not found:
            raise WorldError(f"netlab: no worker {worker} of host{host} has started", hint=f"see {self.log(host)}")
        return max(found, key=lambda path: (path.stat().st_mtime_ns, path.parts[-3]))

    def codes(self) -> dict[int, int | None]:
        """Per host: how the command ended (negative: by that signal), None while it runs."""
        return {host: process.poll() for host, (_, process) in self._running.items()}

    def wait(self, timeout: float) -> dict[int, int]:
        """Wait for the end of the command on all hosts: its exit status per host (negative: by that signal).

        Raises:
            WorldError: it still runs after `timeout` seconds; it is not killed.
        """
        deadline = time.monotonic() + timeout
        try:
            ends = self._running.items()
            return {host: process.wait(max(0.0, deadline - time.monotonic())) for host, (_, process) in ends}
        except subprocess.TimeoutExpired:
            busy = [f"host{host}" for host, code in self.codes().items() if code is None]
            raise WorldError(f"netlab: still running after {timeout:g} s: {', '.join(busy)}{self._words()}") from None

    def check(self, timeout: float) -> None:
        """Wait, and hold the command to success.

        Raises:
            WorldError: it failed somewhere, or still runs; the message ends with its last words.
        """
        failed = {host: code for host, code in self.wait(timeout).items() if code != 0}
        if failed:
            codes = ", ".join(f"host{host} with {code}" for host, code in failed.items())
            raise WorldError(f"netlab: the job failed: {codes}{self._words()}", hint=f"see {self.folder}")

    def signal(self, sig: int = signal.SIGTERM, *, host: int | None = None) -> None:
        """Signal the command itself, not what it has started: torchrun, say, as a scheduler does that wants the host.

        Raises:
            WorldError: the command does not run there.
        """
        hit = 0
        for number in self._running if host is None else [host]:
            family = self._family(number)
            pids = {identity.pid for identity in family}
            hit += sum(identity.kill(sig) for identity in family if parent(identity.pid) not in pids)
        if not hit:
            raise WorldError("netlab: the job does not run" + ("" if host is None else f" on host{host}"))

    def kill(self) -> None:
        """Kill all its processes on all hosts, and wait for the end."""
        for host, (_, process) in self._running.items():
            # Again and again, as the command may not have reached its host yet, or have been starting another.
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
    """The torchrun command for each host, up to the script: c10d rendezvous at `endpoint`, output by rank in files."""
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
    """The worker with a global rank: the outermost process that has it as RANK in its environment.

    Raises:
        WorldError: there is none, or more than one (two jobs run).
    """
    found = []
    for host in hosts.values():
        ranked = [identity for identity, env in processes(host.pid_namespace) if env.get("RANK") == str(rank)]
        pids = {identity.pid for identity in ranked}
        found += [identity for identity in ranked if parent(identity.pid) not in pids]
    if len(found) != 1:
        raise WorldError(f"netlab: {len(found) or 'no'} processes have rank {rank}", hint="is the job up? one job only")
    return found[0]
