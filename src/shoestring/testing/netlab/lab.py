"""The lab: hosts, their cables, and what may happen to them."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from shoestring.core.errors import ConfigError, WorldError
from shoestring.testing.netlab import coalescing, lab_folders, links, programs
from shoestring.testing.netlab import hosts as host_module
from shoestring.testing.netlab.hosts import Host, HostSpec
from shoestring.testing.netlab.machine import HINT, Identity, netlab_available
from shoestring.testing.netlab.programs import Program


class Lab:
    """Running hosts, numbered; made by `netlab`. Not for use from several threads at once."""

    def __init__(
        self,
        folder: Path,
        switch: Identity,
        spec: HostSpec,
        rate: str | None,
        logs: Path,
        *,
        kept: bool,
        coalesce: bool = False,
    ) -> None:
        self.logs = logs
        self._folder, self._switch, self._spec, self._rate = folder, switch, spec, rate
        self._coalesce = coalesce
        self._hosts: dict[int, Host] = {}
        self._jobs: list[Program] = []
        self._record = replace(lab_folders.LabRecord.mine(), switch=switch, kept=kept)
        self._record.write(folder)

    @property
    def hosts(self) -> tuple[int, ...]:
        """The numbers of the hosts there are now; host 3 is called `host3`."""
        return tuple(sorted(self._hosts))

    def add(self, host: int) -> None:
        """Bring a fresh host, with empty memory and disk, at the lab's rate.

        Raises:
            WorldError: there is one with that number.
        """
        if host in self._hosts:
            raise WorldError(f"netlab: there is a host{host} already")
        if not 0 <= host < links.MOST_HOSTS:
            raise ConfigError(f"netlab: host {host} is not in 0 … {links.MOST_HOSTS - 1}")
        fresh = Host.start(host, self._spec, switch=self._switch.pid, folder=self._folder, logs=self.logs)
        self._hosts[host] = fresh
        links.plug(self._switch.pid, host, fresh.init.pid, relayed=self._spec.delay > 0)
        if self._rate is not None:
            self.rate(host, self._rate)
        self._save()

    def remove(self, host: int) -> None:
        """Lose a host as when its power goes: its peers get no farewell, its processes, memory and disk are gone."""
        gone = self._host(host)
        links.unplug(self._switch.pid, host)  # first, or the dying processes' sockets would say goodbye
        gone.stop()
        del self._hosts[host]
        self._save()

    def rate(self, host: int, rate: str | None, *, down: str | None = None) -> None:
        """Shape a host's link: `rate` ("10mbit") for what it sends, `down` (else the same) for what it receives.

        None takes the limit away.
        """
        for text in (rate, down):
            if text is not None:
                links.bits_per_second(text)
        links.shape(self._host(host).init.pid, "eth0", rate, coalesce=self._coalesce)
        links.shape(self._switch.pid, f"h{host}", down or rate, coalesce=self._coalesce)

    def cut(self, host: int) -> None:
        """Pull a host's cable; it runs on alone."""
        self._host(host)
        links.cut(self._switch.pid, host)

    def mend(self, host: int) -> None:
        """Put a host's cable back."""
        self._host(host)
        links.mend(self._switch.pid, host)

    def bytes(self, host: int) -> links.Traffic:
        """The bytes that a host's interface has received and sent since the host came; see `Traffic`."""
        return links.counters(self._host(host).init.pid)

    def fill(self, host: int, *, free: int = 0) -> None:
        """Fill a host's disk up to `free` bytes; it costs no memory, as the disk is made smaller."""
        self._host(host).fill(free)

    def unfill(self, host: int) -> None:
        """Give a filled disk its size back."""
        self._host(host).unfill()

    def path(self, host: int, path: str | Path) -> Path:
        """Where a file of a host's (`DISK / "x"`, `/dev/shm/x`) is seen from outside, while the host lives."""
        return self._host(host).path(path)

    def kill(self, rank: int, sig: int = signal.SIGKILL) -> None:
        """Signal the worker with a global rank, wherever it runs.

        Raises:
            WorldError: no worker has that rank now, or more than one.
        """
        programs.find_rank(self._hosts, rank).kill(sig)

    def start(
        self, command: Sequence[str], *, hosts: Sequence[int] | None = None, env: Mapping[str, str] | None = None
    ) -> Program:
        """Start a command on the hosts named (on all by default), in this process's folder; `env` adds to its own."""
        words = list(command)
        return self._start(lambda _: words, self._name(), hosts, env)

    def run(
        self,
        command: Sequence[str],
        *,
        hosts: Sequence[int] | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float = 60.0,
    ) -> dict[int, str]:
        """Run a command on the hosts named (all) and wait: what it printed, by host.

        Raises:
            WorldError: it failed on one, or took more than `timeout` seconds and was killed.
        """
        job = self.start(command, hosts=hosts, env=env)
        try:
            job.check(timeout)
        finally:
            job.kill()
        return {host: job.output(host) for host in job.codes()}

    def torchrun(
        self,
        script: Sequence[str],
        *,
        nproc: int = 1,
        max_restarts: int = 0,
        nnodes: str | None = None,
        hosts: Sequence[int] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Program:
        """Start torchrun with the same arguments on each host, rendezvous on the first.

        Args:
            script: the script with its arguments, or `["-m", "package.module", …]`.
            nproc: workers a host.
            max_restarts: how often torchrun may start the workers again.
            nnodes: "2:4" lets the job continue with fewer hosts; None: all that are named.
            hosts: the hosts to use; None: all.
            env: added to this process's environment. Where workers are to be restarted, torch needs
                `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`, else new ones may be told the addresses of dead ones
                (github.com/pytorch/pytorch/issues/135712).
        """
        members, name = self.hosts if hosts is None else tuple(hosts), self._name()
        command = programs.torchrun_command(
            name,
            python=sys.executable,
            nnodes=nnodes or str(len(members)),
            endpoint=f"host{members[0]}:{29400 + len(self._jobs)}",  # two jobs at once must not meet
            nproc=nproc,
            restarts=max_restarts,
        )
        settled = {"PYTHONUNBUFFERED": "1", **(env or {})}  # what a killed worker printed is in its file
        return self._start(lambda host: [*command(host), *script], name, members, settled)

    def _name(self) -> str:
        return f"job{len(self._jobs)}"

    def _start(
        self,
        command: Callable[[int], list[str]],
        name: str,
        hosts: Sequence[int] | None,
        env: Mapping[str, str] | None,
    ) -> Program:
        folder = self.logs / name
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            raise ConfigError(f"netlab: {folder} is of an earlier lab", hint="give logs= an empty folder") from None
        job = Program(self._host, command, {**os.environ, **(env or {})}, folder)
        self._jobs.append(job)
        for host in self.hosts if hosts is None else hosts:
            job.join(host)
        return job

    def _host(self, host: int) -> Host:
        if host not in self._hosts:
            there = ", ".join(f"host{number}" for number in self._hosts) or "none"
            raise WorldError(f"netlab: there is no host{host}", hint=f"there are: {there}")
        return self._hosts[host]

    def _save(self) -> None:
        self._record = replace(self._record, hosts={number: host.init for number, host in self._hosts.items()})
        self._record.write(self._folder)

    def close(self) -> None:
        """End all processes on all hosts; nothing of the lab is left but its logs."""
        self._switch.kill()
        for host in self._hosts.values():
            host.stop()
        for job in self._jobs:
            job.kill()
        self._hosts.clear()


@contextlib.contextmanager
def netlab(
    hosts: int = 2,
    *,
    rate: str | None = None,
    delay: float = 0.0,
    shm: str = "1g",
    disk: str = "1g",
    shared: Path | None = None,
    logs: Path | None = None,
    kept: bool = False,
    coalesce: bool = False,
) -> Iterator[Lab]:
    """Start a lab, and end it with everything in it when the block is left, however it is left.

    First clears away what labs have left whose owners were killed, and nobody else's.

    Args:
        hosts: how many; they are called `host0`, `host1`, …
        rate: of each link, each way, as tc writes it ("100mbit"); None: as fast as the machine is.
        delay: seconds from any host to any other, one way. It is added by a process per host that carries each frame,
            as kernels without netem have none: right to about a millisecond, and good for up to about 100 Mbit/s.
        shm: the size of each host's `/dev/shm`.
        disk: the size of each host's scratch disk.
        shared: a folder of the machine that all hosts see as `SHARED`, as over NFS.
        logs: an empty folder for the output of jobs; None: one that goes with the lab.
        kept: this is the lab of `shoestring lab up`, which `run` and `down` look for.
        coalesce: let frames pass by the millisecond above 12 Mbit/s, which takes less than half of the processor time.
            For measurements of what a network costs where hosts share cores; changes a setting of the machine while the
            lab is there (see `coalescing`).

    Raises:
        WorldError: the machine lacks root, namespaces or a tool; the message says which.
        ConfigError: a rate, size or folder is not one.
    """
    spec = HostSpec(shm=shm, disk=disk, shared=shared, delay=delay)
    if not 1 <= hosts <= links.MOST_HOSTS:
        raise ConfigError(f"netlab: hosts={hosts} is not in 1 … {links.MOST_HOSTS}")
    if rate is not None:
        links.bits_per_second(rate)
    if reason := netlab_available():
        raise WorldError(reason, hint=HINT)
    lab_folders.sweep()
    coalescing.settle()
    with contextlib.ExitStack() as stack:
        stack.callback(coalescing.settle)
        folder = lab_folders.create()
        stack.callback(lab_folders.discard, folder)
        if coalesce:
            coalescing.begin(folder)
        switch = _open(stack, folder)
        folder_of_logs = logs or folder / "logs"
        folder_of_logs.mkdir(parents=True, exist_ok=True)
        lab = Lab(folder, switch, spec, rate, folder_of_logs.resolve(), kept=kept, coalesce=coalesce)
        stack.callback(lab.close)
        for host in range(hosts):
            lab.add(host)
        yield lab


def _open(stack: contextlib.ExitStack, folder: Path) -> Identity:
    (folder / "tree").mkdir()
    (folder / "names").write_text(links.names())
    waiter, pid = host_module.start_switch()
    stack.callback(waiter.wait)
    switch = Identity.of(pid)
    stack.callback(switch.kill)
    links.build_bridge(pid)
    return switch
