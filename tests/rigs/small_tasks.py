"""Tasks for lm-evaluation-harness with their data on disk, one for each way in which it asks a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DOCUMENTS = 10
_CHOICES = {
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}
_ANSWERS = {
    "output_type": "generate_until",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{choices[0]}}",
    "generation_kwargs": {"until": ["\n", "e"], "max_gen_toks": 12, "do_sample": False},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}
_PROSE = {
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{prose}}",
    "metric_list": [{"metric": "bits_per_byte"}],
}
TASKS: dict[str, dict[str, Any]] = {"choices": _CHOICES, "answers": _ANSWERS, "prose": _PROSE}


def write_tasks(folder: Path, names: tuple[str, ...] = tuple(TASKS)) -> list[str]:
    """Write the files of tasks and their documents; the paths of the tasks' files."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {
            "question": f"{number} plus {number % 3} is",
            "choices": [f" {number + number % 3 + wrong}" for wrong in (0, 1, 10)],
            "answer": 0,
            "prose": f"the quick brown fox jumps {number} times; ü. " * (1 + number),
        }
        for number in range(DOCUMENTS)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    paths = []
    for name in names:
        table = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": str(folder / "rows.jsonl")},
            "test_split": "train",
            **TASKS[name],
        }
        path = folder / f"{name}.yaml"
        path.write_text(json.dumps(table))  # JSON is YAML
        paths.append(str(path))
    return paths
