"""A model whose state is twice as large as the memory of a rank is planned, and trained by its plan."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import tomli_w

from benchmarks.harness import Bar, Deadline
from benchmarks.parallel.quotas import processor_quotas
from benchmarks.rows import Measured, NotRun
from shoestring.parallel import Planned
from shoestring.run import load
from shoestring.testing.netlab import netlab, netlab_available

HOSTS, STEPS, GIB = 4, 3, 2**30
LIMIT = 2.5
"""Memory of a host in GiB, of which Python with torch takes 0.6."""
SHAPE = {"dim": 1024, "layers": 28, "heads": 16, "kv_heads": 16, "hidden": 2816}
STATE = 16
"""Bytes of weights, gradients and both moments of AdamW, for a weight in fp32."""
TIMEOUT = 900.0


def fits(deadline: Deadline) -> Measured | NotRun:
    """State of the model over the memory of a rank, if its plan trains; otherwise 0."""
    if reason := netlab_available():
        return NotRun(reason)
    deadline.check()
    with tempfile.TemporaryDirectory() as name, processor_quotas(HOSTS, int(LIMIT * GIB)) as group:
        folder = Path(name)
        tables = {
            "run": {
                "model": "shoestring.models.gpt:tiny",
                "data": str(folder / "text.txt"),
                "batch": 8,
                "steps": STEPS,
                "timeout": TIMEOUT,
                "folder": str(folder / "run"),
            },
            "model": SHAPE,
            "data": {"tokenizer": "bytes", "sequence": 64},
            "checkpoint": {"tiered": {"memory_every": 0, "disk_every": 0}},
        }
        (folder / "text.txt").write_text("\n".join(f"{number} squared is {number**2}" for number in range(5000)))
        (folder / "run.toml").write_text(tomli_w.dumps(tables))
        plan = folder / "plan.toml"
        with netlab(hosts=HOSTS, rate="1gbit") as lab:
            for verb in (["plan", str(folder / "run.toml"), "--tries", "1", "--out", str(plan)], ["train", str(plan)]):
                command = ["-m", "benchmarks.parallel.cli_worker", group, *verb]
                program = lab.torchrun(command, env={"OMP_NUM_THREADS": "1"})
                try:
                    program.check(timeout=TIMEOUT)
                finally:
                    program.kill()
        (record,) = (feature for feature in load(str(plan)).features if isinstance(feature, Planned))
        rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    share = STATE * record.num_weights / (LIMIT * GIB)
    done = max(row["step"] for row in rows if "loss" in row) == STEPS
    told = f"{record.num_weights:,} weights, {record.peak_gib:.2f} GiB of tensors a rank planned, {LIMIT} GiB allowed"
    return Measured(share if done else 0.0, told)


def rows() -> list[Bar]:
    """The bar of models that do not fit."""
    what = (
        "weights, gradients and optimizer state of a model that is planned and trained, over the memory of each of "
        f"{HOSTS} ranks (a cgroup's limit of {LIMIT} GiB)"
    )
    return [Bar("parallel.fits", what, ">=", 2.0, fits, kind="exact")]
