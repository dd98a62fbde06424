"""Run files of a Llama that trains in a second, and texts for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tomli_w

TABLES: dict[str, dict[str, Any]] = {
    "run": {"batch": 4},
    "model": {"dim": 16, "layers": 1, "heads": 2, "kv_heads": 1, "hidden": 32},
    "data": {"tokenizer": "bytes", "sequence": 16, "held_out": 0.3},
}


def write_run_file(path: Path, tables: dict[str, dict[str, Any]]) -> Path:
    """Write a run file with these tables, over those above; a setting of None is left out."""
    merged = {name: TABLES.get(name, {}) | tables.get(name, {}) for name in {**TABLES, **tables}}
    document = {
        name: {key: value for key, value in table.items() if value is not None} for name, table in merged.items()
    }
    path.write_text(tomli_w.dumps(document))
    return path


def write_texts(folder: Path, count: int = 40, sentence: str = "the quick brown fox jumps over the lazy dog. ") -> str:
    """Write texts that differ in a number; the glob that finds them."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        (folder / f"{number}.txt").write_text(f"text {number}: " + sentence * 4)
    return str(folder / "*.txt")
