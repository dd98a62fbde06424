"""Processes end with their parents, told by the kernel or by a thread that looks."""

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress

import pytest

CHILD = """
import os, sys, signal
from shoestring import lifetime
how, parent = sys.argv[1], int(sys.argv[2]) or os.getppid()
if how == "end_after":
    lifetime.end_after(parent, lambda: os._exit(0))
else:
    lifetime.end_with(parent, signal.SIGTERM)
os.write(1, f"{os.getpid()}\\n".encode())
signal.pause()
"""
PARENT = """
import os, signal, subprocess, sys
subprocess.Popen([sys.executable, "-c", *sys.argv[1:]])
os.close(1)
signal.pause()
"""


@pytest.mark.parametrize("how", ["end_with", "end_after"])
def test_a_process_ends_soon_after_its_parent_was_killed(how):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", PARENT, CHILD, how, "0"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as parent:
        assert select.select([parent.stdout], [], [], 60)[0]
        child = int(parent.stdout.readline())
        try:
            parent.kill()
            assert select.select([parent.stdout], [], [], 30)[0] and parent.stdout.read() == b""  # nobody holds it
        finally:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("how", ["end_with", "end_after"])
def test_a_process_ends_at_once_if_its_parent_has_ended_before(how):
    """As another process than the one that is named has become the parent."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", CHILD, how, "1"], env=environment, check=False, timeout=60)
    assert done.returncode == (-signal.SIGTERM if how == "end_with" else 0)
