"""What a benchmark ran on: hardware, versions and commit, as every row records them."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parent.parent
_PACKAGES = ("shoestring", "torch", "numpy", "triton")
_WRITTEN_HERE = (":!benchmarks/results", ":!docs/evidence.md")  # a run changes these itself


@dataclass(frozen=True)
class Environment:
    """The machine and the code of one run. `gpu` is None where torch sees no CUDA device; `tree` is git's."""

    cpu: str
    cores: int
    memory_gib: float
    gpu: str | None
    tree: str

    @classmethod
    def capture(cls, *, tree: str = "") -> Environment:
        """Look at this machine; `tree` is asked of git unless given (for a copy of the files without git's history).

        What is given is the answer of `git_tree` from then on, for runs that are stored as well.
        """
        if tree:
            _given[ROOT] = tree
        return cls(
            cpu=_cpu_model(),
            cores=len(os.sched_getaffinity(0)),
            memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            gpu=_gpu_model(),
            tree=tree or git_tree(),
        )

    @property
    def hardware(self) -> str:
        """One line: processor, cores this process may use, memory, GPU."""
        return f"{self.cpu}, {self.cores} cores, {self.memory_gib} GiB, {self.gpu or 'no GPU'}"

    def versions(self, *peers: str) -> dict[str, str]:
        """Versions of Python, of what every benchmark uses, and of `peers`; those not installed are left out."""
        found = {"python": platform.python_version()}
        for package in (*_PACKAGES, *peers):
            try:
                found[package] = metadata.version(package)
            except metadata.PackageNotFoundError:
                continue
        return found


_given: dict[Path, str] = {}


def git_tree(root: Path = ROOT) -> str:
    """Git's tree at `root`, with `-dirty` when a file differs from it or is new; "unknown" outside git.

    Unlike a commit it stays what it is when history is rewritten.
    """
    if root in _given:
        return _given[root]
    try:
        head = _git(root, "rev-parse", "--short=12", "HEAD^{tree}")
        changed = _git(root, "status", "--porcelain", "--", ".", *_WRITTEN_HERE)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}-dirty" if changed else head


def _git(root: Path, *args: str) -> str:
    return subprocess.run(["git", *args], cwd=root, check=True, capture_output=True, text=True).stdout.strip()


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def _gpu_model() -> str | None:
    import torch  # seconds to import, and the results can be read without it

    if not torch.cuda.is_available():
        return None
    count = torch.cuda.device_count()
    device = torch.cuda.get_device_properties(0)
    return f"{count} × {device.name} ({device.total_memory / 2**30:.0f} GiB), CUDA {torch.version.cuda}"
