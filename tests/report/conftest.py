"""Run folders as a run, a crash and an attacker leave them."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import pytest

HOSTILE = "</script><img src=x onerror=\"document.documentElement.dataset.pwned='yes'\"><!--"


@dataclass
class Folder:
    """A run folder to be written part by part."""

    path: Path
    name: str = "quickstart"
    steps: int = 40
    rows: list = field(default_factory=list)

    def settings(self, extra: str = "") -> "Folder":
        self.path.mkdir(parents=True, exist_ok=True)
        text = f"[run]\nname = {json.dumps(self.name)}\nsteps = {self.steps}\n[optim.adamw]\nlr = 0.001\n{extra}"
        (self.path / "run.toml").write_text(text)
        return self

    def metrics(self, loss=lambda step: 2 + 3 * math.exp(-step / 10), tail: str = "") -> "Folder":
        for step in range(1, self.steps + 1):
            row = {"step": step, "time": 1000.0 + step / 2, "loss": loss(step), "bits_per_byte": loss(step) / 2}
            row |= {"lr": 1e-3 / step, "tokens_per_second": 14_000.0 + step, "memory_gib": 0.42, "data_wait": 0.003}
            if step % 10 == 0:
                row |= {"held_out_loss": loss(step) + 0.1, "held_out_bits_per_byte": loss(step) / 2 + 0.05}
            self.rows.append(row)
        (self.path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in self.rows) + tail)
        return self

    def put(self, name: str, value: object) -> "Folder":
        (self.path / name).write_text(json.dumps(value))
        return self

    def summary(self, **other) -> "Folder":
        whole = {
            "name": self.name,
            "status": "finished",
            "message": "all steps done",
            "steps": self.steps,
            "total_steps": self.steps,
            "tokens": self.steps * 8192,
            "seconds": self.steps / 2,
            "parameters": 1_130_000,
            "bits_per_byte": {"training": 1.87, "held out": 1.91},
            "baselines": {"gzip -9": 2.01, "xz -9": 1.63, "5-gram (Witten-Bell)": 1.97},
            "samples": [{"prompt": "def ", "text": "read(self):\n    return 1\n"}],
            "features": [
                {"name": "parallel.ddp", "seams": ["SHARD"], "settings": {"mb": 25}, "why": "default with 2 ranks"}
            ],
            "reductions": [
                {
                    "feature": "comm.bf16",
                    "unit": "bytes per step",
                    "used": 2.1e6,
                    "without": 4.2e6,
                    "measured": True,
                    "cost": "rounding",
                }
            ],
            "ranks": [{"rank": rank, "host": "laptop", "device": "cpu", "threads": 1} for rank in range(2)],
            "notes": ["bf16 is slow here"],
        }
        return self.put("summary.json", whole | other)

    def traces(self, ranks: int = 2, name: str = "backward") -> "Folder":
        for rank in range(ranks):
            totals = [
                {"name": name, "kind": "compute", "count": self.steps, "seconds": 8.0 + rank, "bytes": 0},
                {"name": "all-reduce", "kind": "wire", "count": self.steps, "seconds": 2.0, "bytes": 84_000_000},
            ]
            self.put(f"trace-{rank}.jsonl", {"rank": rank, "host": "laptop", "totals": totals})
        return self


@pytest.fixture
def hostile():
    """Text that would run, were it taken for markup."""
    return HOSTILE


@pytest.fixture
def new(tmp_path):
    """A function that begins a run folder: new("a", steps=3)."""
    return lambda folder="run", /, **fields: Folder(tmp_path / folder, **fields).settings()


@pytest.fixture
def whole(new):
    """A finished run with everything a run can leave."""
    folder = new().metrics().summary().traces()
    folder.put(
        "environment.json", {"versions": {"torch": "2.13.0"}, "host": "laptop", "command": ["shoestring", "train"]}
    )
    return folder
