"""Starts a script as several ranks on loopback and ends them all, whatever happens."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import time
from pathlib import Path

from shoestring.testing.fork_server import fork_server, run_script

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"


def environment(**more: str) -> dict[str, str]:
    """This process's, without a rank; modules of this folder and the package can be imported; one thread."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    path = os.pathsep.join([str(SOURCE), str(HERE)])
    return inherited | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"} | more


def run(script: Path, *arguments: str, size: int, local_size: int, timeout: float = 300) -> None:
    """Run `script` as `size` ranks in hosts of `local_size`, forked from processes that have imported torch.

    Raises:
        AssertionError: a rank failed or did not end; with the end of what all of them wrote.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    fixed = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
    fixed |= {"LOCAL_WORLD_SIZE": str(local_size), "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / f"rank{rank}.log" for rank in range(size)]
        started = []
        for rank, output in enumerate(outputs):
            own = environment(**fixed, RANK=str(rank), LOCAL_RANK=str(rank % local_size))
            server = fork_server(rank % 2)
            with output.open("wb") as log:
                pid = server.fork(run_script, [str(script), *arguments], log.fileno(), environment=own)
            started.append((server, pid))
        deadline, codes = time.monotonic() + timeout, []
        try:
            for server, pid in started:
                codes.append(server.wait(pid, max(0.0, deadline - time.monotonic())))
        except TimeoutError:
            pass  # the assertion says so
        finally:
            for server, pid in started[len(codes) :]:
                os.kill(pid, signal.SIGKILL)
                server.wait(pid)
        tails = "\n".join(f"rank {rank}:\n{output.read_text()[-3000:]}" for rank, output in enumerate(outputs))
    assert codes == [0] * size, tails
