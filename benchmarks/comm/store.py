"""Launches and their results: each is made once, and kept as one JSON file."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.calm import Watch, watched
from benchmarks.comm.setting import RANKS
from benchmarks.comm.spec import Spec
from benchmarks.comm.worker import TOKENS
from benchmarks.harness import origin, used
from benchmarks.machine import ROOT
from shoestring.testing.netlab import Lab, Program, netlab

PATIENCE = 300.0  # seconds for a launch to be ready


@dataclass
class Store:
    """A folder of results; `check` raises when the time is up."""

    folder: Path
    check: Callable[[], None] = field(default=lambda: None)
    ignored: bool = True
    """Whether git leaves it alone."""
    timed: bool = True
    """Whether launches whose links have a rate wait for a calm machine, as what is timed must."""

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.ignored:
            (self.folder / ".gitignore").write_text("*\n")

    def path(self, spec: Spec) -> Path:
        return self.folder / f"{spec.key}.json"

    def has(self, spec: Spec) -> bool:
        return self.path(spec).exists()

    def get(self, spec: Spec) -> dict[str, Any]:
        """The result of a launch, which is made now if it was not before."""

        def make() -> dict[str, Any]:
            spec.setting.corpus(self.folder / TOKENS)
            return launch(spec, self.folder / f"run-{spec.key}", timed=self.timed)

        return self.kept(spec.key, make)

    def kept(self, name: str, make: Callable[[], Any]) -> Any:
        """What is stored under a name; made, and stored, where nothing is."""
        path = self.folder / f"{name}.json"
        if not path.exists():
            self.check()
            fresh = path.with_suffix(f".{os.getpid()}")
            fresh.write_text(json.dumps(make(), indent=1))
            fresh.replace(path)
        return used(json.loads(path.read_text()))


def launch(spec: Spec, folder: Path, *, timed: bool = True) -> dict[str, Any]:
    """Train on four hosts: {"spec", "tree", "sources", "wall", "logs": [method][rank]}."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "spec.json").write_text(spec.text())
    names = ", ".join(method.name for method in spec.methods)
    print(f"  {spec.steps} steps of {names} at {spec.rate or 'no limit'}, seed {spec.seed} …", file=sys.stderr)
    rate = spec.rate if spec.slow_first and spec.rate else None
    calm = watched(Watch()) if timed and spec.rate else nullcontext()
    with calm, netlab(hosts=RANKS, rate=rate, coalesce=spec.coalesce) as lab:
        worker = ["-m", "benchmarks.comm.worker", str(folder / "spec.json"), str(folder)]
        job = lab.torchrun(worker, env=environment())
        began = started(lab, job, spec, folder)
        job.check(timeout=spec.timeout)
        wall = time.monotonic() - began
    ranks = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(RANKS)]
    shutil.rmtree(folder)
    logs = [list(each) for each in zip(*ranks, strict=True)]
    return {"spec": json.loads(spec.text()), **origin(), "wall": wall, "logs": logs}


def started(lab: Lab, job: Program, spec: Spec, folder: Path) -> float:
    """Wait until all ranks are ready, slow the links down, and say go: when that was."""
    end = time.monotonic() + PATIENCE
    while len(list(folder.glob("ready-*"))) < RANKS:
        if time.monotonic() > end or any(code for code in job.codes().values()):
            job.check(timeout=0)
        time.sleep(0.05)
    if spec.rate and not spec.slow_first:
        for host in lab.hosts:
            lab.rate(host, spec.rate)
    (folder / "go").touch()
    return time.monotonic()


def environment() -> dict[str, str]:
    """What the ranks need besides this process's environment."""
    return {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
