"""The commands `shoestring lab up`, `run` and `down`: a lab of virtual hosts for trying slow links by hand.

    shoestring lab up --hosts 2 --rate 10mbit
    shoestring lab run --host host0 -- ping -c 3 host1
    shoestring lab run -- torchrun --nproc-per-node 1 train.py
    shoestring lab down

`up` leaves a process running that owns the lab; `down` ends this process and thereby the lab.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from shoestring.core.errors import ConfigError, WorldError
from shoestring.testing.netlab import lab_folders
from shoestring.testing.netlab.hosts import DISK, HostSpec, inside
from shoestring.testing.netlab.lab import netlab
from shoestring.testing.netlab.machine import environment

_KEEPER = "from shoestring.testing.netlab.by_hand import keep; keep()"


def up(
    hosts: int = 2,
    rate: str | None = None,
    *,
    delay: float = 0.0,
    shm: str = "1g",
    disk: str = "1g",
    shared: Path | None = None,
    coalesce: bool = False,
) -> None:
    """Start a lab that runs until `down`; the arguments are the same as for `netlab`.

    Raises:
        WorldError: a lab is already up, or this machine cannot run one; the message says why.
    """
    if lab_folders.kept_lab():
        raise WorldError("a lab is already up", hint="`shoestring lab down` ends it")
    HostSpec(shm=shm, disk=disk, delay=delay, shared=shared)
    words = [str(hosts), rate or "", str(delay), shm, disk, str(shared.resolve()) if shared else "", "yes" * coalesce]
    pipe = subprocess.PIPE
    keeper = subprocess.Popen(
        [sys.executable, "-c", _KEEPER, *words],
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=pipe,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert keeper.stdout is not None
    with keeper.stdout:
        line = keeper.stdout.readline().strip()
        if line != "up":
            raise WorldError(line or "the lab's keeper ended at once")
    print(f"{hosts} hosts, host0 to host{hosts - 1}, at {rate or 'full speed'}; scratch disk at {DISK} on each")
    print("next: shoestring lab run --host host0 -- bash")


def keep() -> None:
    """Main function of the process that owns the lab: start the lab described by `sys.argv`; wait for a signal."""
    signals = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # signals stay pending until the lab is complete
    hosts, rate, delay, shm, disk, shared, coalesce = sys.argv[1:]
    folder, links = Path(shared) if shared else None, {"rate": rate or None, "delay": float(delay)}
    try:
        with netlab(int(hosts), **links, shm=shm, disk=disk, shared=folder, standing=True, coalesce=bool(coalesce)):
            print("up", flush=True)
            with open(os.devnull, "w") as nowhere:  # noqa: PTH123 (what follows has no reader)
                os.dup2(nowhere.fileno(), 1)
                os.dup2(nowhere.fileno(), 2)
            signal.sigwait(signals)
    except (WorldError, ConfigError) as error:
        print(error, flush=True)


def down() -> None:
    """End the lab that `up` started, and remove leftovers of labs whose owners were killed.

    Raises:
        WorldError: no lab is up.
    """
    record = lab_folders.kept_lab()
    if record is None:
        lab_folders.sweep()
        raise WorldError("no lab is up", hint="`shoestring lab up` starts one")
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(record.owner.pid)
        try:
            record.owner.kill(signal.SIGTERM)
            ended = select.poll()
            ended.register(handle, select.POLLIN)
            ended.poll()
        finally:
            os.close(handle)
    lab_folders.sweep()


def run(command: Sequence[str], host: str | None = None) -> int:
    """Run a command on one host, connected to this terminal; or on all hosts, with host names before output lines.

    On all hosts, a command `torchrun …` gets options for a rendezvous on the first host, unless it has such options.

    Returns:
        The exit status of the command; on all hosts, the first exit status that is not 0.

    Raises:
        WorldError: no lab is up, or the lab has no such host.
        ConfigError: there is no command.
    """
    record = lab_folders.kept_lab()
    if record is None:
        raise WorldError("no lab is up", hint="`shoestring lab up` starts one")
    if not command:
        raise ConfigError("lab run: no command", hint="shoestring lab run -- ping -c 3 host1")
    hosts = {f"host{number}": identity.pid for number, identity in record.hosts.items()}
    if host is not None:
        if host not in hosts:
            raise WorldError(f"the lab has no {host}", hint=f"it has {', '.join(hosts)}")
        return subprocess.run(inside(hosts[host], command), env=environment()).returncode
    command, pipe, merged = with_rendezvous(command, list(hosts)), subprocess.PIPE, subprocess.STDOUT
    running = {
        name: subprocess.Popen(
            inside(pid, command), stdin=subprocess.DEVNULL, stdout=pipe, stderr=merged, text=True, env=environment()
        )
        for name, pid in hosts.items()
    }

    def echo(name: str, lines: IO[str]) -> None:
        for line in lines:
            sys.stdout.write(f"{name}: {line}")
            sys.stdout.flush()

    readers = [threading.Thread(target=echo, args=(name, process.stdout)) for name, process in running.items()]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    return next((code for process in running.values() if (code := process.wait())), 0)


def with_rendezvous(command: Sequence[str], hosts: Sequence[str]) -> list[str]:
    """Add options for a rendezvous on the first host to a command `torchrun …`; leave other commands unchanged."""
    program, *arguments = command
    if Path(program).name != "torchrun" or any(word.startswith(("--rdzv", "--nnodes")) for word in arguments):
        return list(command)
    options = ["--nnodes", str(len(hosts)), "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{hosts[0]}:29400"]
    return [program, *options, "--rdzv-id", str(os.getpid()), *arguments]
