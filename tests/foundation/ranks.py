"""Starts a script as several ranks on loopback and ends them all, whatever happens."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"


def environment(**more: str) -> dict[str, str]:
    """This process's, without a rank; modules of this folder and the package can be imported; one thread."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    path = os.pathsep.join([str(SOURCE), str(HERE)])
    return inherited | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"} | more


def run(script: Path, *arguments: str, size: int, local_size: int, timeout: float = 300) -> None:
    """Run `script` as `size` ranks in hosts of `local_size`.

    Raises:
        AssertionError: a rank failed; with the end of what all of them wrote.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    fixed = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
    fixed |= {"LOCAL_WORLD_SIZE": str(local_size), "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), *arguments],
            env=environment(**fixed, RANK=str(rank), LOCAL_RANK=str(rank % local_size)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        outputs = [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    tails = "\n".join(f"rank {rank}:\n{output[-3000:]}" for rank, output in enumerate(outputs))
    assert all(process.returncode == 0 for process in processes), tails
