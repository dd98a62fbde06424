"""checkpoint.damage: corruptions of every kind, found and survived."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.harness import Bar, Deadline, Measured
from shoestring.testing.pool import Pool
from tests.rigs.checkpointing.damage import corrupted
from tests.rigs.checkpointing.known import RunSetup

CORRUPTIONS = 10_000
SETTINGS: tuple[Mapping[str, Any], ...] = (
    {"ranks": 2},
    {"ranks": 4, "peers": "parity"},
    {"ranks": 4, "local": 2},
    {"ranks": 3, "shared": False},
    {"ranks": 1},
)


def everything(cache: Path | None, total: int, deadline: Deadline) -> Measured:
    """The share of all corruptions that were survived as they should be; resumes from what the cache says was done."""
    with TemporaryDirectory() as aside:
        notes = (cache or Path(aside)) / "damage.json"
        done: dict[str, Any] = json.loads(notes.read_text()) if notes.exists() else {"done": {}, "wrong": []}
        for number, chosen in enumerate(SETTINGS):
            setting = RunSetup(folder=str(Path(aside) / str(number)), **chosen)
            share = total // len(SETTINGS) + (number < total % len(SETTINGS))
            with Pool(setting.ranks, timeout=600) as pool:
                for count, wrong in corrupted(setting, share, done["done"].get(str(number), 0), pool=pool):
                    done["done"][str(number)] = count
                    done["wrong"] += wrong
                    notes.parent.mkdir(parents=True, exist_ok=True)
                    notes.write_text(json.dumps(done))
                    deadline.check()
    count, wrong = sum(done["done"].values()), done["wrong"]
    return Measured((count - len(wrong)) / count, f"{count} corruptions{'; ' if wrong else ''}{'; '.join(wrong[:3])}")


def rows(cache: Path | None = None) -> list[Bar]:
    """The bar; progress is kept in the folder `cache`, if there is one."""
    what = (
        "bit flips, truncations, zeroed pages, swapped ranks, checkpoints and records, damaged replicas, parity, "
        "manifests, seals and headers, missing and mixed files, with and without lost memory, on 1 to 4 ranks: share "
        "of 10,000 corruptions that were found, and from which all ranks fell back to the same, newest whole step"
    )
    return [Bar("checkpoint.damage", what, ">=", 1.0, partial(everything, cache, CORRUPTIONS), kind="exact")]
