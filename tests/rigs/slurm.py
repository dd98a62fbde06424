"""A Slurm of one node, which is started for a test and ended after it; needs root, and Slurm's and munge's packages."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from shoestring.core.errors import WorldError
from tests.rigs.lab_run import environment

DAEMONS = ("munged", "mungekey", "slurmctld", "slurmd", "sbatch")
PATIENCE = 180.0

# Everything on loopback and in one folder. `linuxproc` needs no cgroups, so it runs in containers as well.
# `urgent` takes the node from `all`, whose jobs get two minutes to end. Jobs are looked at every second, and one that
# is requeued waits for as long as credentials last (5 s is the least), not for the usual minute and two minutes.
# The script derives the port where the ranks meet from the job's number: no two Slurms may count from the same one.
_CONF = """
ClusterName=lab
FirstJobId={controller}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={node}
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=1
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
MpiDefault=none
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=120
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
"""


def slurm_available() -> str | None:
    """Why no Slurm can be started here, in one line, or None when it can."""
    if os.geteuid() != 0:
        return "starting Slurm's daemons needs root"
    missing = [name for name in DAEMONS if _which(name) is None]
    return f"`{missing[0]}` is not installed (packages slurmctld, slurmd, slurm-client, munge)" if missing else None


@dataclass(frozen=True)
class Slurm:
    """A running Slurm of one node, with its folder."""

    folder: Path

    def environment(self) -> dict[str, str]:
        """For its commands, and, as sbatch hands it on, for the jobs."""
        path = f"{Path(sys.executable).parent}:{_path()}"  # so that the job finds torchrun
        return {**os.environ, **environment(), "SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": path}

    def run(self, *command: str) -> str:
        """What one of Slurm's commands printed.

        Raises:
            WorldError: it failed.
        """
        done = subprocess.run(command, env=self.environment(), capture_output=True, text=True, cwd=self.folder)
        if done.returncode != 0:
            raise WorldError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
        return done.stdout.strip()

    def submit(self, script: Path, *arguments: str) -> int:
        """Submit a batch script for the whole node: the job's number."""
        return self._batch(str(script), *arguments)

    @contextmanager
    def preempted(self) -> Iterator[None]:
        """Another job takes the node from the start of the block (or soon after) to its end."""
        gate = self.folder / "gate"
        job = self._batch("--partition=urgent", "--wrap", f"until [ -e '{gate}' ]; do sleep 0.1; done")
        try:
            yield
        finally:
            gate.touch()
            self.wait(job)
            gate.unlink()

    def _batch(self, *arguments: str) -> int:
        whole = ("--nodes=1", f"--cpus-per-task={os.cpu_count() or 1}", f"--output={self.folder}/job-%j.log")
        return int(self.run("sbatch", "--parsable", *whole, *arguments))

    def state(self, job: int) -> str:
        """RUNNING, COMPLETED, FAILED …"""
        shown = self.run("scontrol", "--oneliner", "show", "job", str(job))
        return dict(pair.split("=", 1) for pair in shown.split() if "=" in pair)["JobState"]

    def wait(self, job: int) -> str:
        """Wait for the end of a job, also in the queue: the state that it ended in.

        Raises:
            WorldError: it took too long.
        """
        end = time.monotonic() + PATIENCE
        while (state := self.state(job)) in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED"):
            if time.monotonic() > end:
                raise WorldError(f"job {job} is still {state}:\n{self.log(job)}")
            time.sleep(0.1)
        return state

    def log(self, job: int) -> str:
        """What a job has printed."""
        path = self.folder / f"job-{job}.log"
        return path.read_text() if path.exists() else ""


@contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """Start munged, slurmctld and slurmd in an empty folder, and end them, and what they run, after the block."""
    host = socket.gethostname().partition(".")[0]
    controller, node = _free_ports(2)
    conf = _CONF.format(host=host, controller=controller, node=node, folder=folder, cpus=os.cpu_count() or 1)
    (folder / "slurm.conf").write_text(conf)
    for name in ("state", "spool"):
        (folder / name).mkdir()
    with ExitStack() as stack:
        _munge(stack, folder)
        lab = Slurm(folder)
        _daemon(stack, folder, "slurmctld", "-D", "-f", f"{folder}/slurm.conf")
        _daemon(stack, folder, "slurmd", "-D", "-f", f"{folder}/slurm.conf", "-N", host)
        _until(lambda: "idle" in lab.run("sinfo", "--noheader", "--format=%T"), folder)
        stack.callback(_cancel_all, lab)
        yield lab


def _cancel_all(lab: Slurm) -> None:
    """So that no job outlives the daemons, which let theirs run on."""
    lab.run("scancel", "--user=root")
    _until(lambda: not lab.run("squeue", "--noheader"), lab.folder)


def _munge(stack: ExitStack, folder: Path) -> None:
    key, sock = folder / "munge.key", folder / "munge.socket"
    subprocess.run([_which("mungekey") or "", "--create", f"--keyfile={key}"], check=True)
    files = (f"--pid-file={folder}/munge.pid", f"--log-file={folder}/munge.log", f"--seed-file={folder}/munge.seed")
    _daemon(stack, folder, "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={sock}", *files)
    _until(sock.exists, folder)


def _daemon(stack: ExitStack, folder: Path, name: str, *arguments: str) -> None:
    log = stack.enter_context((folder / f"{name}.out").open("wb"))
    program = _which(name)
    assert program is not None
    daemon = subprocess.Popen([program, *arguments], stdout=log, stderr=log, start_new_session=True)
    stack.callback(daemon.wait)
    stack.callback(daemon.terminate)


def _until(done: Callable[[], bool], folder: Path) -> None:
    end = time.monotonic() + PATIENCE
    while True:
        with suppress(WorldError):  # the daemons are not up yet
            if done():
                return
        if time.monotonic() > end:
            words = "".join(path.read_text()[-2000:] for path in folder.glob("slurm*.out"))
            raise WorldError(f"Slurm did not come up:\n{words}")
        time.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [listener.getsockname()[1] for listener in listeners]


def _which(name: str) -> str | None:
    return shutil.which(name, path=_path())


def _path() -> str:
    return os.environ.get("PATH", "/usr/bin:/bin") + ":/usr/sbin:/sbin"
