"""Workers end with the agent that started them, also where it was killed."""

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from shoestring.distributed import join
from tests.rigs.lab_run import LabRun, environment

# A worker says when it is there, and holds the pipe open for as long as it lives.
WORKER = """
import os, signal, sys
from shoestring import lifetime
from shoestring.distributed import join
if sys.argv[1] == "watched":
    lifetime._told_by_kernel = lambda number: False
join.end_with_agent()
os.write(1, f"{os.getpid()}\\n".encode())
if sys.argv[1] == "stopped":
    os.kill(os.getpid(), signal.SIGSTOP)
signal.pause()
"""
AGENT = """
import os, signal, subprocess, sys
os.environ["TORCHELASTIC_RUN_ID"] = "x"
subprocess.Popen([sys.executable, "-c", *sys.argv[1:]])
os.close(1)
signal.pause()
"""


def pid_of(pipe, seconds):
    """What the next line says."""
    assert select.select([pipe], [], [], seconds)[0], "nothing is said"
    return int(pipe.readline())


@pytest.mark.parametrize("how", ["told by the kernel", "watched", "stopped"])
def test_a_worker_ends_with_its_agent(how):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", AGENT, WORKER, how.split()[0]]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as agent:
        assert agent.stdout
        worker = pid_of(agent.stdout, 120)
        try:
            agent.kill()
            # The end of the pipe: nobody is left who holds it.
            assert select.select([agent.stdout], [], [], 60)[0] and agent.stdout.read() == b""
        finally:
            with suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)


@pytest.mark.slow
def test_a_killed_launcher_leaves_no_worker_and_the_next_start_continues(tmp_path):
    lab_run = LabRun.prepare(tmp_path)
    command = [sys.executable, "-m", "shoestring", "train", lab_run.run, "--run.folder", str(lab_run.shared / "run")]
    command += ["--workers", "2", "--run.steps"]
    with subprocess.Popen([*command, "1000000"], env=os.environ | environment()) as launcher:
        lab_run.reach(Running(launcher), "run", 6)
        workers = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        held = [os.pidfd_open(int(worker)) for worker in workers]
        launcher.kill()
    assert len(held) >= 2
    for worker in held:
        assert select.select([worker], [], [], 60)[0], "a worker lives on"
        os.close(worker)
    reached = max(lab_run.losses("run"))
    again = [*command, str(reached + 5), "--run.resume", "auto"]
    subprocess.run(again, env=os.environ | environment(), check=True, timeout=300)
    assert max(lab_run.losses("run")) == reached + 5


class Running:
    """A process, as `LabRun.reach` asks for it."""

    def __init__(self, process):
        self.process = process

    def codes(self):
        return {0: self.process.poll()}

    def output(self, host):
        return f"it ended with {self.process.poll()}"


@pytest.mark.slow
@pytest.mark.parametrize(("run", "goes_on"), [
    (f"{join.OWN_RUN}999999999", False),
    (f"{join.OWN_RUN}{{this process}}", True),
    ("999999999", True),  # a number is what Slurm gives its jobs, and users give to torchrun as `--rdzv-id`
    ("", True),
    ("none", True),
    ("shoestring-999999999", True),
    (f"team-{join.OWN_RUN}999999999", True),
    (f"{join.OWN_RUN}run", True),
])  # fmt: skip
def test_a_worker_ends_whose_own_agent_ended_while_it_imported(run, goes_on):
    program = "from shoestring.distributed import join; join.end_with_agent(); print('goes on')"
    run = run.replace("{this process}", str(os.getpid()))
    command, environment = [sys.executable, "-c", program], os.environ | {"TORCHELASTIC_RUN_ID": run}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == ((0, "goes on\n") if goes_on else (-signal.SIGKILL, ""))
