"""Recording by torch.profiler with stacks, in a process of its own.

On Python 3.11, a later garbage collection in the same process may end it with a segmentation fault.
"""

import os
import subprocess
import sys
from pathlib import Path


def test_recording_without_a_compiler():
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    env = {name: value for name, value in env.items() if not name.startswith("PYTEST")}
    file = Path(__file__).with_name("recording_without_compiler.py")
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", str(file)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, cwd=file.parents[2])
    assert "2 passed" in done.stdout, done.stdout[-3000:]
