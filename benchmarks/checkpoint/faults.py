"""checkpoint.faults: failing disks under a run that trains."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.harness import Bar, Deadline, Measured
from tests.rigs.checkpointing.disk_faults import injected

POINTS = 120  # injections, evenly over the acts of both ranks


def rows(cache: Path | None = None) -> list[Bar]:
    """The bar."""

    def measure(deadline: Deadline) -> Measured:
        wrong, count = list[str](), 0
        with TemporaryDirectory() as folder:
            for _, lines in injected(Path(folder), POINTS):
                deadline.check()
                count, wrong = count + bool(lines), wrong + lines
        return Measured(1 - count / POINTS, f"{POINTS} faults{'; ' if wrong else ''}{'; '.join(wrong[:3])}")

    what = (
        "no space, no quota, read-only and I/O errors, once or for some steps, at points spread over all acts on files "
        "of two ranks on two hosts: share of 120 after which training continued, checkpoints that were safe could be "
        "restored, nothing temporary was left, and the user was told where it failed"
    )
    return [Bar("checkpoint.faults", what, ">=", 1.0, measure, kind="exact")]
