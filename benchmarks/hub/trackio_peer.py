"""Logs rows to trackio's own server, in trackio's environment: `PYTHON trackio_peer.py ROWS`; prints JSON."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import time

SERVER = """
import time, trackio
trackio.show(open_browser=False, block_thread=False, host="127.0.0.1", footer=False)
time.sleep(600)
"""


def main(rows: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"TRACKIO_DIR": folder, "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-c", SERVER]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)
        try:
            assert server.stdout is not None
            said = (re.search(r"http://\S+write_token=[\w-]+", line) for line in server.stdout)
            address = next(match[0] for match in said if match)
            os.environ["TRACKIO_DIR"] = f"{folder}/client"
            import trackio

            with contextlib.redirect_stdout(io.StringIO()):
                options = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
                trackio.init("p", name="r", server_url=address, **options)
                start = time.perf_counter()
                for step in range(rows):
                    trackio.log({"loss": 1 / (step + 1), "lr": 0.1, "a": step, "b": 2.0, "c": 3.0}, step=step)
                trackio.finish()
                seconds = time.perf_counter() - start
            stored = subprocess.run(
                [sys.executable, "-c", COUNT], env=environment, capture_output=True, text=True, check=True
            )
            answer = {"seconds": seconds, "version": trackio.__version__, "stored": int(stored.stdout.split()[-1])}
            print(json.dumps(answer))
        finally:
            server.kill()
            server.wait()


COUNT = """
from trackio.sqlite_storage import SQLiteStorage
import glob, sqlite3, os
total = 0
for path in glob.glob(os.environ["TRACKIO_DIR"] + "/*.db"):
    total += sqlite3.connect(path).execute("select count(*) from metrics").fetchone()[0]
print(total)
"""

if __name__ == "__main__":
    main(int(sys.argv[1]))
