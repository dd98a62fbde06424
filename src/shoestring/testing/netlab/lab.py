"""The lab: starts virtual hosts and their links, and makes hosts and links fail."""

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
    """A running lab of numbered virtual hosts, created by `netlab`. Not thread-safe."""

    def __init__(
        self,
        folder: Path,
        switch: Identity,
        spec: HostSpec,
        rate: str | None,
        logs: Path,
        *,
        standing: bool,
        coalesce: bool = False,
    ) -> None:
        self.logs = logs
        self._folder, self._switch, self._spec, self._rate = folder, switch, spec, rate
        self._coalesce = coalesce
        self._hosts: dict[int, Host] = {}
        self._jobs: list[Program] = []
        self._record = replace(lab_folders.LabRecord.mine(), switch=switch, standing=standing)
        self._record.write(folder)

    @property
    def hosts(self) -> tuple[int, ...]:
        """Numbers of the running hosts; the name of host 3 is `host3`."""
        return tuple(sorted(self._hosts))

    def add(self, host: int) -> None:
        """Start a host with empty memory and disk; its link has the lab's bandwidth.

        Raises:
            WorldError: a host with this number is running.
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
        """End a host as a power failure would: other hosts get no message; processes, memory and disk are lost."""
        gone = self._host(host)
        links.unplug(self._switch.pid, host)  # unplugged first, because sockets of ending processes would send a reset
        gone.stop()
        del self._hosts[host]
        self._save()

    def rate(self, host: int, rate: str | None, *, down: str | None = None) -> None:
        """Set the bandwidth of a host's link.

        Args:
            rate: bandwidth at which the host sends, such as "10mbit"; None for no limit.
            down: bandwidth at which the host receives; defaults to `rate`.
        """
        for text in (rate, down):
            if text is not None:
                links.bits_per_second(text)
        links.shape(self._host(host).init.pid, "eth0", rate, coalesce=self._coalesce)
        links.shape(self._switch.pid, f"h{host}", down or rate, coalesce=self._coalesce)

    def cut(self, host: int) -> None:
        """Disconnect a host's link; the host continues to run."""
        self._host(host)
        links.cut(self._switch.pid, host)

    def mend(self, host: int) -> None:
        """Reconnect a host's link after `cut`."""
        self._host(host)
        links.mend(self._switch.pid, host)

    def bytes(self, host: int) -> links.Traffic:
        """Bytes that a host's interface has received and sent since the host was added; see `Traffic`."""
        return links.counters(self._host(host).init.pid)

    def fill(self, host: int, *, free: int = 0) -> None:
        """Shrink a host's scratch disk so that `free` bytes are free."""
        self._host(host).fill(free)

    def unfill(self, host: int) -> None:
        """Restore the size of a host's scratch disk after `fill`."""
        self._host(host).unfill()

    def path(self, host: int, path: str | Path) -> Path:
        """Convert a path on a host, such as `DISK / "x"`, to a path that this process can open while the host runs."""
        return self._host(host).path(path)

    def kill(self, rank: int, sig: int = signal.SIGKILL) -> None:
        """Send a signal to the worker process whose global rank is `rank`.

        Raises:
            WorldError: no running worker has this rank, or several workers have it.
        """
        programs.find_rank(self._hosts, rank).kill(sig)

    def start(
        self, command: Sequence[str], *, hosts: Sequence[int] | None = None, env: Mapping[str, str] | None = None
    ) -> Program:
        """Start a command on hosts (by default on all), in this process's working folder, with `env` added."""
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
        """Run a command on hosts (by default on all) and wait for it; returns a mapping from hosts to their output.

        Raises:
            WorldError: the command failed on a host, or took longer than `timeout` seconds and was killed.
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
        """Start torchrun with the same arguments on each host; the rendezvous is on the first host.

        Args:
            script: the script with its arguments, or `["-m", "package.module", …]`.
            nproc: number of workers on each host.
            max_restarts: number of times that torchrun may restart the workers.
            nnodes: number of hosts, or a range such as "2:4"; defaults to all of `hosts`.
            hosts: hosts to use; defaults to all.
            env: variables to add to this process's environment. Set `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1` where
                workers are restarted; otherwise new workers may get addresses of dead workers
                (github.com/pytorch/pytorch/issues/135712).
        """
        members, name = self.hosts if hosts is None else tuple(hosts), self._name()
        command = programs.torchrun_command(
            name,
            python=sys.executable,
            nnodes=nnodes or str(len(members)),
            endpoint=f"host{members[0]}:{29400 + len(self._jobs)}",  # each job uses another port
            nproc=nproc,
            restarts=max_restarts,
        )
        settled = {"PYTHONUNBUFFERED": "1", **(env or {})}  # so that the output of a killed worker is complete
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
        """Kill all processes on all hosts; only the logs remain."""
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
    standing: bool = False,
    coalesce: bool = False,
) -> Iterator[Lab]:
    """Context with a running lab, which ends with all its processes when the block is left.

    On entry, leftovers of labs whose owners were killed are removed.

    Args:
        hosts: number of hosts, which are called `host0`, `host1`, …
        rate: bandwidth of each link in each direction, in tc's notation ("100mbit"); None for no limit.
        delay: one-way delay between any two hosts in seconds. Because kernels may lack netem, a process for each host
            delays the frames. The delay is accurate to about a millisecond, at rates up to about 100 Mbit/s.
        shm: size of each host's `/dev/shm`.
        disk: size of each host's scratch disk.
        shared: folder of the machine that all hosts see as `SHARED`, as over NFS.
        logs: empty folder for the output of jobs; by default a folder that is deleted with the lab.
        standing: whether this is the lab of `shoestring lab up`, which `shoestring lab run` and `down` look for.
        coalesce: whether to send frames in batches of one millisecond where the bandwidth is above 12 Mbit/s, which
            takes less than half of the processor time. Coalesce frames to measure network costs where hosts share
            cores. Coalescing changes a setting of the machine while the lab runs (see `coalescing`).

    Raises:
        WorldError: this process is not root, or the machine lacks namespaces or a tool; the message says which.
        ConfigError: a rate or size is malformed, or a folder does not exist.
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
        lab = Lab(folder, switch, spec, rate, folder_of_logs.resolve(), standing=standing, coalesce=coalesce)
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
