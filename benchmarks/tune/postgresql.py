"""A PostgreSQL server for one test or measurement: run by an unprivileged user, on a socket, without a port."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Self

USER = "nobody"
CONNECTIONS = 400


def programs() -> Path | None:
    """The folder of the newest server that Debian's package `postgresql` has installed, if there is one."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    return found[-1].parent if found else None


class PostgresServer:
    """A server in a temporary folder of its own, as a context. `stop` ends it at once, as a crash does; `start`
    recovers what was committed."""

    def __init__(self) -> None:
        bin_folder = programs()
        assert bin_folder is not None, "PostgreSQL is not installed"
        self.bin = bin_folder
        self._temporary = TemporaryDirectory(prefix="pg-")
        self.folder = Path(self._temporary.name)
        self._process: subprocess.Popen[bytes] | None = None
        self._as: dict[str, Any] = {"user": USER, "group": "nogroup"} if os.geteuid() == 0 else {}
        if self._as:
            shutil.chown(self.folder, USER, "nogroup")
        self._call("initdb", "--auth=trust", "--username=tune", "--no-sync", f"--pgdata={self.data}")

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def url(self) -> str:
        return f"postgresql+psycopg://tune@/postgres?host={self.folder}"

    def start(self, seconds: float = 60.0) -> None:
        """Start it and wait until it answers."""
        settings = {"listen_addresses": "", "unix_socket_directories": self.folder, "max_connections": CONNECTIONS}
        options = [part for key, value in settings.items() for part in ("-c", f"{key}={value}")]
        with (self.folder / "server.log").open("ab") as log:
            command = [str(self.bin / "postgres"), "-D", str(self.data), *options]
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, cwd=self.folder, start_new_session=True, **self._as
            )
        until = time.monotonic() + seconds
        while subprocess.run(
            [self.bin / "pg_isready", "-h", self.folder], stdout=subprocess.DEVNULL, check=False
        ).returncode:
            assert time.monotonic() < until, (self.folder / "server.log").read_text()[-2000:]
            time.sleep(0.05)

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait()
            self._process = None

    def _call(self, program: str, *arguments: str) -> None:
        subprocess.run(
            [self.bin / program, *arguments], check=True, stdout=subprocess.DEVNULL, cwd=self.folder, **self._as
        )

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()
        self._temporary.cleanup()
