"""HubRun folders as a run leaves them, without training one."""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path


def rows(first: int, last: int, seed: int = 0) -> str:
    """Lines of metrics of the steps from `first` to `last`; every tenth step is evaluated as well."""
    drawn = random.Random(f"{seed} {first}")
    lines = []
    for step in range(first, last + 1):
        loss = 2 + 3 * math.exp(-step / 300) + drawn.gauss(0, 0.05)
        lines.append(
            {"step": step, "time": 1e9 + step / 2, "loss": loss, "lr": 1e-3 / step, "grad_norm": drawn.random()}
        )
        lines[-1] |= {"tokens": step * 8192.0, "tokens_per_second": 14_000 + drawn.random()}
        if step % 10 == 0:
            lines.append({"step": step, "time": 1e9 + step / 2, "held_out_loss": loss + 0.1})
    return "".join(json.dumps(line) + "\n" for line in lines)


def write_run(folder: Path, *, steps: int = 50, name: str = "small", seed: int = 0, files: int = 3) -> Path:
    """Write a run folder with metrics, a report, checkpoints and what describes it."""
    drawn = random.Random(seed)
    (folder / "checkpoints" / f"{steps}").mkdir(parents=True)
    settings = (
        f"[run]\nname = {json.dumps(name)}\nsteps = {steps}\nseed = {seed}\n[optim.adamw]\nlr = {drawn.random()}\n"
    )
    (folder / "run.toml").write_text(settings)
    (folder / "metrics.jsonl").write_text(rows(1, steps, seed))
    events = [{"event": event, "time": 1e9, "host": "h", "rank": 0, "step": 0} for event in ("started", "finished")]
    (folder / "history.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (folder / "summary.json").write_text(json.dumps({"name": name, "status": "finished", "steps": steps}))
    (folder / "environment.json").write_text(json.dumps({"versions": {"torch": "2"}, "host": "h"}))
    (folder / "report.html").write_text("<!doctype html><title>report</title><script>document.title = 'ran'</script>")
    for number in range(files):
        (folder / "checkpoints" / f"{steps}" / f"part-{number}.bin").write_bytes(drawn.randbytes(1000 + number))
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of all files of a folder by their paths in it, without what a killed process had not put in place,
    which is no part of a run, and which the next writer removes."""
    left = re.compile(r"\..*\.[0-9a-f]{8}\.tmp")
    files = (path for path in folder.rglob("*") if path.is_file() and not left.fullmatch(path.name))
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
