"""slurm: the batch script of the guide on a Slurm of one node, which is started for it and ended after it."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from benchmarks.harness import Bar, Measured, NotRun, main
from tests.rigs.lab_run import LabRun, difference
from tests.rigs.slurm import slurm, slurm_available

SCRIPT = Path(__file__).parents[1] / "docs" / "examples" / "slurm.sbatch"


def trained() -> float | Measured | NotRun:
    """Whether a job that the guide's script starts has the losses of a process alone; 1 or 0."""
    if reason := slurm_available():
        return NotRun(reason)
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        lab_run = LabRun.prepare(Path(one))
        expected = lab_run.local("local", workers=1)
        with slurm(Path(other)) as lab:
            job = lab.submit(SCRIPT, lab_run.run, "--run.folder", str(lab_run.shared / "job"))
            state = lab.wait(job)
        off = difference(expected, lab_run.losses("job"))
    return Measured(float(state == "COMPLETED" and off == 0), f"{state}, relative difference of the losses {off:g}")


def rows() -> list[Bar]:
    """The one bar."""
    what = (
        "a Slurm of one node runs docs/examples/slurm.sbatch: it ends with the losses of a process alone (1: it does)"
    )
    return [Bar("slurm.one-node", what, ">=", 1.0, measure=lambda deadline: trained(), kind="exact")]


if __name__ == "__main__":
    sys.exit(main("slurm", rows))
