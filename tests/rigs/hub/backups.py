"""A backup of a hub into which runs arrive meanwhile, and are removed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.rigs.hub.server import HubServer

BESIDE = """
import subprocess, sys
from pathlib import Path
from shoestring_hub.server import backup
from shoestring_hub.server.configure import Place
folder, database, to, run = sys.argv[1:]
models, shoestring = backup._models, [sys.executable, "-m", "shoestring", "hub"]

def while_others_work():
    for model in models():
        if model.__name__ == "File":  # its runs have been read
            subprocess.run([*shoestring, "push", run], check=True, timeout=20)
            clean = [*shoestring, "clean", folder, *(["--database", database] if database else [])]
            print(subprocess.run(clean, capture_output=True, text=True, timeout=20).stderr)
        yield model

backup._models = while_others_work
backup.back_up(Place(Path(folder), database), Path(to))
"""
"""Makes a backup; after the table of runs has been read, a run is pushed, and the hub is told to clean up."""


def back_up_while_others_work(server: HubServer, to: Path, run: Path, database: str = "") -> str:
    """Back up a hub while a run is pushed to it; returns what `clean` says meanwhile."""
    command = [sys.executable, "-c", BESIDE, str(server.folder), database, str(to), str(run)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert not done.returncode, done.stderr
    return done.stdout


def restored(to: Path, backup: Path) -> str:
    """Restore a backup to a hub on SQLite; what that says."""
    command = [sys.executable, "-m", "shoestring", "hub", "restore", str(to), "--backup", str(backup)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert not done.returncode, done.stderr
    return done.stdout
